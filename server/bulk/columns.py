"""Which column feeds which input of a model, and which columns are written.

Lives here: the job's columns, checked at its start, and what is made of a chunk by them. Must not: read or write files,
call a model.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from paceline.backends.lengths import Lengths
from paceline.backends.spec import fits
from paceline.clients.description import ModelDescription
from paceline.clients.messages import TensorMetadata
from paceline.protos.datatypes import by_name
from paceline.server.bulk.conversion import Dims, arrow_type, cut, decode, encode, side_by_side, takes
from paceline.server.bulk.rows import Rows, Tensor
from paceline.server.bulk.values import BadRow, BulkError, Chunk, Computed, FlagError, Places, Results, Table

__all__ = ["Columns"]


class _Fed(NamedTuple):
    """An input, and the column that feeds it, or those whose single values do side by side. `dims` are a row's.
    `lengths`: which axes of a row have which lengths."""

    name: str
    columns: tuple[str, ...]
    datatype: str
    dims: Dims
    lengths: tuple[tuple[int, int], ...]
    fill: object


class _Made(NamedTuple):
    """A column, and the output that it is made of."""

    column: str
    name: str
    datatype: str
    dims: Dims
    lengths: tuple[tuple[int, int], ...]
    type: pa.DataType


class Columns:
    """Raises BulkError, which lists what there is, for what can't be done with any row.

    `schema` is the input's. `description` is the model's: it has a batch axis if `description.batching` isn't None.
    `map` names the columns of inputs, {input: column}, or several with commas between them, if a row has one value of
    each; others have their input's name, and optional inputs without such a column are left out. `keep` are columns
    that are written as they are, before the outputs. `outputs` are {column: output}; empty: all outputs, by their own
    names. BYTES are written as text, but for those outputs that `binary` names. `lengths`: those of `Computes`.

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
        self._fed = _fed(description, schema, map or {}, lengths)
        self._made = _made(description, outputs or {one.name: one.name for one in description.outputs}, binary, lengths)
        kept = tuple(dict.fromkeys(keep))
        _check_columns(schema, kept)
        for one in self._made:
            if one.column in kept:
                raise FlagError(
                    f"column '{one.column}': expected one to be written under this name, got the input's column, which "
                    f"is kept, and the model's output '{one.name}': name that another, --output NAME={one.name}"
                )
        self._kept = kept
        self.names = tuple(dict.fromkeys([*(column for one in self._fed for column in one.columns), *kept]))
        self.outputs = tuple(dict.fromkeys(one.name for one in self._made))
        made = [pa.field(one.column, one.type) for one in self._made]
        self.output_schema = pa.schema([*(schema.field(name) for name in kept), *made])

    def rows(self, chunk: Chunk) -> Rows:
        """The chunk's rows as the model takes them. Those that it can't be given are `bad`, with the reasons."""
        faults: dict[int, str] = {}
        inputs: dict[str, Tensor] = {}
        for one in self._fed:
            parts = []
            for column in one.columns:
                own: dict[int, str] = {}
                dims = one.dims if len(one.columns) == 1 else ()
                parts.append(decode(chunk.table.column(column), one.datatype, dims, own))
                for place, reason in own.items():
                    faults.setdefault(place, f"column '{column}' (input '{one.name}'): {reason}")
            decoded = parts[0] if len(parts) == 1 else side_by_side(parts, one.dims)
            inputs[one.name] = Tensor(*decoded, one.lengths, one.fill)
        sizes = self._sizes(len(chunk.numbers), inputs, faults)
        bad = [BadRow(int(chunk.numbers[place]), reason) for place, reason in sorted(faults.items())]
        good = np.delete(np.arange(len(chunk.numbers)), [*faults])
        return Rows(inputs, good, bad, self._batched, self._lengths, sizes)

    def _sizes(self, rows: int, inputs: Mapping[str, Tensor], faults: dict[int, str]) -> Places:
        """The rows' sizes in the model's lengths. Rows of which axes of one length differ are added to `faults`."""
        lengths = self._lengths.spec.lengths if self._lengths is not None else ()
        sizes = np.zeros((rows, len(lengths)), np.int64)
        for number, length in enumerate(lengths):
            found = {
                f"{name}[{axis}]": tensor.shapes[:, axis]
                for name, tensor in inputs.items()
                for axis, its in tensor.lengths
                if its == number
            }
            first, *others = found.values()
            sizes[:, number] = first
            for place in np.flatnonzero(np.any([one != first for one in others], axis=0)).tolist() if others else ():
                got = ", ".join(f"{where}: {one[place]}" for where, one in found.items())
                faults.setdefault(place, f"expected one size in the axes of length '{length.name}', got {got}")
        return sizes

    def table(self, chunk: Chunk, rows: Rows, results: Results) -> Table:
        """What is written of `chunk`: the outputs of its `rows`, all of which are in `results`, beside what is kept of
        them. Outputs that don't fit into the columns' types make their rows bad ones."""
        fitting, faults = list[Computed](), {one.place: one.reason for one in results.failed}
        for computed in results.computed:
            if reason := self._unfit(computed):
                faults.update(dict.fromkeys(computed.places.tolist(), reason))
            else:
                fitting.append(computed)
        places: Places = np.concatenate([rows.good[:0], *[one.places for one in fitting]])
        if not np.array_equal(np.sort(np.concatenate([places, np.array([*faults], np.int64)])), rows.good):
            raise ValueError("expected each good row of the chunk in its results, once")
        arrays = []
        for made in self._made:
            array, faulty = self._encoded(made, fitting, rows)
            arrays.append(array)
            for place in places[faulty].tolist():
                what = "expected text in UTF-8, got other bytes: write them as they are, with --binary"
                faults.setdefault(place, f"output '{made.name}': {what} {made.column}")
        order = np.argsort(places)
        order = order[~np.isin(places[order], [*faults])]
        if not np.array_equal(order, np.arange(len(places))):
            arrays = [array.take(pa.array(order)) for array in arrays]
        kept = [_chosen(chunk.table.column(name), places[order]) for name in self._kept]
        failed = [BadRow(int(chunk.numbers[place]), reason) for place, reason in faults.items()]
        batch = pa.RecordBatch.from_arrays([*kept, *arrays], schema=self.output_schema)
        return Table(batch, sorted([*chunk.bad, *rows.bad, *failed]))

    def _unfit(self, computed: Computed) -> str:
        """Why the outputs of a call can't be written; "" if they can."""
        for one in self._made:
            array = computed.outputs.get(one.name)
            if array is None:
                return f"output '{one.name}': expected it in the model's answer, got {', '.join(computed.outputs)}"
            dims = list(one.dims)
            for axis, number in one.lengths:
                dims[axis] = computed.sizes[number]
            if self._batched:
                dims.insert(0, len(computed.places))
            if not fits(array.shape, dims):
                return f"output '{one.name}': expected shape {dims}, got {list(array.shape)}"
            is_widened = one.datatype == "BF16" and array.dtype == np.float32
            if array.dtype != by_name(one.datatype).dtype and not is_widened:
                return f"output '{one.name}': expected {one.datatype}, got an array of {array.dtype}"
        return ""

    def _encoded(self, made: _Made, fitting: Iterable[Computed], rows: Rows) -> tuple[pa.Array, list[int]]:
        """All rows of a column in the order of the calls, and which of them can't be written."""
        elements = [np.empty(0, by_name(made.datatype).dtype)]
        sizes = [np.empty((0, len(made.dims)), np.int64)]
        for one in fitting:
            output = one.outputs[made.name] if self._batched else one.outputs[made.name][None]
            own = np.tile(np.array(output.shape[1:], np.int64), (len(one.places), 1))
            for axis, number in made.lengths:
                own[:, axis] = rows.sizes[one.places, number]
            elements.append(cut(output, own))
            sizes.append(own)
        return encode(np.concatenate(elements[1:] or elements), np.concatenate(sizes), made.type)


def _chosen(column: pa.Array, places: Places) -> pa.Array:
    """The values at `places`, which ascend. Of slices, as there are types that Arrow can't take single values of."""
    runs = np.split(places, np.flatnonzero(np.diff(places) != 1) + 1)
    slices = [column.slice(int(run[0]), len(run)) for run in runs if len(run)]
    return slices[0] if len(slices) == 1 else pa.concat_arrays([column.slice(0, 0), *slices])


def _fed(
    description: ModelDescription, schema: pa.Schema, mapped: Mapping[str, str], lengths: Lengths | None
) -> tuple[_Fed, ...]:
    names = [one.name for one in description.inputs]
    for name in mapped:
        if name not in names:
            raise FlagError(
                f"--map {name}={mapped[name]}: expected an input of the model ({_listed(names)}), got '{name}'"
            )
    specs = {one.name: index for index, one in enumerate(lengths.spec.inputs)} if lengths is not None else {}
    fed = []
    for one in description.inputs:
        dims, column = _dims(description, one), mapped.get(one.name, one.name)
        if one.name not in mapped and column not in schema.names:
            if one.name in description.optional_inputs:
                continue
            raise FlagError(
                f"input '{one.name}' ({one.datatype}, a row has shape {list(dims)}): expected a column of this name, "
                f"or --map {one.name}=COLUMN with one of {_listed(_typed(schema))}"
            )
        columns = (column,) if column in schema.names else tuple(column.split(","))
        _check_fed(one, columns, dims, schema)
        index = specs.get(one.name)
        axes = () if lengths is None or index is None else lengths.inputs[index]
        fill = 0 if lengths is None or index is None else lengths.fills[index]
        fed.append(
            _Fed(one.name, columns, one.datatype, dims, tuple((axis - 1, number) for axis, number in axes), fill)
        )
    return tuple(fed)


def _check_fed(tensor: TensorMetadata, columns: Sequence[str], dims: Dims, schema: pa.Schema) -> None:
    _check_columns(schema, columns)
    alone = len(columns) == 1
    if not (alone or dims == (-1,) or (-1 not in dims and math.prod(dims) == len(columns))):
        raise FlagError(
            f"input '{tensor.name}': expected as many columns as a row has elements, whose shape is {list(dims)}, got "
            f"{len(columns)}: {', '.join(columns)}"
        )
    for column in columns:
        kind, own = schema.field(column).type, dims if alone else ()
        if not takes(tensor.datatype, own, kind):
            raise FlagError(
                f"column '{column}' for input '{tensor.name}': expected {_wanted(tensor.datatype, own)}, got {kind}; "
                f"columns: {_listed(_typed(schema))}"
            )


def _made(
    description: ModelDescription, named: Mapping[str, str], binary: Sequence[str], lengths: Lengths | None
) -> tuple[_Made, ...]:
    found = {one.name: one for one in description.outputs}
    specs = {one.name: index for index, one in enumerate(lengths.spec.outputs)} if lengths is not None else {}
    made = []
    for column, name in named.items():
        one = found.get(name)
        if one is None:
            raise FlagError(
                f"--output {column}={name}: expected an output of the model ({_listed(found)}), got '{name}'"
            )
        dims = _dims(description, one)
        index = specs.get(name)
        axes = () if lengths is None or index is None else lengths.outputs[index]
        kind = arrow_type(one.datatype, dims, binary=column in binary or name in binary)
        made.append(_Made(column, name, one.datatype, dims, tuple((axis - 1, number) for axis, number in axes), kind))
    texts = dict.fromkeys(name for one in made if one.datatype == "BYTES" for name in (one.column, one.name))
    for name in binary:
        if name not in texts:
            raise FlagError(f"--binary {name}: expected an output of BYTES ({_listed(texts)}), got '{name}'")
    return tuple(made)


def _dims(description: ModelDescription, tensor: TensorMetadata) -> Dims:
    """The dims of a row. Raises BulkError if it has none of its own."""
    if description.batching is None:
        return tensor.shape
    if tensor.shape[:1] != (-1,):
        raise BulkError(
            f"tensor '{tensor.name}': expected a batch axis, so that each row has its own, got shape "
            f"{list(tensor.shape)}"
        )
    return tensor.shape[1:]


def _check_columns(schema: pa.Schema, columns: Iterable[str]) -> None:
    for column in columns:
        count = len(schema.get_all_field_indices(column))
        if count != 1:
            what = "no such column" if count == 0 else f"{count} of this name"
            raise FlagError(f"column '{column}': expected one of the input's ({_listed(_typed(schema))}), got {what}")


def _wanted(datatype: str, dims: Dims) -> str:
    what = "text or binary" if datatype == "BYTES" else "numbers or booleans"
    deep = f"lists, {len(dims)} deep, of {what}" if dims else what
    alone = f", or {what} that are no lists" if dims and set(dims) <= {1, -1} else ""
    flat = ", or lists of all elements" if len(dims) > 1 and -1 not in dims else ""
    return f"{deep}{alone}{flat} ({datatype} of shape {list(dims)})"


def _typed(schema: pa.Schema) -> list[str]:
    return [f"{field.name}: {field.type}" for field in schema]


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"
