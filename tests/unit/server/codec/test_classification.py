"""Classes of outputs: which elements are returned, in which order and format; and which label files are accepted."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from google.protobuf import text_format
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from paceline.protos import model_config_pb2
from paceline.protos.datatypes import DATATYPES
from paceline.protos.inference_pb2 import InferParameter
from paceline.server.codec.classification import class_count, classes_of, read_labels
from paceline.server.errors import ConfigError, InvalidRequest
from tests.wire import Array, parameter

GOOD = sorted(set(DATATYPES) - {"FP16", "BF16", "BOOL", "BYTES"})


def classes(values: object, count: int, *labels: bytes, dtype: str = "<f4") -> object:
    """The classes of one row."""
    array = np.array([values], dtype)
    return classes_of(array, count, labels, by_rows=True).tolist()[0]


def test_classes_are_the_largest_in_descending_order() -> None:
    assert classes([0.25, 3, -1, 2.5], 3) == [b"3.000000:1", b"2.500000:3", b"0.250000:0"]


def test_classes_with_labels_include_them() -> None:
    assert classes([1, 3, 2], 3, b"cat", b"dog") == [b"3.000000:1:dog", b"2.000000:2", b"1.000000:0:cat"]


def test_classes_with_an_empty_label_are_returned_without_one() -> None:
    assert classes([1, 2], 2, b"", b"gr\xc3\xbcn") == [b"2.000000:1:gr\xc3\xbcn", b"1.000000:0"]


@pytest.mark.parametrize("count", [2, 3, 10**12])
def test_classes_are_at_most_as_many_as_the_elements(count: int) -> None:
    assert classes([1, 2], count) == [b"2.000000:1", b"1.000000:0"]


def test_classes_of_equal_value_are_ordered_by_index() -> None:
    assert classes([1, 2, 2, 1, 2, 1], 4) == [b"2.000000:1", b"2.000000:2", b"2.000000:4", b"1.000000:0"]
    assert classes([0.0, -0.0], 2) == [b"0.000000:0", b"-0.000000:1"]


def test_classes_of_nan_rank_as_minus_infinity_and_are_written_as_nan() -> None:
    values = [np.nan, -np.inf, np.inf, 0]
    assert classes(values, 4) == [b"inf:2", b"0.000000:3", b"nan:0", b"-inf:1"]


@pytest.mark.parametrize(
    ("dtype", "values", "expected"),
    [
        ("u1", [255, 0, 128], [b"255:0", b"128:2", b"0:1"]),
        ("i1", [-128, 127, 0], [b"127:1", b"0:2", b"-128:0"]),
        ("<u8", [0, 2**64 - 1, 2**63], [b"18446744073709551615:1", b"9223372036854775808:2", b"0:0"]),
        ("<i8", [-(2**63), 2**63 - 1, 1], [b"9223372036854775807:1", b"1:2", b"-9223372036854775808:0"]),
        ("<f4", [0.1, 1e7, 0], [b"10000000.000000:1", b"0.100000:0", b"0.000000:2"]),
        ("<f8", [0.1, 1e-7, 2**53 + 2], [b"9007199254740994.000000:2", b"0.100000:0", b"0.000000:1"]),
    ],
)
def test_classes_are_formatted_as_cpp_formats_each_kind_of_number(
    dtype: str, values: list[float], expected: list[bytes]
) -> None:
    assert classes(values, 3, dtype=dtype) == expected


def test_classes_are_chosen_in_each_row_separately() -> None:
    array = np.array([[1, 2, 3], [3, 2, 1]], "<i4")
    found = classes_of(array, 1, (), by_rows=True)
    assert (found.dtype, found.tolist()) == (np.dtype(object), [[b"3:2"], [b"3:0"]])


def test_classes_of_several_axes_are_numbered_consecutively() -> None:
    array = np.arange(12, dtype="<i4").reshape(2, 2, 3)
    assert classes_of(array, 2, (), by_rows=True).tolist() == [[b"5:5", b"4:4"], [b"11:5", b"10:4"]]
    assert classes_of(array, 2, (), by_rows=False).tolist() == [b"11:11", b"10:10"]


@pytest.mark.parametrize(
    ("shape", "by_rows", "expected"),
    [((2, 0), True, (2, 0)), ((0, 3), True, (0, 0)), ((0,), False, (0,)), ((), False, (1,)), ((3,), True, (3, 1))],
)
def test_classes_of_empty_or_tiny_outputs_are_few(
    shape: tuple[int, ...], by_rows: bool, expected: tuple[int, ...]
) -> None:
    assert classes_of(np.ones(shape, np.float32), 5, (), by_rows=by_rows).shape == expected


def test_classes_of_too_many_elements_are_refused() -> None:
    enough = np.zeros((1, 1_000_000), np.int8)
    assert classes_of(enough, 1, (), by_rows=True).tolist() == [[b"0:0"]]
    with pytest.raises(InvalidRequest, match="expected an output of up to 1000000 elements, got 1000001"):
        classes_of(np.zeros((1, 1_000_001), np.int8), 1, (), by_rows=True)


@given(
    arrays.arrays(
        st.sampled_from(["<f4", "<i4", "u1"]),
        arrays.array_shapes(min_dims=2, max_dims=2, max_side=7),
        elements=st.integers(0, 3),
    ),
    st.integers(1, 9),
)
def test_classes_match_a_full_sort(array: Array, count: int) -> None:
    found = classes_of(array, count, (), by_rows=True)
    indices = [[int(text.split(b":")[1]) for text in row] for row in found.tolist()]
    assert indices == [
        sorted(range(array.shape[1]), key=lambda index, row=row: (-int(row[index]), index))[:count]  # type: ignore[misc]
        for row in array
    ]


@pytest.mark.parametrize("datatype", GOOD)
def test_count_is_read_for_each_datatype_with_classes(datatype: str) -> None:
    assert class_count({"classification": parameter(3)}, datatype) == 3


@pytest.mark.parametrize(
    ("given", "fault"),
    [
        (parameter("3"), "parameter 'classification': expected int64_param, got string_param"),
        (parameter(True), "parameter 'classification': expected int64_param, got bool_param"),
        (InferParameter(uint64_param=3), "parameter 'classification': expected int64_param, got uint64_param"),
        (InferParameter(), "parameter 'classification': expected int64_param, got none"),
        (parameter(0), "parameter 'classification': expected a number of classes > 0, got 0"),
        (parameter(-1), "parameter 'classification': expected a number of classes > 0, got -1"),
    ],
)
def test_count_of_a_wrong_type_or_below_one_is_refused(given: InferParameter, fault: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        class_count({"classification": given}, "FP32")
    assert str(caught.value) == fault


@pytest.mark.parametrize("datatype", sorted(set(DATATYPES) - set(GOOD)))
def test_count_for_a_datatype_without_classes_is_refused(datatype: str) -> None:
    with pytest.raises(InvalidRequest, match=rf"^parameter 'classification': expected one of .*, got {datatype}$"):
        class_count({"classification": parameter(1)}, datatype)


def test_count_beside_shared_memory_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="expected one of 'shared_memory_region' and 'classification', got both"):
        class_count({"classification": parameter(1), "shared_memory_region": parameter("r")}, "FP32")


# ---- Label files -----------------------------------------------------------------------------------------------------


def labels(folder: Path, name: str) -> object:
    text = f'output {{ name: "x" label_filename: "{name}" }} output {{ name: "y" }}'
    return read_labels(text_format.Parse(text, model_config_pb2.ModelConfig()), folder)


@pytest.mark.parametrize(
    ("content", "names"),
    [
        (b"cat\ndog\n", (b"cat", b"dog")),
        (b"cat\ndog", (b"cat", b"dog")),
        (b"cat\r\n\r\ndog\r\n", (b"cat", b"", b"dog")),
        (b"a: b\n \xc3\xbc\n", (b"a: b", b" \xc3\xbc")),
        (b"\xef\xbb\xbfcat\r\ndog", (b"cat", b"dog")),
        (b"", ()),
    ],
)
def test_labels_are_the_lines_of_the_file(tmp_path: Path, content: bytes, names: tuple[bytes, ...]) -> None:
    (tmp_path / "labels.txt").write_bytes(content)
    assert labels(tmp_path, "labels.txt") == {"x": names}


def test_labels_may_be_in_a_folder_or_behind_a_link_within_the_model(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "l.txt").write_bytes(b"cat")
    (tmp_path / "link.txt").symlink_to("data/l.txt")
    assert labels(tmp_path, "data/l.txt") == labels(tmp_path, "link.txt") == {"x": (b"cat",)}


@pytest.mark.parametrize("name", ["../l.txt", "/etc/hostname", "a/../../l.txt", "link.txt", "loop", "..\\\\..\\0"])
def test_labels_outside_of_the_model_are_refused(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    (tmp_path / "l.txt").write_bytes(b"secret")
    (folder / "link.txt").symlink_to(tmp_path / "l.txt")
    (folder / "loop").symlink_to(folder / "loop")
    with pytest.raises(ConfigError, match=r"^output 'x': label_filename: "):
        labels(folder, name)


def test_labels_in_a_pipe_or_folder_are_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name in ("pipe", "folder"):
        with pytest.raises(ConfigError) as caught:
            labels(tmp_path, name)
        assert str(caught.value) == (
            f"output 'x': label_filename: {tmp_path}/{name}: expected a file, got something else"
        )


def test_labels_in_a_missing_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        labels(tmp_path, "none.txt")
    assert str(caught.value) == f"output 'x': label_filename: {tmp_path}/none.txt: No such file or directory"
