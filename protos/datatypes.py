"""The v2 datatypes: name on the wire, numpy dtype, bytes per element, field of the typed contents.

Lives here: the table and the ways to look things up in it. Must not live here: the conversion of data
(protos/tensors.py).

Rule: one row per datatype is the only place where names, dtypes and fields meet; everything else is derived from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from paceline.protos import model_config_pb2


class UnknownDatatypeError(ValueError):
    """A datatype name or a numpy dtype that the protocol has no datatype for."""


@dataclass(frozen=True, slots=True)
class Datatype:
    """One v2 datatype and its forms.

    `dtype` is little-endian, as on the wire. BF16, which numpy lacks, is held as its bit patterns in '<u2'. BYTES is
    held as an object array of `bytes`; its elements differ in size, so `item_bytes` is 0. `contents_field` is the
    field of InferTensorContents that carries the datatype, None where only the raw form can.
    """

    name: str
    dtype: np.dtype[Any]
    item_bytes: int
    contents_field: str | None


_ROWS: Final = tuple(
    Datatype(name, dtype, 0 if dtype.hasobject else dtype.itemsize, contents_field)
    for name, dtype, contents_field in (
        ("BOOL", np.dtype("?"), "bool_contents"),
        ("UINT8", np.dtype("u1"), "uint_contents"),
        ("UINT16", np.dtype("<u2"), "uint_contents"),
        ("UINT32", np.dtype("<u4"), "uint_contents"),
        ("UINT64", np.dtype("<u8"), "uint64_contents"),
        ("INT8", np.dtype("i1"), "int_contents"),
        ("INT16", np.dtype("<i2"), "int_contents"),
        ("INT32", np.dtype("<i4"), "int_contents"),
        ("INT64", np.dtype("<i8"), "int64_contents"),
        ("FP16", np.dtype("<f2"), None),
        ("FP32", np.dtype("<f4"), "fp32_contents"),
        ("FP64", np.dtype("<f8"), "fp64_contents"),
        ("BF16", np.dtype("<u2"), None),
        ("BYTES", np.dtype("O"), "bytes_contents"),
    )
)

DATATYPES: Final[Mapping[str, Datatype]] = MappingProxyType({row.name: row for row in _ROWS})
"""Every v2 datatype by its name."""

# By dtype alone, '<u2' is UINT16: bit patterns of BF16 cannot be told from it.
_BY_KIND: Final = {(row.dtype.kind, row.item_bytes): row for row in _ROWS if row.name not in ("BF16", "BYTES")}

CONFIG_DATATYPES: Final[Mapping[int, str]] = MappingProxyType(
    {
        number: "BYTES" if name == "TYPE_STRING" else name.removeprefix("TYPE_")
        for name, number in model_config_pb2.DataType.items()
        if name != "TYPE_INVALID"
    }
)
"""The v2 name for each number of the model configuration's DataType; TYPE_INVALID has none."""

CONFIG_NUMBERS: Final[Mapping[str, int]] = MappingProxyType({name: number for number, name in CONFIG_DATATYPES.items()})
"""The number of the model configuration's DataType for each v2 name: CONFIG_DATATYPES the other way round."""


def by_name(name: str) -> Datatype:
    """Returns the datatype called `name` on the wire, such as 'FP32'; raises UnknownDatatypeError."""
    try:
        return DATATYPES[name]
    except (KeyError, TypeError):  # TypeError: what can't be a key
        raise UnknownDatatypeError(f"unknown datatype: expected one of {', '.join(DATATYPES)}, got {name!r}") from None


def by_dtype(dtype: np.dtype[Any]) -> Datatype:
    """Returns the datatype for arrays of `dtype`, in either byte order; raises UnknownDatatypeError.

    Objects, byte strings and text are BYTES. The bfloat16 of ml_dtypes is BF16; it is known by its name, so that
    ml_dtypes is not needed. '<u2' is UINT16, never BF16.
    """
    if dtype.kind in "OSU":
        return DATATYPES["BYTES"]
    if dtype.name == "bfloat16":
        return DATATYPES["BF16"]
    found = _BY_KIND.get((dtype.kind, dtype.itemsize))
    if found is None:
        raise UnknownDatatypeError(f"no datatype for numpy dtype: expected one for {', '.join(DATATYPES)}, got {dtype}")
    return found


def datatype_of(dtype: np.dtype[Any], declared: Datatype) -> Datatype:
    """Returns `declared` if its arrays have this dtype, as bits of BF16 can't be told from UINT16; else as `by_dtype`,
    which raises UnknownDatatypeError."""
    return declared if declared.dtype == dtype else by_dtype(dtype)
