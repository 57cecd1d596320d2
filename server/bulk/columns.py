"""Which column feeds which input of a model, and which columns are written.

Lives here: the job's columns, checked at its start, and what is made of a chunk by them. Must not: read or write files,
call a model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa

from paceline.backends.lengths import Lengths
from paceline.backends.spec import Array
from paceline.clients.description import ModelDescription
from paceline.protos.datatypes import by_name
from paceline.server.bulk.results import Results, Table
from paceline.server.bulk.rows import Rows
from paceline.server.bulk.values import BadRow, BulkError, Chunk

__all__ = ["Columns"]


class Columns:
    """Raises BulkError, which lists what there is, for what can't be done with any row.

    `schema` is the input's. `description` is the model's: it has a batch axis if `description.batching` isn't None.
    `map` names the columns of inputs, {input: column}; others have their input's name, and optional inputs without such
    a column are left out. `keep` are columns that are written as they are, before the outputs. `outputs` are {column:
    output}; empty: all outputs, by their own names. BYTES are written as text, but for those outputs that `binary`
    names. `lengths`: those of `Computes`.

    `names` are the columns to read. `outputs` are the names of the outputs to ask for. `output_schema` is that of all
    tables. Pure, and the same for all threads.
    """

    names: tuple[str, ...]
    outputs: tuple[str, ...]
    output_schema: pa.Schema

    def __init__(
        self,
        description: ModelDescription,
        schema: pa.Schema,
        *,
        map: Mapping[str, str] | None = None,
        keep: Sequence[str] = (),
        outputs: Mapping[str, str] | None = None,
        binary: Sequence[str] = (),
        lengths: Lengths | None = None,
    ) -> None:
        self._batched, self._lengths = description.batching is not None, lengths
        lead = 1 if self._batched else 0
        mapped = map or {}
        self._inputs = {one.name: (mapped.get(one.name, one.name), one) for one in description.inputs}
        missing = [column for column, _ in self._inputs.values() if column not in schema.names]
        if missing:
            raise BulkError(f"expected a column '{missing[0]}', got {', '.join(schema.names)}")
        self._kept = tuple(keep)
        named = outputs or {one.name: one.name for one in description.outputs}
        found = {one.name: one for one in description.outputs}
        self._columns = {column: found[name] for column, name in named.items()}
        self.names = tuple(dict.fromkeys([*(column for column, _ in self._inputs.values()), *keep]))
        self.outputs = tuple(dict.fromkeys(named.values()))
        fields = [schema.field(name) for name in keep]
        for column, one in self._columns.items():
            kind = pa.from_numpy_dtype(by_name(one.datatype).dtype)
            for size in reversed(one.shape[lead:]):
                kind = pa.list_(kind, size)
            fields.append(pa.field(column, kind))
        self.output_schema = pa.schema(fields)

    def rows(self, chunk: Chunk) -> Rows:
        """The chunk's rows as the model takes them. Those that it can't be given are `bad`, with the reasons."""
        inputs: dict[str, Array] = {}
        for name, (column, one) in self._inputs.items():
            values = chunk.table.column(column)
            while hasattr(values, "flatten"):
                values = values.flatten()
            shape = (len(chunk.numbers), *one.shape[1 if self._batched else 0 :])
            inputs[name] = values.to_numpy().astype(by_name(one.datatype).dtype, copy=False).reshape(shape)
        return Rows(inputs, np.arange(len(chunk.numbers)), (), self._batched, self._lengths)

    def table(self, chunk: Chunk, rows: Rows, results: Results) -> Table:
        """What is written of `chunk`: the outputs of its `rows`, all of which are in `results`, beside what is kept of
        them. Outputs that don't fit into the columns' types make their row a bad one."""
        places = np.concatenate([one.places for one in results.computed] or [rows.good[:0]])
        order = np.argsort(places)
        arrays = [chunk.table.column(name).take(pa.array(places[order])) for name in self._kept]
        for field in list(self.output_schema)[len(self._kept) :]:
            parts = [one.outputs[self._columns[field.name].name] for one in results.computed]
            parts = parts if self._batched else [one[None] for one in parts]
            array = pa.array(np.concatenate(parts)[order].ravel() if parts else [])
            arrays.append(_nested(array, field.type))
        failed = [BadRow(int(chunk.numbers[one.place]), one.reason) for one in results.failed]
        batch = pa.RecordBatch.from_arrays(arrays, schema=self.output_schema)
        return Table(batch, sorted([*chunk.bad, *rows.bad, *failed]))


def _nested(leaf: pa.Array, kind: pa.DataType) -> pa.Array:
    if not pa.types.is_fixed_size_list(kind):
        return leaf.cast(kind)
    return pa.FixedSizeListArray.from_arrays(_nested(leaf, kind.value_type), type=kind)
