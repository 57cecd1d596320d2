"""Arrow's many layouts as the few that hold the same: what a source's schema says, and what its chunks have.

Lives here: plain types, plain columns, and how many bytes each row has. Must not: read files, know formats.

Whether text is dictionary-encoded, a view, or has 64-bit offsets is a matter of who wrote it, and may differ between
files. How large a row is depends on its values alone, not on how it was read, so that chunks are the same every time.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from paceline.server.bulk.values import BulkError

__all__ = ["one_batch", "plain_columns", "plain_schema", "refuse_other_schema", "row_bytes"]

_OFFSET_BYTES = 4


def plain_schema(schema: pa.Schema) -> pa.Schema:
    """The same fields with plain types, all nullable, without metadata. What has no plain type keeps its own."""
    return pa.schema([pa.field(field.name, _plain(field.type)) for field in schema])


def plain_columns(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """The batch as `schema`, its plain one. Copies only what has another layout."""
    arrays = [
        array if array.type == kind else array.cast(kind)
        for array, kind in zip(batch.columns, schema.types, strict=True)
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def one_batch(batches: Sequence[pa.RecordBatch], schema: pa.Schema) -> pa.RecordBatch:
    """All of their rows."""
    if len(batches) == 1:
        return batches[0]
    joined = pa.Table.from_batches(batches, schema).combine_chunks().to_batches()
    return joined[0] if joined else pa.RecordBatch.from_pylist([], schema)


def refuse_other_schema(file: str, expected: pa.Schema, found: pa.Schema) -> None:
    """Raises BulkError unless `found`, which `file` has, has the columns of `expected`, with the same types."""
    for field in expected:
        own = [other.type for other in found if other.name == field.name]
        if not own:
            raise BulkError(
                f"{file}: column {field.name!r} is missing: expected {field.type}, as in the first file; "
                f"got columns {', '.join(map(repr, found.names)) or 'none'}"
            )
        if own[0] != field.type:
            raise BulkError(f"{file}: column {field.name!r}: expected {field.type}, as in the first file; got {own[0]}")


def _plain(kind: pa.DataType) -> pa.DataType:
    if isinstance(kind, pa.BaseExtensionType):
        return _plain(kind.storage_type)
    if pa.types.is_dictionary(kind):
        return _plain(kind.value_type)
    if pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return pa.string()
    if pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind):
        return pa.binary()
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return pa.list_(_plain(kind.value_type))
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(_plain(kind.value_type), kind.list_size)
    if pa.types.is_map(kind):
        return pa.map_(_plain(kind.key_type), _plain(kind.item_type))
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(field.name, _plain(field.type)) for field in kind])
    return kind


def row_bytes(batch: pa.RecordBatch) -> npt.NDArray[np.int64]:
    """How many bytes each row's values have."""
    total = np.zeros(batch.num_rows, np.int64)
    for array in batch.columns:
        total += _value_bytes(array)
    return total


def _value_bytes(array: pa.Array) -> npt.NDArray[np.int64] | int:
    """How many bytes each value has: one number if all have as many."""
    kind: pa.DataType = array.type
    if pa.types.is_string(kind) or pa.types.is_binary(kind):
        return np.diff(_offsets(array)) + _OFFSET_BYTES
    if pa.types.is_list(kind) or pa.types.is_map(kind):
        offsets = _offsets(array)
        children = (array.keys, array.items) if pa.types.is_map(kind) else (array.values,)
        total = np.full(len(array), _OFFSET_BYTES)
        for child in children:
            total += _spans(child, offsets)
        return total
    if pa.types.is_fixed_size_list(kind):
        each = _value_bytes(array.values.slice(array.offset * kind.list_size, len(array) * kind.list_size))
        size = int(kind.list_size)
        return each * size if isinstance(each, int) else np.asarray(each.reshape(len(array), size).sum(axis=1))
    if pa.types.is_struct(kind):
        return sum((_value_bytes(child) for child in array.flatten()), 0)
    if pa.types.is_nested(kind) or pa.types.is_run_end_encoded(kind):
        raise pa.ArrowInvalid(f"columns of type {kind} aren't supported")  # pyarrow doesn't make others of them rightly
    return 0 if pa.types.is_null(kind) else -(-int(kind.bit_width) // 8)


def _offsets(array: pa.Array) -> npt.NDArray[np.int64]:
    """Where each value begins among the bytes or the elements, and where the last one ends."""
    buffer = array.buffers()[1]
    if buffer is None or not len(array):
        return np.zeros(len(array) + 1, np.int64)
    whole: npt.NDArray[np.int32] = np.frombuffer(buffer, np.int32)
    return whole[array.offset : array.offset + len(array) + 1].astype(np.int64)


def _spans(child: pa.Array, offsets: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """How many bytes the elements of each list have."""
    each = _value_bytes(child.slice(offsets[0], offsets[-1] - offsets[0]))
    if isinstance(each, int):
        return np.diff(offsets) * each
    ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(each)])
    return np.asarray(np.diff(ends[offsets - offsets[0]]))
