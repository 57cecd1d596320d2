"""What a session of ONNX Runtime, and the file, say of a model.

Lives here: which inputs and outputs are served, and what is to be told of it. Must not: onnxruntime; the session comes
as an object.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from backends.base import ModelSpec
from backends.onnx.datatypes import NodeArg, is_known, tensor_spec, why_unknown
from backends.onnx.file import operators, without_shape

__all__ = ["Found", "Session", "find_spec"]

_DYNAMIC = "DynamicQuantize"
"""ONNX's DynamicQuantizeLinear, and ONNX Runtime's own: they scale a tensor by its smallest and largest number."""

_log = logging.getLogger("paceline.backends.onnx")


class Session(Protocol):
    """What is asked of one."""

    def get_inputs(self) -> Sequence[NodeArg]: ...
    def get_outputs(self) -> Sequence[NodeArg]: ...
    def get_overridable_initializers(self) -> Sequence[NodeArg]: ...


@dataclass(frozen=True, slots=True)
class Found:
    """A model's spec, and what of its outputs is `left_out` without anybody having said so: name, and why. `rounds_by`
    as in `Rounding`."""

    spec: ModelSpec
    left_out: tuple[tuple[str, str], ...] = ()
    rounds_by: str = ""

    def tell(self, model: str) -> None:
        for name, why in self.left_out:
            _log.warning("model '%s' is served without its output '%s': %s", model, name, why)


def find_spec(name: str, path: Path, session: Session, declared: ModelSpec | None) -> Found:
    """Inputs that have an initializer are optional; those among them that the protocol can't carry stay unknown, and so
    do outputs that it can't carry unless the configuration names them, or there are no others. Raises LoadError."""
    inputs, (outputs, left_out) = session.get_inputs(), _served_outputs(session.get_outputs(), declared)
    shapeless = without_shape(path) if any(not node.shape for node in (*inputs, *outputs)) else frozenset()
    required = [tensor_spec(name, "input", node, node.name in shapeless) for node in inputs]
    optional = [
        replace(tensor_spec(name, "input", node), optional=True)
        for node in session.get_overridable_initializers()
        if is_known(node)
    ]
    spec = ModelSpec(
        inputs=(*required, *optional),
        outputs=tuple(tensor_spec(name, "output", node, node.name in shapeless) for node in outputs),
    )
    told = tuple((node.name, why_unknown(node)) for node in left_out) if declared is None else ()
    return Found(spec, told, next((one for one in sorted(operators(path)) if one.startswith(_DYNAMIC)), ""))


def _served_outputs(
    nodes: Sequence[NodeArg], declared: ModelSpec | None
) -> tuple[Sequence[NodeArg], Sequence[NodeArg]]:
    """Those that the protocol has datatypes for, and those that the configuration names; all, if none is left. And the
    others, as far as the protocol has none for them."""
    named = {tensor.name for tensor in declared.outputs} if declared is not None else set()
    served = [node for node in nodes if is_known(node) or node.name in named]
    return (served, [node for node in nodes if not is_known(node)]) if served else (nodes, ())
