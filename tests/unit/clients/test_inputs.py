"""Inputs of the command line: what is read, what is generated, what is refused."""

from __future__ import annotations

import json
import random
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.clients import ModelMetadata, TensorMetadata
from paceline.clients.inputs import (
    GivenTensor,
    InputError,
    RandomInputs,
    input_options,
    parse_parameter,
    parse_shape,
    prepare,
    read_inputs,
)
from paceline.clients.messages import ParameterValue
from paceline.protos.datatypes import DATATYPES

ANYTHING = RandomInputs(rows=None, shapes={}, seed=0)


def model(**inputs: tuple[str, tuple[int, ...]]) -> ModelMetadata:
    tensors = tuple(TensorMetadata(name, datatype, shape) for name, (datatype, shape) in inputs.items())
    return ModelMetadata("m", ("1",), "p", tensors, (), {})


def write_json(path: Path, document: Any) -> str:
    path.write_text(json.dumps(document), encoding="utf-8")
    return str(path)


def test_read_inputs_npy_file_is_its_array(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.array([[1, 2]], np.int16))
    tensor = read_inputs([f"x={tmp_path / 'x.npy'}"])["x"]
    assert tensor.datatype is None
    assert (tensor.array.dtype.name, tensor.array.tolist()) == ("int16", [[1, 2]])


def test_read_inputs_npz_file_is_its_arrays(tmp_path: Path) -> None:
    path = tmp_path / "a=b.npz"
    np.savez(path, x=np.zeros(2), y=np.ones((1, 1), np.int8))
    given = read_inputs([str(path)])
    assert {name: tensor.array.tolist() for name, tensor in given.items()} == {"x": [0, 0], "y": [[1]]}


def test_read_inputs_json_text_is_nested_lists() -> None:
    given = read_inputs(["x=[[1, 2]]", 'input:0="a=b"', "z=3"])
    assert {name: tensor.array.tolist() for name, tensor in given.items()} == {
        "x": [[1, 2]],
        "input:0": "a=b",
        "z": 3,
    }


@pytest.mark.parametrize("compressed", [False, True])
def test_read_inputs_damaged_file_is_named(tmp_path: Path, compressed: bool) -> None:
    chance = random.Random(7)
    path = tmp_path / "x.npz"
    (np.savez_compressed if compressed else np.savez)(path, x=np.arange(64), y=np.ones(3, np.int8))
    whole = path.read_bytes()
    told = []
    for _ in range(300):
        damaged = bytearray(whole)
        for _ in range(3):
            damaged[chance.randrange(len(damaged))] = chance.randrange(256)
        path.write_bytes(damaged)
        try:
            read_inputs([str(path)])
        except InputError as error:
            told.append(str(error))
    assert len(told) > 100
    assert all(text.startswith(f"{path}: ") and not text.endswith(": ") for text in told)


@pytest.mark.parametrize("elements", [100, 10_000])
def test_read_inputs_json_text_may_be_longer_than_any_file_name(elements: int) -> None:
    assert read_inputs([f"x={list(range(elements))}"])["x"].array.tolist() == list(range(elements))


def test_read_inputs_json_file_may_have_a_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_bytes(b"\xef\xbb\xbf[[1]]")
    assert read_inputs([f"x={tmp_path / 'x.json'}"])["x"].array.tolist() == [[1]]


def test_read_inputs_json_file_is_one_array_or_many(tmp_path: Path) -> None:
    one = write_json(tmp_path / "one.json", [[1.5]])
    many = write_json(tmp_path / "many.json", {"y": ["a"], "inputs": [[1]]})
    given = read_inputs([f"x={one}", many])
    assert {name: tensor.array.tolist() for name, tensor in given.items()} == {
        "x": [[1.5]],
        "y": ["a"],
        "inputs": [[1]],
    }


@pytest.mark.parametrize("data", [[1, 2, 3, 4], [[1, 2], [3, 4]]])
def test_read_inputs_rest_document_flat_or_nested_is_shaped(tmp_path: Path, data: list[Any]) -> None:
    entry = {"name": "x", "datatype": "INT32", "shape": [2, 2], "data": data}
    tensor = read_inputs([write_json(tmp_path / "r.json", {"inputs": [entry]})])["x"]
    assert (tensor.datatype, tensor.array.tolist()) == ("INT32", [[1, 2], [3, 4]])


@pytest.mark.parametrize(
    ("argument", "text"),
    [
        ("x", "expected NAME=FILE.npy"),
        ("missing.npz", "missing.npz: No such file"),
        ("missing.json", "missing.json: No such file"),
        ("x=missing.npy", "missing.npy: No such file"),
        ("x=hello", "input 'x': neither FILE.npy nor JSON .* quoted"),
        ("x=[[1], [2, 3]]", "input 'x'"),
    ],
)
def test_read_inputs_unusable_argument_raises(argument: str, text: str) -> None:
    with pytest.raises(InputError, match=text):
        read_inputs([argument])


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("x=bad.npy", b"not numpy", "bad.npy: "),
        ("x=empty.npy", b"", "empty.npy: "),
        ("bad.npz", b"PK\x03\x04 not a zip", "bad.npz: "),
        ("bad.json", b"{", "bad.json: "),
        ("bad.json", b"\xff", "bad.json: "),
        ("bad.json", b"[1]", "expected an object of names and values, got list"),
        ("bad.json", b'{"inputs": [{"name": "x", "data": [1]}]}', "lacks datatype, shape"),
        ("bad.json", b'{"inputs": [{"name": "x"}], "outputs": []}', "only inputs are read, got also outputs"),
        (
            "bad.json",
            b'{"inputs": [{"name": "x", "datatype": "INT8", "shape": [3], "data": [1]}]}',
            r"input 'x': 1 values for shape \[3\]",
        ),
        (
            "bad.json",
            b'{"inputs": [{"name": "x", "datatype": "INT8", "shape": "wide", "data": [1]}]}',
            "input 'x': expected a list of sizes as its shape, got 'wide'",
        ),
        (
            "bad.json",
            b'{"inputs": [{"name": "x", "datatype": "INT8", "shape": [-1, 1], "data": [1]}]}',
            r"input 'x': expected a list of sizes as its shape, got \[-1, 1\]",
        ),
        (
            "bad.json",
            b'{"inputs": [{"name": "x", "datatype": "INT8", "shape": null, "data": [1]}]}',
            "input 'x': expected a list of sizes as its shape, got None",
        ),
        (
            "bad.json",
            b'{"inputs": [{"name": ["x"], "datatype": "INT8", "shape": [1], "data": [1]}]}',
            r"bad.json: expected the name of an input as text, got \['x'\]",
        ),
        ("bad.json", b"[" * 100_000, "bad.json: expected JSON that is nested less deeply"),
        ("x=bad.json", b"[" * 100_000, "bad.json: expected JSON that is nested less deeply"),
        ("x=bad.json", b"9" * 5_000, "bad.json: expected numbers with fewer digits"),
        (
            "bad.json",
            b'{"inputs": [%b, %b]}' % (2 * (b'{"name": "x", "datatype": "INT8", "shape": [1], "data": [1]}',)),
            "bad.json: input 'x' is given twice",
        ),
    ],
)
def test_read_inputs_unusable_file_raises_naming_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: bytes, text: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / name.removeprefix("x=")).write_bytes(content)
    with pytest.raises(InputError, match=text):
        read_inputs([name])


def test_read_inputs_pickled_objects_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.array([{}], object), allow_pickle=True)
    with pytest.raises(InputError, match=r"x\.npy: "):
        read_inputs([f"x={tmp_path / 'x.npy'}"])


def test_read_inputs_archive_and_array_mixed_up_raises(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros(1))
    np.savez(tmp_path / "x.npz", x=np.zeros(1))
    (tmp_path / "x.npy").rename(tmp_path / "array.npz")
    (tmp_path / "x.npz").rename(tmp_path / "archive.npy")
    with pytest.raises(InputError, match="expected an archive"):
        read_inputs([str(tmp_path / "array.npz")])
    with pytest.raises(InputError, match="expected one array"):
        read_inputs([f"x={tmp_path / 'archive.npy'}"])


def test_read_inputs_same_name_twice_raises() -> None:
    with pytest.raises(InputError, match="'x' is given twice"):
        read_inputs(["x=1", "x=2"])


@pytest.mark.parametrize(("text", "shape"), [("x=1,2,3", (1, 2, 3)), ("x=", ()), ("x=0", (0,))])
def test_parse_shape_reads_dimensions(text: str, shape: tuple[int, ...]) -> None:
    assert parse_shape(text) == ("x", shape)


@pytest.mark.parametrize("text", ["x", "=1", "x=a", "x=-1", "x=1,,2"])
def test_parse_shape_other_text_raises(text: str) -> None:
    with pytest.raises(InputError, match="expected NAME=1,2,3"):
        parse_shape(text)


def test_prepare_casts_to_what_the_model_takes() -> None:
    given = {"f": GivenTensor(np.array([1, 2])), "t": GivenTensor(np.array(["a"]))}
    ready = prepare(model(f=("FP32", (-1,)), t=("BYTES", (-1,))), given, None)
    assert ready.datatypes == {"f": "FP32", "t": "BYTES"}
    assert ready.arrays["f"].dtype == np.float32


def test_prepare_users_datatype_overrides_the_models() -> None:
    ready = prepare(model(x=("FP32", (-1,))), {"x": GivenTensor(np.array([1]), "INT8")}, None)
    assert ready.datatypes == {"x": "INT8"}
    assert ready.arrays["x"].dtype == np.int8


def test_prepare_model_without_named_inputs_takes_any() -> None:
    ready = prepare(model(), {"x": GivenTensor(np.array([1]))}, None)
    assert ready.datatypes == {"x": "INT64"}


@pytest.mark.parametrize(
    ("tensor", "text"),
    [
        (GivenTensor(np.array([1.5])), "input 'x': INT8 takes whole numbers"),
        (GivenTensor(np.array([300])), "input 'x': INT8 takes -128 to 127"),
        (GivenTensor(np.array(["a"])), "input 'x': INT8 takes numbers"),
        (GivenTensor(np.array([1]), "FLOAT"), "input 'x': .*'FLOAT'"),
    ],
)
def test_prepare_values_that_do_not_fit_raise(tensor: GivenTensor, text: str) -> None:
    with pytest.raises(InputError, match=text):
        prepare(model(x=("INT8", (-1,))), {"x": tensor}, None)


def test_prepare_unknown_name_raises_with_the_known_ones() -> None:
    with pytest.raises(InputError, match="model 'm' has no input 'z'; it takes x, y"):
        prepare(model(x=("FP32", (1,)), y=("FP32", (1,))), {"z": GivenTensor(np.zeros(1))}, None)


@pytest.mark.parametrize(
    ("shape", "rows", "expected"),
    [
        ((-1, 4), None, (1, 4)),
        ((-1, 4), 3, (3, 4)),
        ((2, 4), None, (2, 4)),
        ((2, 4), 2, (2, 4)),
        ((), 5, ()),
        ((0,), None, (0,)),
    ],
)
def test_prepare_random_fills_a_free_first_dimension(
    shape: tuple[int, ...], rows: int | None, expected: tuple[int, ...]
) -> None:
    ready = prepare(model(x=("FP32", shape)), {}, RandomInputs(rows, {}, None))
    assert ready.arrays["x"].shape == expected


@pytest.mark.parametrize("datatype", DATATYPES)
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)])
def test_prepare_random_makes_every_datatype_the_same_with_the_same_seed(datatype: str, shape: tuple[int, ...]) -> None:
    first, second = (prepare(model(x=(datatype, shape)), {}, ANYTHING) for _ in range(2))
    assert first.datatypes == {"x": datatype}
    assert first.arrays["x"].shape == shape
    assert first.arrays["x"].dtype == DATATYPES[datatype].dtype  # as a server has it, or the engine of `paceline tune`
    np.testing.assert_array_equal(first.arrays["x"], second.arrays["x"])


def test_prepare_random_fills_only_what_is_not_given() -> None:
    ready = prepare(
        model(x=("FP32", (-1,)), y=("INT64", (-1, -1))),
        {"x": GivenTensor(np.array([5.0]))},
        RandomInputs(None, {"y": (2, 7)}, 1),
    )
    assert ready.arrays["x"].tolist() == [5.0]
    assert ready.arrays["y"].shape == (2, 7)


@pytest.mark.parametrize(
    ("shape", "random", "text"),
    [
        ((-1, -1, 3), ANYTHING, "input 'x' has more free dimensions: give --shape x=1,N,3"),
        ((4, 2), RandomInputs(8, {}, None), "input 'x' always has 4 rows, --rows says 8"),
        ((4, 2), RandomInputs(None, {"z": (1,)}, None), "--shape z: model 'm' has no such input"),
    ],
)
def test_prepare_random_shape_left_open_or_contradicted_raises(
    shape: tuple[int, ...], random: RandomInputs, text: str
) -> None:
    with pytest.raises(InputError, match=text):
        prepare(model(x=("FP32", shape)), {}, random)


def test_input_options_are_taken_as_they_are_printed() -> None:
    inputs = {"a b": ("INT8", (-1, 2)), "t": ("BYTES", (1,)), "flag": ("BOOL", ()), "image": ("UINT8", (-1, 64, 64))}
    printed = input_options(model(**inputs))
    assert printed == """--input 'a b=[[0, 0]]' --input 't=["text"]' --input flag=0 --input image=FILE.npy"""
    given = read_inputs([word for word in shlex.split(printed)[1::2] if "FILE" not in word])
    assert {name: one.shape for name, one in prepare(model(**inputs), given, None).arrays.items()} == {
        "a b": (1, 2),
        "t": (1,),
        "flag": (),
    }


DECODER = model(input_ids=("INT64", (-1,)), text_input=("BYTES", (1,)), sampling_parameters=("BYTES", (1,)))


def test_prepare_random_makes_up_one_prompt_of_a_decoder() -> None:
    assert prepare(DECODER, {}, ANYTHING).arrays.keys() == {"input_ids"}
    assert input_options(DECODER) == "--input 'input_ids=[0]'"
    given = {"text_input": GivenTensor(np.array(["a"], object))}
    assert prepare(DECODER, given, ANYTHING).arrays.keys() == {"text_input"}


@pytest.mark.parametrize(
    ("text", "value"), [("stop=5", "5"), ('stop="5"', "5"), ("stop=true", "true"), ('stop=["5", "6"]', ["5", "6"])]
)
def test_stop_is_a_text_whatever_it_looks_like(text: str, value: str | list[str]) -> None:
    assert parse_parameter(text, ParameterValue | list) == ("stop", value)
    assert parse_parameter("seed=5") == ("seed", 5)


def test_prepare_random_model_without_named_inputs_raises() -> None:
    with pytest.raises(InputError, match="names no inputs"):
        prepare(model(), {}, ANYTHING)
