"""Requests as a third party would make them: straight from the protocol's text, with numpy and struct.

Lives here: building messages, faulty ones included, and reading raw answers. Must not: `protos.tensors` or `clients`,
for which these are an independent check.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from paceline.protos import inference_pb2 as pb

__all__ = [
    "Array",
    "Change",
    "add_raw",
    "bytes_element",
    "infer",
    "parameter",
    "raw",
    "raw_bytes",
    "rows_of_floats",
    "shape",
]

Array = np.ndarray[Any, np.dtype[Any]]
Change = Callable[[pb.ModelInferRequest], None]
"""A change to a good request."""

_NAMES = {
    "?": "BOOL",
    "u1": "UINT8",
    "<u2": "UINT16",
    "<u4": "UINT32",
    "<u8": "UINT64",
    "i1": "INT8",
    "<i2": "INT16",
    "<i4": "INT32",
    "<i8": "INT64",
    "<f2": "FP16",
    "<f4": "FP32",
    "<f8": "FP64",
    "O": "BYTES",
}
_BY_DTYPE = {np.dtype(dtype): name for dtype, name in _NAMES.items()}


def infer(
    model: str = "m",
    inputs: Mapping[str, Array] | None = None,
    *,
    version: str = "",
    id: str = "",
    outputs: Iterable[str] = (),
    parameters: Mapping[str, object] | None = None,
) -> pb.ModelInferRequest:
    """A well-formed request, its tensors raw."""
    request = pb.ModelInferRequest(model_name=model, model_version=version, id=id)
    for name, array in (inputs or {}).items():
        add_raw(request, name, _BY_DTYPE[array.dtype], array.shape, raw_bytes(array))
    for name in outputs:
        request.outputs.add(name=name)
    for name, value in (parameters or {}).items():
        request.parameters[name].CopyFrom(parameter(value))
    return request


def add_raw(request: pb.ModelInferRequest, name: str, datatype: str, shape: Sequence[int], data: bytes) -> None:
    """Add an input, whether it makes sense or not."""
    request.inputs.add(name=name, datatype=datatype, shape=shape)
    request.raw_input_contents.append(data)


def raw_bytes(array: Array) -> bytes:
    """`array` in the raw form of the binary data extension."""
    if array.dtype == object:
        return b"".join(bytes_element(element) for element in array.ravel().tolist())
    return array.tobytes()


def bytes_element(element: bytes, length: int | None = None) -> bytes:
    """One element of BYTES; `length` is the length in its prefix, by default the true one."""
    return struct.pack("<I", len(element) if length is None else length) + element


def parameter(value: object) -> pb.InferParameter:
    """`value` in the field that its Python type suggests; a message unchanged."""
    if isinstance(value, pb.InferParameter):
        return value
    if isinstance(value, bool):
        return pb.InferParameter(bool_param=value)
    if isinstance(value, int):
        return pb.InferParameter(int64_param=value)
    if isinstance(value, float):
        return pb.InferParameter(double_param=value)
    assert isinstance(value, str)
    return pb.InferParameter(string_param=value)


def rows_of_floats(rows: int, columns: int = 2, first: float = 0) -> Array:
    """FP32 [rows, columns], all elements different."""
    return np.arange(first, first + rows * columns, dtype=np.float32).reshape(rows, columns)


def shape(tensor: int, *dims: int) -> Change:
    def change(request: pb.ModelInferRequest) -> None:
        request.inputs[tensor].shape[:] = dims

    return change


def raw(entry: int, data: bytes) -> Change:
    def change(request: pb.ModelInferRequest) -> None:
        request.raw_input_contents[entry] = data

    return change
