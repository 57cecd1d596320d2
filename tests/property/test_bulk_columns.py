"""Whatever rows hold: each good one comes out once, in the input's order, with exactly its own outputs.

The model answers with what it is given, so outputs have to be the arrays that columns were made of.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from paceline.backends.lengths import Lengths
from paceline.backends.spec import Array, Length, ModelSpec, TensorSpec
from paceline.clients.description import Batching, ModelDescription
from paceline.clients.messages import TensorMetadata
from paceline.protos.datatypes import by_name
from paceline.protos.tensors import bf16_from_float32, float32_from_bf16
from paceline.server.bulk.batches import batches
from paceline.server.bulk.columns import Columns
from paceline.server.bulk.rows import Rows
from paceline.server.bulk.values import BadRow, Chunk, Computed, Failed, Fixed, Results

_FILL = 7
_LEAVES = {
    "BOOL": [pa.bool_(), pa.int8()],
    "INT8": [pa.int8(), pa.int64(), pa.float32()],
    "UINT16": [pa.uint16(), pa.int32(), pa.float64()],
    "INT64": [pa.int64(), pa.uint8()],
    "FP16": [pa.float16(), pa.float64()],
    "FP32": [pa.float32(), pa.int64(), pa.bool_()],
    "FP64": [pa.float64(), pa.float32()],
    "BF16": [pa.float32(), pa.int8(), pa.uint16()],
    "BYTES": [pa.binary(), pa.large_binary(), pa.string(), pa.large_string()],
}


@dataclass(frozen=True)
class _Input:
    """`lengths`: pairs of an axis and its length. `depth`: how many lists deep its column is. `kind`: the lists'."""

    name: str
    datatype: str
    dims: tuple[int, ...]
    lengths: tuple[tuple[int, int], ...]
    leaf: pa.DataType
    depth: int
    kind: str

    @property
    def fill(self) -> int:
        return 0 if self.datatype == "BYTES" else 1 if self.datatype == "BOOL" else _FILL

    @property
    def type(self) -> pa.DataType:
        dims = self.dims if self.depth == len(self.dims) else (math.prod(self.dims),) * self.depth
        column = self.leaf
        for dim in reversed(dims):
            if self.kind == "fixed" and dim != -1:
                column = pa.list_(column, dim)
            else:
                column = pa.large_list(column) if self.kind == "large" else pa.list_(column)
        return column


@dataclass(frozen=True)
class _World:
    """`rows`: the inputs of each row, without a batch axis; None for one whose columns don't fit. `chunk` has the
    columns. `poisoned`: the places of rows that the model can't compute."""

    inputs: list[_Input]
    batched: bool
    lengths: Lengths | None
    fixed: Fixed
    by_length: bool
    max_elements: int
    chunk: Chunk = field(repr=False)
    rows: list[dict[str, Array] | None] = field(repr=False)
    poisoned: set[int]
    seed: int


def _input(number: int, random: Random, lengths: int) -> _Input:
    datatype = random.choice([*_LEAVES])
    dims = tuple(random.choices([-1, -1, -1, 1, 2, 3], k=random.choice([0, 1, 1, 2, 3])))
    free = [axis for axis, dim in enumerate(dims) if dim == -1]
    axes = tuple((axis, random.randrange(lengths)) for axis in free if lengths and random.random() < 0.7)
    depth = len(dims)
    if -1 not in dims and random.random() < 0.3:
        depth = 0 if set(dims) <= {1} else 1
    kind = random.choice(["list", "large", "fixed"])
    return _Input(f"in{number}", datatype, dims, axes, random.choice(_LEAVES[datatype]), depth, kind)


def _value(one: _Input, shape: Sequence[int], random: Random) -> Array:
    numbers = [random.randrange(2 if one.datatype == "BOOL" or pa.types.is_boolean(one.leaf) else 100)
               for _ in range(math.prod(shape))]  # fmt: skip
    if one.datatype == "BYTES":
        array = np.array([b"%d" % number for number in numbers], object)
    elif one.datatype == "BF16":
        array = bf16_from_float32(np.array(numbers, np.float32))
    else:
        array = np.array(numbers, by_name(one.datatype).dtype)
    return array.reshape(shape)


def _in_column(one: _Input, array: Array) -> Any:
    """The array as a value of its column."""
    if one.datatype == "BF16":
        array = float32_from_bf16(array)
    elif one.datatype != "BYTES" and one.leaf != pa.float16():
        array = array.astype(pa.array([], one.leaf).to_numpy(zero_copy_only=False).dtype)
    if one.datatype == "BYTES" and "string" in str(one.leaf):
        array = np.array([element.decode() for element in array.ravel()], object).reshape(array.shape)
    if one.depth < len(one.dims):
        array = array.reshape(-1) if one.depth else array.reshape(())
    return array.tolist()


def _spoiled(one: _Input, value: Any, random: Random) -> Any:
    """What a row of this column may not be."""
    how = random.choice(["null", "within", "longer", "uneven"])
    if how == "within" and isinstance(value, list) and value:
        return [*value[:-1], None]
    if how == "longer" and isinstance(value, list) and one.kind != "fixed" and -1 not in one.dims and value:
        return [*value, value[0]]
    if how == "uneven" and one.depth > 1 and one.kind != "fixed" and len(value) > 1 and value[0]:
        return [*value[:-1], value[-1][1:]]
    return None


@st.composite
def _worlds(draw: st.DrawFn) -> _World:
    seed, rows = draw(st.integers(0, 2**32)), draw(st.integers(0, 30))
    batched, pads, faults = draw(st.booleans()), draw(st.booleans()), draw(st.sampled_from([0.0, 0.1, 0.9]))
    most, by_length, max_elements = draw(st.integers(1, 20)), draw(st.booleans()), draw(st.sampled_from([0, 0, 1, 9]))
    random = Random(seed)
    inputs = [_input(number, random, random.choice([1, 2]) if pads else 0) for number in range(random.randint(1, 3))]
    named = sorted({number for one in inputs for _, number in one.lengths})
    inputs = [_renumbered(one, named) for one in inputs]
    lengths = _lengths(inputs, len(named), random) if named and batched else None
    sizes = random.choice([(2,), (0, 1, 2, 3, 4, 5), (1, 5)])
    made, columns = list[dict[str, Array] | None](), dict[str, list[Any]]({one.name: [] for one in inputs})
    for _ in range(rows + 2):
        common = random.choices(sizes, k=2)
        row: dict[str, Array] | None = {}
        for one in inputs:
            shape = [random.choice(sizes) if dim == -1 else dim for dim in one.dims]
            for axis, number in one.lengths:
                shape[axis] = common[number]
            array = _value(one, shape, random)
            value = _in_column(one, array)
            if 0 in shape:  # an empty list has no lists whose size could be told
                empty = shape.index(0) + 1
                array = array.reshape([*shape[:empty], *(max(0, dim) for dim in one.dims[empty:])])
            if random.random() < faults:
                value, row = _spoiled(one, value, random), None
            columns[one.name].append(value)
            if row is not None:
                row[one.name] = array
        made.append(row)
    if lengths is not None:
        made = [row if row is None or _agrees(inputs, row) else None for row in made]
    arrays = [pa.array(columns[one.name], one.type) for one in inputs]
    numbers = np.array(sorted(random.sample(range(1000), rows)), np.int64)
    table = pa.record_batch([*arrays, pa.array(range(rows + 2))], [*columns, "id"]).slice(1, rows)
    poisoned = {place for place in range(rows) if random.random() < 0.2}
    fixed = Fixed(100, 100, 1 << 20, most, 1)
    chunk = Chunk(table, numbers, (BadRow(2000, "unreadable"),))
    return _World(inputs, batched, lengths, fixed, by_length, max_elements, chunk, made[1:-1], poisoned, seed)


def _lengths(inputs: Sequence[_Input], count: int, random: Random) -> Lengths:
    specs = tuple(TensorSpec(one.name, one.datatype, one.dims, fill=one.fill) for one in inputs)
    lengths = []
    for number in range(count):
        axes = [(place, axis + 1) for place, one in enumerate(inputs) for axis, its in one.lengths if its == number]
        lengths.append(Length(str(axes), tuple(axes), tuple(axes), random.choice([(), (2,), (1, 3)])))
    return Lengths(ModelSpec(specs, specs, batched=True, lengths=tuple(lengths)))


def _renumbered(one: _Input, named: Sequence[int]) -> _Input:
    lengths = tuple((axis, named.index(number)) for axis, number in one.lengths)
    return _Input(one.name, one.datatype, one.dims, lengths, one.leaf, one.depth, one.kind)


def _agrees(inputs: Sequence[_Input], row: Mapping[str, Array]) -> bool:
    """Whether all axes of a length have one size, after what can't be told of empty lists."""
    found: dict[int, set[int]] = {}
    for one in inputs:
        for axis, number in one.lengths:
            found.setdefault(number, set()).add(row[one.name].shape[axis])
    return all(len(sizes) == 1 for sizes in found.values())


def _columns(world: _World) -> Columns:
    lead = (-1,) if world.batched else ()
    tensors = tuple(TensorMetadata(one.name, one.datatype, (*lead, *one.dims)) for one in world.inputs)
    batching = Batching(100, True, (), 0, 0, 0, ()) if world.batched else None
    description = ModelDescription("m", ("1",), "", tensors, tensors, batching=batching)
    outputs = {f"out_{one.name}": one.name for one in world.inputs}
    return Columns(description, world.chunk.table.schema, keep=["id"], outputs=outputs, lengths=world.lengths)


def _call(world: _World, rows: Rows, places: Sequence[int], sizes: tuple[int, ...]) -> Computed:
    """What the model, which answers with its inputs, is given, compared with the rows' own arrays."""
    chosen = np.array(places, np.int64)
    inputs = rows.take(chosen, sizes)
    for one in world.inputs:
        own = [world.rows[place][one.name] for place in places]  # type: ignore[index]
        given = inputs[one.name] if world.batched else inputs[one.name][None]
        assert len(given) == len(own)
        for number, expected in enumerate(own):
            array = given[number, ...]
            target = [*expected.shape]
            for axis, its in one.lengths if world.lengths is not None else ():
                target[axis] = sizes[its]
            assert array.dtype == expected.dtype
            assert array.shape == tuple(target)
            inside = array[(*map(slice, expected.shape), ...)]
            assert np.array_equal(inside, expected)
            if array.size > inside.size:
                assert world.lengths is not None
                left = np.ones(array.shape, np.bool_)
                left[tuple(map(slice, expected.shape))] = False
                assert set(array[left].tolist()) == {_filled(one)}
    return Computed(chosen, inputs, sizes)


def _filled(one: _Input) -> Any:
    if one.datatype == "BF16":
        return int(bf16_from_float32(np.array([_FILL], np.float32))[0])
    return b"" if one.datatype == "BYTES" else one.fill


@given(_worlds())
def test_good_rows_come_out_once(world: _World) -> None:
    columns = _columns(world)
    rows = columns.rows(world.chunk)
    good = [place for place, row in enumerate(world.rows) if row is not None]
    assert rows.good.tolist() == good
    shared = batches(rows, world.fixed, by_length=world.by_length, max_elements=world.max_elements)
    assert sorted(place for batch in shared for place in batch.tolist()) == good
    results = Results()
    for batch in shared:
        sizes = rows.common_sizes(batch)
        elements = len(batch) * math.prod(sizes)
        assert len(batch) <= (world.fixed.batch_rows if world.batched else 1)
        assert len(batch) == 1 or not world.lengths or not world.max_elements or elements <= world.max_elements
        computable = [place for place in batch.tolist() if place not in world.poisoned]
        if computable:
            results.computed.append(_call(world, rows, computable, sizes))
        results.failed += [Failed(place, "poisoned") for place in batch.tolist() if place in world.poisoned]
    Random(world.seed).shuffle(results.computed)
    table = columns.table(world.chunk, rows, results)
    written = [place for place in good if place not in world.poisoned]
    assert table.batch.schema == columns.output_schema
    assert table.batch.column("id").to_pylist() == [place + 1 for place in written]
    for one in world.inputs:
        expected = [_expected(one, world.rows[place][one.name]) for place in written]  # type: ignore[index]
        assert table.batch.column(f"out_{one.name}").to_pylist() == expected
    others = [int(number) for place, number in enumerate(world.chunk.numbers) if place not in written]
    assert [bad.number for bad in table.bad] == [*others, 2000]
    table.batch.validate(full=True)


def _expected(one: _Input, array: Array) -> Any:
    if one.datatype == "BYTES":
        return np.array([element.decode() for element in array.ravel()], object).reshape(array.shape).tolist()
    return (float32_from_bf16(array) if one.datatype == "BF16" else array).tolist()


@given(_worlds())
def test_batches_depend_on_chunk_alone(world: _World) -> None:
    columns = _columns(world)
    first, second = (
        batches(columns.rows(world.chunk), world.fixed, by_length=world.by_length, max_elements=world.max_elements)
        for _ in range(2)
    )
    assert [one.tolist() for one in first] == [one.tolist() for one in second]
