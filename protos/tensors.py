"""The tensor codec: numpy arrays from and to raw bytes and typed contents, for every v2 datatype.

Lives here: pure conversion of one tensor. Must not live here: names of models and tensors, whole requests, what a
model expects, statuses.

Rule: whatever the bytes and the shape are, the outcome is an array or a TensorError, and no more memory is taken
than the data that is really there accounts for; what a length prefix or a shape claims is checked first.

The raw form is that of Triton's binary data extension: row-major, little-endian, no padding; an element of BYTES is
its length as a uint32 followed by its bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, Final, TypeAlias

import numpy as np

from paceline.protos.datatypes import DATATYPES, Datatype
from paceline.protos.inference_pb2 import InferTensorContents

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]

# numpy's limits: it refuses higher ranks, and more than 2**63-1 bytes even where a dimension of 0 makes the tensor
# empty. The limit is counted in the widest elements there are, so that it holds for each datatype.
MAX_RANK: Final = 64
MAX_ELEMENTS: Final = (2**63 - 1) // 8

_LEAST_INTEGER_BYTES: Final = 4

_LENGTH: Final = struct.Struct("<I")
_MAX_ELEMENT_BYTES: Final = 2**32 - 1
_UINT8: Final = np.dtype("u1")
_FLOAT32: Final = np.dtype("<f4")
_UINT32: Final = np.dtype("<u4")
_QUIET_NAN_BIT: Final = 0x0040


class TensorError(ValueError):
    """Data, datatype and shape do not fit; the message says what was expected and what was there instead.

    It names neither model nor tensor: the caller, who knows them, prepends them.
    """


def element_count(shape: Sequence[int]) -> int:
    """Returns how many elements a tensor of `shape` has; 1 for the empty shape, a scalar.

    Raises TensorError for a negative dimension, a rank over 64, or dimensions whose product, zeros left out, is
    over (2**63-1)//8: numpy has no such arrays.
    """
    if len(shape) > MAX_RANK:
        raise TensorError(f"shape: expected at most {MAX_RANK} dimensions, got {len(shape)}")
    count = extent = 1
    for dim in shape:
        if dim < 0:
            raise TensorError(f"shape: expected no negative dimension, got {list(shape)}")
        count *= dim
        extent *= dim or 1
    if extent > MAX_ELEMENTS:
        raise TensorError(f"shape: expected at most {MAX_ELEMENTS} elements, got {list(shape)}")
    return count


def decode_raw(data: bytes | memoryview, datatype: Datatype, shape: Sequence[int]) -> Array:
    """Returns the tensor that `data` holds in raw form.

    Fixed-size datatypes: a read-only view of `data`, which it keeps alive; no copy, constant time, except for BOOL,
    whose bytes are all checked. BF16 comes as bit patterns in '<u2'. A view of a memoryview is as aligned as that is; a
    view of `bytes` is aligned. BYTES: a new object array of `bytes`, linear time.

    Raises TensorError when the number of bytes is not exactly what datatype and shape ask for, and for a BOOL other
    than 0 and 1: numpy does not define what such a bool does, so it must not get in.
    """
    # hot path: about 1 us for a small tensor; a tuple spares each reader of the shape protobuf's slow sequence
    shape = tuple(shape)
    count = element_count(shape)
    if type(data) is not bytes:
        try:
            data = memoryview(data).toreadonly().cast("B")
        except TypeError as error:
            raise TensorError(f"expected contiguous bytes, got a buffer that is not: {error}") from None
    if not datatype.item_bytes:
        return _decode_elements(bytes(data), count, shape)
    expected = count * datatype.item_bytes
    if len(data) != expected:
        raise TensorError(f"expected {expected} bytes for {datatype.name} of shape {list(shape)}, got {len(data)}")
    # The constructor does in one call what np.frombuffer and reshape do in two.
    array: Array = np.ndarray(shape, datatype.dtype, data)
    if datatype.dtype.kind == "b" and (highest := int(np.max(array.view(_UINT8), initial=0))) > 1:
        raise TensorError(f"expected 0 or 1 in each byte of BOOL, got {highest}")
    return array


def _decode_elements(data: bytes, count: int, shape: Sequence[int]) -> Array:
    end = len(data)
    if count * _LENGTH.size > end:
        raise TensorError(
            f"expected at least {count * _LENGTH.size} bytes for the lengths of the {count} elements of BYTES "
            f"of shape {list(shape)}, got {end}"
        )
    elements: list[bytes] = []
    append, length_at = elements.append, _LENGTH.unpack_from
    stop = 0
    for index in range(count):
        start = stop + _LENGTH.size
        if start > end:
            raise TensorError(f"expected 4 bytes for the length of element {index} of {count}, got {end - stop}")
        stop = start + length_at(data, stop)[0]
        if stop > end:
            raise TensorError(f"expected {stop - start} bytes in element {index} of {count}, got {end - start}")
        append(data[start:stop])
    if stop != end:
        raise TensorError(f"expected {count} elements of BYTES to end at byte {stop}, got {end - stop} bytes more")
    return _object_array(elements, shape)


def _object_array(elements: Sequence[Any], shape: Sequence[int]) -> Array:
    # fromiter takes each element as it is; np.array would look into sequences, and drop trailing NUL bytes.
    return np.fromiter(elements, np.dtype(object), len(elements)).reshape(shape)


def encode_raw(array: Array, datatype: Datatype) -> bytes:
    """Returns the raw form of `array`: a new `bytes`, row-major and little-endian whatever the array's layout.

    The dtype has to be that of `datatype` in any byte order: nothing is cast. BF16 takes bit patterns in 'u2' and
    the bfloat16 of ml_dtypes. BYTES takes object arrays of `bytes` or `str`, and numpy's 'S' and 'U' arrays (which
    have lost the trailing NULs of their elements); text becomes UTF-8. Linear time; raises TensorError.
    """
    if not datatype.item_bytes:
        return _encode_elements(_elements(array))
    return _little_endian(array, datatype).tobytes()


def raw_buffer(array: Array, datatype: Datatype) -> bytes | memoryview:
    """Returns the same bytes as encode_raw; as a view of `array` if that is already laid out like this."""
    if not datatype.item_bytes:
        return _encode_elements(_elements(array))
    flat = np.ascontiguousarray(_little_endian(array, datatype)).reshape(-1)
    return flat.view(_UINT8).data


def _little_endian(array: Array, datatype: Datatype) -> Array:
    # hot path: most arrays have the very dtype
    dtype = array.dtype
    if dtype == datatype.dtype:
        return array
    if datatype.name == "BF16" and dtype.name == "bfloat16":
        return np.ascontiguousarray(array).view(datatype.dtype).reshape(array.shape)
    if (dtype.kind, dtype.itemsize) == (datatype.dtype.kind, datatype.dtype.itemsize):
        return array.astype(datatype.dtype)
    raise TensorError(f"expected an array of {datatype.dtype.name} for {datatype.name}, got {dtype}")


def _elements(array: Array) -> list[bytes]:
    if array.dtype.kind not in "OSU":
        raise TensorError(f"expected an array of bytes or str for BYTES, got {array.dtype}")
    elements: list[Any] = array.ravel().tolist()
    for index, element in enumerate(elements):
        if isinstance(element, bytes):
            continue
        if not isinstance(element, str):
            raise TensorError(f"expected bytes or str in element {index} of BYTES, got {type(element).__name__}")
        try:
            elements[index] = element.encode("utf-8")
        except UnicodeEncodeError as error:
            raise TensorError(f"expected text that UTF-8 can encode in element {index} of BYTES, got {error}") from None
    return elements


def _encode_elements(elements: list[bytes]) -> bytes:
    parts: list[bytes] = []
    append, pack = parts.append, _LENGTH.pack
    for index, element in enumerate(elements):
        size = len(element)
        if size > _MAX_ELEMENT_BYTES:
            raise TensorError(f"expected at most {_MAX_ELEMENT_BYTES} bytes in element {index} of BYTES, got {size}")
        append(pack(size))
        append(element)
    return b"".join(parts)


def decode_contents(contents: InferTensorContents, datatype: Datatype, shape: Sequence[int]) -> Array:
    """Returns the tensor that `contents` holds, as a new array; linear time.

    Raises TensorError for FP16 and BF16, which travel raw only, when any field but the datatype's own is filled,
    when the number of values is not the shape's, and for values that do not fit an 8 or 16 bit datatype.
    """
    count = element_count(shape)
    field = _contents_field(datatype)
    foreign = [other.name for other, _ in contents.ListFields() if other.name != field]
    if foreign:
        raise TensorError(f"expected {datatype.name} in {field} alone, got {' and '.join(foreign)}")
    given = getattr(contents, field)
    if len(given) != count:
        raise TensorError(f"expected {count} values in {field} for shape {list(shape)}, got {len(given)}")
    if not datatype.item_bytes:
        return _object_array(given, shape)
    if not count:
        return np.empty(shape, datatype.dtype)
    packed = _packed(contents)
    if datatype.dtype.kind == "f":
        return packed.view(datatype.dtype).reshape(shape).copy()
    # A varint of one byte is the value.
    values = packed if len(packed) == count else _varints(packed)
    # Only datatypes narrower than the 32 bits of protobuf's smallest integers need a check of their range.
    if datatype.item_bytes < _LEAST_INTEGER_BYTES and datatype.dtype.kind in "iu":
        limits = np.iinfo(datatype.dtype)
        bad = values[(values < limits.min) | (values > limits.max)]
        if bad.size:
            raise TensorError(f"expected {limits.min} to {limits.max} in {field} for {datatype.name}, got {bad[0]}")
    return values.astype(datatype.dtype).reshape(shape)


def _packed(contents: InferTensorContents) -> Array:
    """The values of the one field that is filled, as they lie side by side on the wire. Taken one by one, as Python
    objects, a MiB of small integers would keep the event loop for a tenth of a second."""
    contents.DiscardUnknownFields()
    data = contents.SerializeToString()
    # A tag of one byte, and a length as a varint.
    start = 2
    while data[start - 1] > 0x7F:
        start += 1
    return np.frombuffer(data, np.uint8, offset=start)


def _varints(packed: Array) -> Array:
    """The varints in `packed`, as INT64; those of UINT64 have the same bits."""
    ends = np.flatnonzero(packed < 0x80)
    starts = np.concatenate((ends[:1] * 0, ends[:-1] + 1))
    lengths = ends - starts + 1
    values = (packed[starts] & 0x7F).astype(np.int64)
    for place in range(1, int(lengths.max())):
        longer = np.flatnonzero(lengths > place)
        values[longer] |= (packed[starts[longer] + place] & 0x7F).astype(np.int64) << 7 * place
    return values


def _contents_field(datatype: Datatype) -> str:
    if datatype.contents_field is None:
        raise TensorError(f"expected the raw form for {datatype.name}, got typed contents, which cannot carry it")
    return datatype.contents_field


def encode_contents(array: Array, datatype: Datatype) -> InferTensorContents:
    """Returns `array` as typed contents, filled in row-major order; linear time, slower than the raw form.

    Takes the same arrays as encode_raw. Raises TensorError, also for FP16 and BF16, which travel raw only.
    """
    field = _contents_field(datatype)
    contents = InferTensorContents()
    values = _little_endian(array, datatype).ravel().tolist() if datatype.item_bytes else _elements(array)
    getattr(contents, field).extend(values)
    return contents


def bf16_from_float32(array: Array) -> Array:
    """Returns the bit patterns ('<u2') of the nearest BF16 values of a float32 array; ties go to the even one.

    Values that are too large become infinity, NaN stays NaN (quiet, sign and upper payload kept). A new array, in the
    same shape. Raises TensorError for another dtype.
    """
    if (array.dtype.kind, array.dtype.itemsize) != ("f", 4):
        raise TensorError(f"expected an array of float32, got {array.dtype}")
    bits = np.ascontiguousarray(array, _FLOAT32).view(_UINT32)
    upper = bits >> np.uint32(16)
    # Adding half of the last kept bit, less one if that bit is even, carries exactly when rounding up is right.
    rounded = (bits + (upper & np.uint32(1)) + np.uint32(0x7FFF)) >> np.uint32(16)
    quieted = upper | np.uint32(_QUIET_NAN_BIT)
    return np.where(np.isnan(array), quieted, rounded).astype(DATATYPES["BF16"].dtype).reshape(array.shape)


def float32_from_bf16(array: Array) -> Array:
    """Returns BF16 bit patterns ('u2', or the bfloat16 of ml_dtypes) as a new '<f4' array of the same shape; exact.

    Raises TensorError for another dtype.
    """
    bits = _little_endian(array, DATATYPES["BF16"])
    widened = np.ascontiguousarray(bits).astype(_UINT32) << np.uint32(16)
    return widened.view(_FLOAT32).reshape(array.shape)
