"""NumPy's files: entries of the first axis as rows of fixed dims, and what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest

from paceline.server.bulk.sources import find_source
from paceline.server.bulk.values import BulkError
from tests.unit.server.bulk import reading

CUBES = np.arange(100 * 2 * 3, dtype=np.float32).reshape(100, 2, 3)


@pytest.mark.parametrize("unit_rows", [1, 7, 1000])
@pytest.mark.parametrize("form", ["npy", "fortran", "npz", "compressed"])
def test_units_give_each_row_once(tmp_path: Path, unit_rows: int, form: str) -> None:
    if form in ("npy", "fortran"):
        np.save(tmp_path / "a.npy", np.asfortranarray(CUBES) if form == "fortran" else CUBES)
        expected: dict[str, npt.NDArray[np.generic]] = {"array": CUBES}
    else:
        expected = {"x": CUBES, "label": np.arange(100)}
        (np.savez if form == "npz" else np.savez_compressed)(tmp_path / "a.npz", **expected)
    found = reading.rows(find_source([str(tmp_path)]), reading.fixed(unit_rows))
    assert {name: [row[name] for row in found] for name in expected} == {
        name: array.tolist() for name, array in expected.items()
    }


def test_units_of_npz_may_come_in_any_order(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "a.npz", x=CUBES, y=CUBES[:, 0])
    source, limits = find_source([str(tmp_path)]), reading.fixed()
    units = list(reading.units(source, 7))
    in_order = [[chunk.table for chunk in source.chunks(unit, ["y"], limits)] for unit in units]
    for unit in reversed(units):
        assert [chunk.table for chunk in source.chunks(unit, ["y"], limits)] == in_order[unit.number]


@pytest.mark.parametrize(
    ("array", "kind"),
    [
        (np.array([1, 2], np.uint8), pa.uint8()),
        (np.array([1, 2], ">i8"), pa.int64()),
        (np.array([[0.5], [2]], np.float16), pa.list_(pa.float16(), 1)),
        (np.array([[True, False]]), pa.list_(pa.bool_(), 2)),
        (np.array(["a", "bé"]), pa.string()),
        (np.array([b"a", b"\xff"]), pa.binary()),
        (np.zeros((0, 3), np.int32), pa.list_(pa.int32(), 3)),
    ],
)
def test_elements_keep_their_type(tmp_path: Path, array: npt.NDArray[np.generic], kind: pa.DataType) -> None:
    np.save(tmp_path / "a.npy", array)
    source = find_source([str(tmp_path)])
    assert source.schema == pa.schema({"array": kind})
    assert reading.rows(source, reading.fixed()) == [{"array": row} for row in array.tolist()]


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"array": np.zeros((), np.int64)}, "its shape is"),
        ({"array": np.zeros((2, 0), np.int64)}, "its shape is"),
        ({"array": np.zeros(2, np.complex64)}, "its elements are complex64: expected numbers, truth values or text"),
        ({"array": np.array([None, 1])}, "its elements are object"),
        ({"array": np.asfortranarray(CUBES)}, r"its rows aren't together \(Fortran order\)"),
        ({"a": np.zeros(2), "b": np.zeros(3)}, "its arrays have different numbers of rows: {'a': 2, 'b': 3}"),
    ],
)
def test_what_has_no_rows_is_refused(tmp_path: Path, arrays: dict[str, npt.NDArray[np.generic]], words: str) -> None:
    np.savez(tmp_path / "a.npz", **arrays)
    source = find_source([str(tmp_path)])
    with pytest.raises(BulkError, match=rf"a\.npz can't be read: {words}"):
        source.index(source.files[0], 10)


@pytest.mark.parametrize("name", ["a.npy", "a.npz"])
@pytest.mark.parametrize("kept", [0, 5, 100, -50])
def test_damaged_file_is_refused_by_name(tmp_path: Path, name: str, kept: int) -> None:
    (np.save if name == "a.npy" else np.savez_compressed)(tmp_path / name, CUBES)
    (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:kept])
    with pytest.raises(BulkError, match=f"{name} can't be read"):
        reading.rows(find_source([str(tmp_path)]), reading.fixed())


def test_dims_that_differ_between_files_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", CUBES)
    np.save(tmp_path / "b.npy", CUBES[:, :1])
    source = find_source([str(tmp_path)])
    with pytest.raises(BulkError, match=r"b\.npy: column 'array': expected .*\[2\].* got .*\[1\]"):
        source.index(source.files[1], 10)
