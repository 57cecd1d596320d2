"""Converts what callers hold (arrays, nested lists, scalars) to an array in the form in which a v2 datatype is sent.

Lives here: the choice of dtype for Python values, and conversion between datatypes. Must not live here: messages and
names of tensors; callers put the name in front of an error's text. Rule: a conversion keeps the values or raises
ValueError. One loss is intended: rounding, of a float to a narrower float and of any number to BF16.
"""

from __future__ import annotations

import reprlib
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from paceline.protos.datatypes import Datatype, UnknownDatatypeError, by_dtype
from paceline.protos.tensors import bf16_from_float32

Array = npt.NDArray[Any]

# From here on, a float64 may stand for another integer than the one that was written.
_EXACT_IN_FLOAT64: Final = 2.0**53
_BF16_MAGNITUDE: Final = 0x7FFF
_BF16_INFINITY: Final = 0x7F80


def to_array(value: npt.ArrayLike) -> Array:
    """The value as an array: an array as it is, anything else by numpy's rules, with two differences.

    Text and bytes become object arrays (numpy's own string dtypes cut off trailing NULs). Integers that numpy would
    turn into floats, because only uint64 holds them, become uint64. Instances of ndarray's subclasses become plain
    arrays, as matrices keep two dimensions whatever is done to them. Raises ValueError for ragged nesting, for integers
    that don't fit into 64 bits together, and for masked arrays with masked elements: there is nothing to send for
    these.
    """
    if np.ma.is_masked(value):
        raise ValueError("expected an array without masked elements; fill them, as with .filled(0)")
    array = np.asarray(value)
    if isinstance(value, np.ndarray):
        return array
    if array.dtype.kind in "SU":
        return np.asarray(value, dtype=object)
    if array.dtype == np.float64 and np.max(np.abs(array), initial=0) >= _EXACT_IN_FLOAT64:
        return _large_integers(np.asarray(value, dtype=object), array)
    return _large_integers(array, array) if array.dtype.kind == "O" else array


def _large_integers(written: Array, otherwise: Array) -> Array:
    if not written.size or not all(isinstance(item, int) for item in written.flat):
        return otherwise
    try:
        return written.astype(np.uint64)
    except OverflowError as error:
        raise ValueError("no 64-bit datatype holds all these integers") from error


def datatype_of(array: Array) -> Datatype:
    """The datatype that an array is sent as unless told otherwise. Raises TypeError if there is none."""
    try:
        return by_dtype(array.dtype)
    except UnknownDatatypeError as error:
        raise TypeError(f"no v2 datatype for an array of {array.dtype}") from error


def cast(array: Array, datatype: Datatype) -> Array:
    """The array in a dtype that `datatype` is sent in; the same array if nothing changes.

    BF16 is returned as its bits: uint16 is taken for such bits, ml_dtypes' bfloat16 is returned as it is, and every
    other number, whole ones included, is rounded to the nearest FP32, and that to the nearest BF16. Raises TypeError if
    no conversion makes sense (text to number or back), and ValueError if a value would be lost: out of range, a
    fraction to an integer, an integer that FP16, FP32 or FP64 can't hold.
    """
    if datatype.name == "BYTES":
        if not array.size:
            return array.astype(object)  # numpy takes an empty list for one of floats
        if array.dtype.kind not in "OSU":
            raise TypeError(f"BYTES takes bytes or str, got {array.dtype}")
        for item in array.flat if array.dtype.kind == "O" else ():
            if not isinstance(item, bytes | str):
                raise TypeError(f"BYTES takes bytes or str, got {type(item).__name__}")
        return array
    if datatype.name == "BF16":
        is_ready = array.dtype.name == "bfloat16" or (array.dtype.kind, array.dtype.itemsize) == ("u", 2)
    else:
        is_ready = array.dtype == datatype.dtype
    return array if is_ready else _to_number(array, datatype)


def _to_number(array: Array, datatype: Datatype) -> Array:
    if array.dtype.name == "bfloat16":
        array = array.astype(np.float32)
    if array.dtype.kind not in "biuf":
        elements = array.ravel().tolist() if array.dtype.kind in "OSU" else ()
        other = next((reprlib.repr(one) for one in elements if not isinstance(one, int | float)), array.dtype)
        raise TypeError(f"{datatype.name} takes numbers, got {other}")
    if datatype.name == "BF16":
        with np.errstate(over="ignore", invalid="ignore"):
            bits = bf16_from_float32(array.astype(np.float32))
        _refuse_overflow(array, (bits & _BF16_MAGNITUDE) != _BF16_INFINITY, datatype.name)
        return bits
    if datatype.dtype.kind == "f":
        with np.errstate(over="ignore", invalid="ignore"):
            floats: Array = array.astype(datatype.dtype)
        _refuse_overflow(array, np.isfinite(floats), datatype.name)
        if array.dtype.kind in "iu":
            large = np.abs(floats) >= 2.0 ** (np.finfo(datatype.dtype).nmant + 1)  # those below are exact
            for integer, as_float in zip(array[large].tolist(), floats[large].tolist(), strict=True):
                if integer != as_float:
                    raise ValueError(f"{datatype.name} can't hold {integer}: too many digits")
        return floats
    if array.dtype.kind == "f" and (others := array[~np.isfinite(array) | (np.trunc(array) != array)]).size:
        raise ValueError(f"{datatype.name} takes whole numbers, got {others[0]}")
    # As Python integers: numpy compares int64 with uint64 as floats.
    limits = None if datatype.dtype.kind == "b" else np.iinfo(datatype.dtype)
    low, high = (0, 1) if limits is None else (int(limits.min), int(limits.max))
    if array.size and not (low <= int(array.min()) and int(array.max()) <= high):
        raise ValueError(f"{datatype.name} takes {low} to {high}, got {array.min()} to {array.max()}")
    return array.astype(datatype.dtype)


def _refuse_overflow(array: Array, stays_finite: Array, name: str) -> None:
    if np.any(np.isfinite(array) & ~stays_finite):
        raise ValueError(f"{name} can't hold {array.min()} to {array.max()}: out of range")
