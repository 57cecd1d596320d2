"""Rows as JSON Lines.

Lives here: Arrow arrays to JSON texts, a column at a time: a row at a time, it would take six times as
long. Must not: write files. The rule: valid JSON, whatever the rows hold, and numbers that read back as they were.
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

__all__ = ["json_lines"]

_AT_ONCE_BYTES = 1 << 20
"""A number of one byte may take five letters, and there are a few copies of them on the way."""


def json_lines(rows: pa.RecordBatch) -> Iterator[bytes]:
    """A line for each row, in pieces of many lines. NaN and infinities, which JSON doesn't have, are null; bytes are in
    Base64; what JSON has no form for, such as times, is a string."""
    if rows.nbytes > _AT_ONCE_BYTES and rows.num_rows > 1:
        half = rows.num_rows // 2
        yield from json_lines(rows.slice(0, half))
        yield from json_lines(rows.slice(half))
    else:
        lines = _objects(rows.schema.names, [_texts(column) for column in rows.columns], "}\n")
        yield pc.binary_join(pa.ListArray.from_arrays([0, len(lines)], lines), "")[0].as_buffer().to_pybytes()


def _texts(values: pa.Array) -> pa.StringArray:
    """The JSON of each value."""
    kind = values.type
    if pa.types.is_boolean(kind) or pa.types.is_integer(kind):
        texts = values.cast(pa.string())
    elif pa.types.is_floating(kind):
        texts = _floats(values.cast(pa.float32()) if pa.types.is_float16(kind) else values)
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        texts = _lists(values)
    elif pa.types.is_struct(kind):
        texts = _objects([field.name for field in kind], [_texts(column) for column in values.flatten()], "}")
    else:
        texts = pa.array([_other(value) for value in values.to_pylist()], pa.string())
    return pc.if_else(values.is_valid(), texts, "null")


def _floats(values: pa.Array) -> pa.StringArray:
    # Arrow writes the shortest text that reads back as the same number of its size, but integral ones as integers.
    texts = values.cast(pa.string())
    if pc.any(pc.equal(pc.floor(values), values)).as_py():
        texts = pc.replace_substring_regex(texts, r"^(-?[0-9]+)$", r"\1.0")
    return pc.if_else(pc.is_finite(values), texts, "null")


def _lists(values: pa.Array) -> pa.StringArray:
    lengths = pc.list_value_length(values).fill_null(0)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    inside = pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), _texts(values.flatten()))
    return pc.binary_join_element_wise("[", pc.binary_join(inside, ","), "]", "")


def _objects(names: list[str], texts: list[pa.StringArray], end: str) -> pa.StringArray:
    before = [f"{',' if place else '{'}{json.dumps(name, ensure_ascii=False)}:" for place, name in enumerate(names)]
    pieces = [piece for pair in zip(before, texts, strict=True) for piece in pair]
    return pc.binary_join_element_wise(*pieces, end, "")


def _other(value: object) -> str:
    if isinstance(value, bytes):
        value = b64encode(value).decode()
    return json.dumps(value if isinstance(value, str) else str(value), ensure_ascii=False)
