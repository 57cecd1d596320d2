"""Datatypes and texts as Triton's Python backend has them.

Lives here: from Triton's datatypes to numpy's and back, arrays of texts as bytes and back, and tensors' entries in a
configuration. Must not: requests, or the server. The source of names and numbers: Triton's `model_config.proto`, and
`TRITONSERVER_DataType`.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from paceline.backends.spec import Array

__all__ = [
    "deserialize_bytes_tensor",
    "get_input_config_by_name",
    "get_output_config_by_name",
    "numpy_to_triton_type",
    "serialize_byte_tensor",
    "triton_string_to_numpy",
    "triton_to_numpy_type",
    "using_decoupled_model_transaction_policy",
]

_KINDS: tuple[tuple[str, Any], ...] = (
    ("BOOL", np.bool_), ("UINT8", np.uint8), ("UINT16", np.uint16), ("UINT32", np.uint32), ("UINT64", np.uint64),
    ("INT8", np.int8), ("INT16", np.int16), ("INT32", np.int32), ("INT64", np.int64), ("FP16", np.float16),
    ("FP32", np.float32), ("FP64", np.float64), ("STRING", np.object_),
)  # fmt: skip
"""Triton's names, in the order of its numbers, which begin with 1."""
BY_NAME = {f"TYPE_{name}": kind for name, kind in _KINDS}
_BY_NUMBER = {number: kind for number, (_, kind) in enumerate(_KINDS, 1)}
_NUMBERS = {np.dtype(kind): number for number, kind in _BY_NUMBER.items()}
_TEXTS = len(_KINDS)

_LENGTH = struct.Struct("<I")

Config = Mapping[str, Any]
"""A model's configuration, as its JSON has it."""


def triton_string_to_numpy(triton_type_string: str) -> Any:
    """The numpy type of a datatype as configurations name it, such as TYPE_FP32."""
    return BY_NAME[triton_type_string]


def triton_to_numpy_type(data_type: int) -> Any:
    """The numpy type of a datatype's number; None for one that there isn't."""
    return _BY_NUMBER.get(int(data_type))


def numpy_to_triton_type(data_type: Any) -> int | None:
    """The number of the datatype of a numpy type; None if there is none."""
    dtype = np.dtype(data_type)
    return _TEXTS if dtype.kind in "SUO" else _NUMBERS.get(dtype)


def serialize_byte_tensor(input_tensor: Array) -> Any:
    """The elements of an array of texts, in C order, each after its length; () if there are none, None for an array of
    something else."""
    if input_tensor.size == 0:
        return ()
    if input_tensor.dtype.kind not in "SO":
        return None
    pieces: list[bytes] = []
    for one in input_tensor.ravel().tolist():
        text = one if isinstance(one, bytes) else str(one).encode()
        pieces += _LENGTH.pack(len(text)), text
    return b"".join(pieces)


def deserialize_bytes_tensor(encoded_tensor: bytes) -> Array:
    """The texts that `serialize_byte_tensor` made bytes of, as one vector of `bytes`."""
    texts: list[bytes] = []
    at, data = 0, bytes(encoded_tensor)
    while at < len(data):
        (size,) = _LENGTH.unpack_from(data, at)
        at += _LENGTH.size
        if at + size > len(data):
            raise ValueError(f"expected {size} bytes of an element at {at}, got {len(data) - at}")
        texts.append(data[at : at + size])
        at += size
    made: Array = np.empty(len(texts), np.object_)
    made[:] = texts
    return made


def get_input_config_by_name(model_config: Config, name: str) -> Any:
    """The entry of an input in the configuration; None if there is none."""
    return _named(model_config.get("input", ()), name)


def get_output_config_by_name(model_config: Config, name: str) -> Any:
    """The entry of an output in the configuration; None if there is none."""
    return _named(model_config.get("output", ()), name)


def using_decoupled_model_transaction_policy(model_config: Config) -> bool:
    """Whether the configuration says that the model is decoupled."""
    return bool(model_config.get("model_transaction_policy", {}).get("decoupled", False))


def _named(tensors: Sequence[Config], name: str) -> Config | None:
    return next((one for one in tensors if one["name"] == name), None)
