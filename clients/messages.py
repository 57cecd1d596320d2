"""Protocol messages from and to what callers work with: numpy arrays, Python values, frozen dataclasses.

Lives here: what both clients send and read, as pure functions. Must not live here: channels, grpc, anything that waits.
Rule: local misuse raises ValueError or TypeError naming the tensor before anything is sent; an answer that contradicts
the protocol raises ResponseError.
"""

from __future__ import annotations

from collections.abc import Iterator, KeysView, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt

from paceline.clients.casting import Array, cast, datatype_of, to_array
from paceline.clients.errors import ResponseError
from paceline.protos import tensors
from paceline.protos.datatypes import UnknownDatatypeError, by_name
from paceline.protos.inference_pb2 import (
    InferParameter,
    ModelInferRequest,
    ModelInferResponse,
)

T = TypeVar("T")

Inputs = Mapping[str, npt.ArrayLike]
ParameterValue = bool | int | float | str
Parameters = Mapping[str, ParameterValue]

_INT64_MAX: Final = 2**63 - 1
MAX_TENSOR_BYTES: Final = 2**31 - 2**20
"""The most bytes that a request's tensors may have together; the rest has room for names and shapes. protobuf writes
less than 2 GiB, and grpc.aio doesn't report a message that can't be written: it sends an empty one."""


@dataclass(frozen=True, slots=True)
class ServerMetadata:
    """A server's name and version; `extensions` are the protocol extensions it supports."""

    name: str
    version: str
    extensions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TensorMetadata:
    """An input or output of a model: `datatype` is a v2 name such as FP32; -1 in `shape` is a free dimension."""

    name: str
    datatype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ModelMetadata:
    """A model as the server describes it; `platform` names framework and format, such as `onnxruntime_onnx`."""

    name: str
    versions: tuple[str, ...]
    platform: str
    inputs: tuple[TensorMetadata, ...]
    outputs: tuple[TensorMetadata, ...]
    properties: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """A version of a model in a server's repository. `state` is READY, LOADING, UNLOADING or UNAVAILABLE, with the
    reason if the server gives one; "" if the model was never loaded. `version` is "" where none is known."""

    name: str
    version: str
    state: str
    reason: str


@dataclass(frozen=True, slots=True, eq=False)
class InferResult:
    """A model's answer: `result["name"]` is an output, iterating gives their names, and `dict(result)` has them all.

    `outputs` keeps the server's order. BYTES outputs are object arrays of bytes, BF16 outputs float32 (exact), all
    others have the numpy dtype of their datatype. Outputs that came in the raw form, except for BYTES and BF16, are
    read-only views of the bytes received: copy what you want to write to. `datatypes` are the v2 names they came as.
    `parameters` are the response's parameters as bool, int, float or str, None for an empty one. A name that isn't
    among the outputs raises KeyError.
    """

    model_name: str
    model_version: str
    id: str
    parameters: Parameters
    outputs: Mapping[str, Array] = field(repr=False)
    datatypes: Mapping[str, str]

    def __getitem__(self, name: str) -> Array:
        try:
            return self.outputs[name]
        except KeyError:
            raise KeyError(f"no output {name!r}; the model answered with {', '.join(self.outputs) or 'none'}") from None

    def __contains__(self, name: object) -> bool:
        return name in self.outputs

    def __iter__(self) -> Iterator[str]:
        return iter(self.outputs)

    def keys(self) -> KeysView[str]:
        return self.outputs.keys()


def infer_request(
    model: str,
    inputs: Inputs,
    *,
    version: str = "",
    request_id: str = "",
    outputs: Sequence[str] = (),
    parameters: Parameters | None = None,
    datatypes: Mapping[str, str] | None = None,
) -> ModelInferRequest:
    """The request for one inference, its tensors in the raw form, in the order of `inputs`.

    `inputs` maps input names to arrays of any shape (zero-dimensional and empty ones included), byte order and memory
    layout, or to anything numpy makes an array of: a list of Python floats is FP64 and one of ints INT64 unless
    `datatypes` says otherwise, as clients make it do for `plain_inputs`. Text and bytes are sent as BYTES, text as
    UTF-8. `datatypes` maps input names to the v2 datatypes to send them as: values are converted by
    `clients.casting.cast`, so float32 can be sent as BF16, and uint16 as the bits of BF16. Integer parameters are sent
    as int64, those beyond it as uint64.

    Raises ValueError or TypeError, naming the tensor or parameter, for what can't be sent.
    """
    if not checked_text("model", model):
        raise ValueError("the name of the model is empty")
    given, wanted = _by_name("inputs", inputs), _by_name("datatypes", datatypes or {})
    unknown = [name for name in wanted if name not in given]
    if unknown:
        raise ValueError(f"datatypes names {', '.join(map(repr, unknown))}, not among the inputs")
    request = ModelInferRequest(
        model_name=model, model_version=checked_text("version", version), id=checked_text("request_id", request_id)
    )
    room_bytes = MAX_TENSOR_BYTES
    for name, value in given.items():
        room_bytes -= _add_input(request, name, value, wanted.get(name), room_bytes)
    for name in name_list("outputs", outputs):
        request.outputs.add(name=checked_text("outputs", name))
    for name, parameter in _by_name("parameters", parameters or {}).items():
        request.parameters[name].CopyFrom(_parameter(name, parameter))
    return request


def plain_inputs(inputs: Inputs, datatypes: Mapping[str, str] | None) -> list[str]:
    """Names of the inputs that are Python's numbers, alone or in lists, and aren't in `datatypes`: only the model knows
    as what they are meant. Arrays say it themselves, alone or in lists, and so does text."""
    # hot path: for an array, less than a twentieth of what making the request takes
    try:
        items = inputs.items()
    except AttributeError:
        return []  # `infer_request` says what is wrong
    given, plain = datatypes or (), []
    for name, value in items:
        if isinstance(value, (np.ndarray, np.generic)) or name in given:
            continue
        first: Any = value
        while isinstance(first, list | tuple) and first:
            first = first[0]
        # An empty list may be one of anything, and None is one of nothing, which the datatype's error says.
        if isinstance(first, int | float | range | list | tuple | np.number | None):
            plain.append(name)
    return plain


def name_list(argument: str, names: Sequence[str]) -> list[str]:
    """`names` as a list, which whoever uses them checks one by one. Raises TypeError if they aren't a sequence."""
    if isinstance(names, str | bytes) or not np.iterable(names):
        raise TypeError(f"{argument}: expected a sequence of names, got {names!r}")
    return [*names]


def checked_text(argument: str, value: str) -> str:
    """`value` itself. Raises TypeError if it isn't a str, ValueError if UTF-8 can't encode it, naming the argument."""
    if not isinstance(value, str):
        raise TypeError(f"{argument}: expected a str, got {value!r}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{argument}: expected text that UTF-8 can encode, got {value!r}") from None
    return value


def _add_input(request: ModelInferRequest, name: str, value: npt.ArrayLike, wanted: str | None, room_bytes: int) -> int:
    """Adds the input to `request`; returns how many bytes the tensor has."""
    try:
        array = to_array(value)
        if wanted is None:
            datatype = datatype_of(array)
        else:
            datatype = by_name(wanted)
            array = cast(array, datatype)
        _check_room(array.size * datatype.item_bytes, room_bytes)
        raw = tensors.encode_raw(array, datatype)
        _check_room(len(raw), room_bytes)
    except (TypeError, ValueError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"input {name!r}: {error}") from error
    request.raw_input_contents.append(raw)
    request.inputs.add(name=name, datatype=datatype.name, shape=array.shape)
    return len(raw)


def _check_room(size_bytes: int, room_bytes: int) -> None:
    if size_bytes > room_bytes:
        raise ValueError(f"expected at most {room_bytes} bytes, as much as the request has room for, got {size_bytes}")


def _by_name(argument: str, values: Mapping[str, T]) -> dict[str, T]:
    try:
        items = values.items()
    except AttributeError:
        raise TypeError(f"{argument}: expected a mapping by name, got {type(values).__name__}") from None
    return {checked_text(argument, name): value for name, value in items}


def _parameter(name: str, value: ParameterValue | np.generic) -> InferParameter:
    plain = value.item() if isinstance(value, np.generic) else value
    if isinstance(plain, bool):
        return InferParameter(bool_param=plain)
    if isinstance(plain, str):
        return InferParameter(string_param=checked_text(f"parameter {name!r}", plain))
    if isinstance(plain, float):
        return InferParameter(double_param=plain)
    if not isinstance(plain, int):
        raise TypeError(f"parameter {name!r}: expected bool, int, float or str, got {type(value).__name__}")
    try:
        return InferParameter(int64_param=plain) if plain <= _INT64_MAX else InferParameter(uint64_param=plain)
    except ValueError as error:
        raise ValueError(f"parameter {name!r}: {plain} does not fit into 64 bits") from error


def infer_result(response: ModelInferResponse) -> InferResult:
    """Reads an answer whose outputs are raw or typed. Raises ResponseError, naming model and output."""
    raw = response.raw_output_contents
    if raw and len(raw) != len(response.outputs):
        raise ResponseError(
            f"model {response.model_name!r} answered with {len(response.outputs)} outputs and data for {len(raw)}"
        )
    outputs: dict[str, Array] = {}
    for index, output in enumerate(response.outputs):
        if output.name in outputs:
            raise ResponseError(f"model {response.model_name!r} answered twice with output {output.name!r}")
        try:
            datatype = by_name(output.datatype)
            array = (
                tensors.decode_raw(raw[index], datatype, output.shape)
                if raw
                else tensors.decode_contents(output.contents, datatype, output.shape)
            )
        except (tensors.TensorError, UnknownDatatypeError) as error:
            raise ResponseError(f"model {response.model_name!r}, output {output.name!r}: {error}") from error
        outputs[output.name] = tensors.float32_from_bf16(array) if datatype.name == "BF16" else array
    return InferResult(
        model_name=response.model_name,
        model_version=response.model_version,
        id=response.id,
        parameters={name: _plain(value) for name, value in response.parameters.items()},
        outputs=outputs,
        datatypes={output.name: output.datatype for output in response.outputs},
    )


def _plain(parameter: InferParameter) -> Any:
    chosen = parameter.WhichOneof("parameter_choice")
    return None if chosen is None else getattr(parameter, chosen)
