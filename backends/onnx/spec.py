"""What an ONNX Runtime session, and the file, say about a model.

Lives here: which inputs and outputs are served, and what the user is told about that. Must not: onnxruntime; the
session is passed as an object.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from paceline.backends.onnx.datatypes import NodeArg, is_known, tensor_spec, why_unknown
from paceline.backends.onnx.file import operators, without_shape
from paceline.backends.onnx.model_files import Stamp
from paceline.backends.spec import ModelSpec

__all__ = ["Found", "Session", "find_spec"]

_DYNAMIC = "DynamicQuantize"
"""ONNX's DynamicQuantizeLinear, and ONNX Runtime's own: they scale a tensor by its smallest and largest number."""

_log = logging.getLogger("paceline.backends.onnx")


class Session(Protocol):
    """The methods of a session that are used here."""

    def get_inputs(self) -> Sequence[NodeArg]: ...
    def get_outputs(self) -> Sequence[NodeArg]: ...
    def get_overridable_initializers(self) -> Sequence[NodeArg]: ...


@dataclass(frozen=True, slots=True)
class Found:
    """A model's spec. `left_out`: outputs left out although nobody asked for that, as pairs of name and reason.
    `rounds_by` as in `Rounding`. `stamps`: of the files that the session was made of."""

    spec: ModelSpec
    left_out: tuple[tuple[str, str], ...] = ()
    rounds_by: str = ""
    stamps: Mapping[str, Stamp] = field(default_factory=dict)

    def tell(self, model: str) -> None:
        for name, why in self.left_out:
            _log.warning("model '%s' is served without its output '%s': %s", model, name, why)


def find_spec(name: str, path: Path, session: Session, declared: ModelSpec | None) -> Found:
    """The spec of model `name` in `path`. Inputs that have an initializer are optional, and left out if the protocol
    can't carry them. Outputs that it can't carry are left out unless the configuration names them or there are no
    others. Raises LoadError."""
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
    left_out_why = tuple((node.name, why_unknown(node)) for node in left_out) if declared is None else ()
    return Found(spec, left_out_why, next((one for one in sorted(operators(path)) if one.startswith(_DYNAMIC)), ""))


def _served_outputs(
    nodes: Sequence[NodeArg], declared: ModelSpec | None
) -> tuple[Sequence[NodeArg], Sequence[NodeArg]]:
    """The outputs that the protocol has datatypes for or that the configuration names, or all if there are none of
    these; and those that it has no datatypes for."""
    named = {tensor.name for tensor in declared.outputs} if declared is not None else set()
    served = [node for node in nodes if is_known(node) or node.name in named]
    return (served, [node for node in nodes if not is_known(node)]) if served else (nodes, ())
