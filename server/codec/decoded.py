"""A request that was checked: what its codec gives, and the batcher and the way back take.

Lives here: the values. Must not: check anything (`server.codec.codec`).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass

from backends.base import ModelSpec
from server.codec.parameters import RequestParameters
from server.memory.client_memory import NOWHERE
from server.memory.region_tensors import Inputs, Span

__all__ = ["Asked", "DecodedRequest"]


@dataclass(slots=True)
class Asked:
    """What a request asks for, apart from its tensors. Requests of equal `key` may share a batch. `outputs` are the
    indices of the wanted outputs, in the order asked for; `classes` says of which of them only so many classes are
    wanted. `spec` is what the request is, where its model doesn't say. `size_bytes`: of all of its inputs, -1 if that
    has to be counted. `plain`: raw outputs are all that is wanted."""

    rows: int
    key: Hashable
    outputs: tuple[int, ...]
    parameters: RequestParameters
    classes: Mapping[int, int] | None = None
    spec: ModelSpec | None = None
    size_bytes: int = -1
    plain: bool = True


class DecodedRequest:
    """A request that fits its model.

    `inputs` are in the spec's order, views of the message where the datatype allows, or still in shared memory;
    `targets` says, by index, which of the outputs belong into shared memory, and where.
    """

    __slots__ = ("asked", "inputs", "targets")

    def __init__(self, inputs: Inputs, asked: Asked, targets: Mapping[int, Span] = NOWHERE) -> None:
        self.inputs = inputs
        self.asked = asked
        self.targets = targets
