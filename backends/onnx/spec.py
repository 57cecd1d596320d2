"""What an ONNX Runtime session, and the file, say about a model, in our terms.

Lives here: which inputs and outputs are served, what the user is told about that, and whether a model can serve what a
configuration declares. Must not: onnxruntime; the session and what describes a tensor are passed as objects.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from paceline.backends.errors import LoadError
from paceline.backends.onnx.model_files import Facts, Stamp
from paceline.backends.spec import ModelSpec, TensorSpec

_DATATYPES = {
    "tensor(bool)": "BOOL",
    "tensor(uint8)": "UINT8",
    "tensor(uint16)": "UINT16",
    "tensor(uint32)": "UINT32",
    "tensor(uint64)": "UINT64",
    "tensor(int8)": "INT8",
    "tensor(int16)": "INT16",
    "tensor(int32)": "INT32",
    "tensor(int64)": "INT64",
    "tensor(float16)": "FP16",
    "tensor(float)": "FP32",
    "tensor(double)": "FP64",
    "tensor(bfloat16)": "BF16",
    "tensor(string)": "BYTES",
}


class NodeArg(Protocol):
    """An input or output of a session. Free dimensions are names or None."""

    @property
    def name(self) -> str: ...
    @property
    def type(self) -> str: ...
    @property
    def shape(self) -> Sequence[int | str | None]: ...


def is_known(node: NodeArg) -> bool:
    """Whether the protocol has a datatype for `node`."""
    return node.type in _DATATYPES


def why_unknown(node: NodeArg) -> str:
    """Why a `node` isn't known: what its type is, and what to use instead."""
    if "map(" in node.type:
        way_out = "convert scikit-learn's classifiers with skl2onnx's options={'zipmap': False}"
    elif node.type.startswith("tensor("):
        way_out = "export the model with a Cast to another element type"
    else:
        way_out = "export the model with a tensor in its place"
    return f"{node.type} has no datatype in the v2 protocol; {way_out}"


def tensor_spec(model: str, what: str, node: NodeArg, any_rank: bool = False) -> TensorSpec:
    """`node` as a TensorSpec with complete dims; LoadError if the protocol can't carry it: no tensor, or other
    elements.

    `any_rank`: the file gives it no shape, which `node` can't tell from a scalar's. If `node` has dims all the same,
    ONNX Runtime has inferred them, and they count.
    """
    datatype = _DATATYPES.get(node.type)
    if datatype is None:
        raise LoadError(f"model '{model}': {what} '{node.name}': {why_unknown(node)}")
    dims = tuple(dim if isinstance(dim, int) and dim >= 0 else -1 for dim in node.shape)
    names = tuple(dim if isinstance(dim, str) else "" for dim in node.shape)
    any_rank = any_rank and not dims
    assumed = what == "output" and not any_rank
    return TensorSpec(
        node.name,
        datatype,
        dims,
        utf8=datatype == "BYTES",
        any_rank=any_rank,
        assumed=assumed,
        axis_names=names if any(names) else (),
    )


def check_served(model: str, served: ModelSpec, own: ModelSpec) -> None:
    """Raise LoadError unless a model of spec `own` can serve `served`: names, datatypes, no input missing."""
    _check_known(model, "input", served.inputs, own.inputs)
    _check_known(model, "output", served.outputs, own.outputs)
    for one in served.batch_inputs:
        _check_known(model, "input", [TensorSpec(name, one.datatype, ()) for name in one.targets], own.inputs)
    made = {name for one in served.batch_inputs for name in one.targets}
    needed = {tensor.name for tensor in own.inputs if not tensor.optional}
    missing = needed - made - {tensor.name for tensor in served.inputs}
    if missing:
        raise LoadError(f"model '{model}': the model's input '{min(missing)}' isn't among those served")
    for tensor in served.inputs:
        if tensor.optional and served.batched:
            raise LoadError(
                f"model '{model}': input '{tensor.name}': expected no optional inputs in a model with a batch axis, "
                "got optional: true; ONNX models can have them only with max_batch_size 0"
            )
        if tensor.optional and tensor.name in needed:
            raise LoadError(
                f"model '{model}': input '{tensor.name}': expected an initializer for it in the graph, as the "
                "default where it is left out, got optional: true without one"
            )
    if served.batched and not served.inputs:
        raise LoadError(
            f"model '{model}': expected an input, whose first dimension says how many rows a batch has, got none"
        )
    if why_not := why_not_passed(served):
        raise LoadError(f"model '{model}': {why_not}")


def why_not_passed(spec: ModelSpec) -> str:
    """Why no execution can have tensors of `spec`; "" if it can."""
    texts = [tensor.name for tensor in spec.inputs if tensor.datatype == "BYTES"]
    halves = [tensor.name for tensor in (*spec.inputs, *spec.outputs) if tensor.datatype == "BF16"]
    if not (texts and halves):
        return ""
    # BF16 needs OrtValues and IO binding, and these take no strings.
    return (
        "expected no BF16 in a model with BYTES inputs, as ONNX Runtime can't be passed both from Python, got BYTES "
        f"for {texts} and BF16 for {halves}: let the model take and give FP32 there, by a Cast, or leave outputs of "
        "BF16 out of the configuration's output"
    )


def _check_known(model: str, what: str, served: Sequence[TensorSpec], own: Sequence[TensorSpec]) -> None:
    datatypes = {tensor.name: tensor.datatype for tensor in own}
    for tensor in served:
        if tensor.name not in datatypes:
            raise LoadError(
                f"model '{model}': expected one of the model's {what}s {list(datatypes)}, got '{tensor.name}'"
            )
        if tensor.datatype != datatypes[tensor.name]:
            raise LoadError(
                f"model '{model}': {what} '{tensor.name}': expected the model's datatype "
                f"{datatypes[tensor.name]}, got {tensor.datatype}"
            )


_DYNAMIC = "DynamicQuantize"
"""ONNX's DynamicQuantizeLinear, and ONNX Runtime's own: they scale a tensor by its smallest and largest number."""

_log = logging.getLogger("paceline.backends.onnx")


class Session(Protocol):
    def get_inputs(self) -> Sequence[NodeArg]: ...
    def get_outputs(self) -> Sequence[NodeArg]: ...
    def get_overridable_initializers(self) -> Sequence[NodeArg]: ...


@dataclass(frozen=True, slots=True)
class Found:
    """A model's spec. `left_out`: outputs left out although nobody asked for that, as pairs of name and reason.
    `rounds_by` as in `Rounding`. `stamps`: of the files that the session was made of. `halves` and `trains` as in
    `Facts`."""

    spec: ModelSpec
    left_out: tuple[tuple[str, str], ...] = ()
    rounds_by: str = ""
    stamps: Mapping[str, Stamp] = field(default_factory=dict)
    halves: bool = False
    trains: bool = False

    def tell(self, model: str) -> None:
        for name, why in self.left_out:
            _log.warning("model '%s' is served without its output '%s': %s", model, name, why)
        if self.trains:
            text = (
                "model '%s' has a BatchNormalization in training mode, so answers depend on the other rows of a batch "
                "and on all executions before; export the model for inference, in PyTorch after model.eval()"
            )
            _log.warning(text, model)


def find_spec(name: str, session: Session, facts: Facts, declared: ModelSpec | None) -> Found:
    """The spec of model `name`, whose files say `facts`. Inputs that have an initializer are optional, and left out if
    the protocol can't carry them. Outputs that it can't carry are left out unless the configuration names them or there
    are no others. Raises LoadError."""
    nodes = session.get_outputs()
    named = {tensor.name for tensor in declared.outputs} if declared is not None else set()
    outputs = [node for node in nodes if is_known(node) or node.name in named] or nodes
    left_out = [node for node in nodes if not is_known(node)] if declared is None and outputs is not nodes else []
    required = [tensor_spec(name, "input", node, node.name in facts.shapeless) for node in session.get_inputs()]
    optional = [
        replace(tensor_spec(name, "input", node), optional=True)
        for node in session.get_overridable_initializers()
        if is_known(node)
    ]
    spec = ModelSpec(
        inputs=(*required, *optional),
        outputs=tuple(tensor_spec(name, "output", node, node.name in facts.shapeless) for node in outputs),
    )
    dynamic = [one for one in sorted(facts.operators | facts.inner_operators) if one.startswith(_DYNAMIC)]
    why_left_out = tuple((node.name, why_unknown(node)) for node in left_out)
    return Found(spec, why_left_out, dynamic[0] if dynamic else "", facts.stamps, facts.halves, facts.trains)
