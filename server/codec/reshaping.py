"""`reshape` in a configuration: from shapes as clients see them to shapes as the model sees them, and back.

Lives here: the arithmetic on one shape. Must not: arrays, messages. The rule: free dims pair up in order; loading has
checked that they can.
"""

from __future__ import annotations

from paceline.backends.spec import TensorSpec

__all__ = ["to_client", "to_model"]

Shape = tuple[int, ...]


def to_model(tensor: TensorSpec, shape: Shape, lead: int) -> Shape:
    """The model's shape for a client's; the first `lead` axes stay as they are."""
    return shape if tensor.reshape is None else _converted(shape, lead, tensor.dims, tensor.reshape)


def to_client(tensor: TensorSpec, shape: Shape, lead: int) -> Shape:
    """The client's shape for a model's; the first `lead` axes stay as they are. A model's scalar may have extra axes of
    size one."""
    if tensor.reshape is None:
        return shape
    return _converted(shape if tensor.reshape else shape[:lead], lead, tensor.reshape, tensor.dims)


def _converted(shape: Shape, lead: int, source: Shape, target: Shape) -> Shape:
    free = iter([size for size, dim in zip(shape[lead:], source, strict=True) if dim == -1])
    return (*shape[:lead], *(next(free) if dim == -1 else dim for dim in target))
