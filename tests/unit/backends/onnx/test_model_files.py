"""Weights in files beside a model's: wherever the model refers to them, and what isn't read. Its nodes, wherever they
are."""

from __future__ import annotations

from pathlib import Path
from typing import IO

import numpy as np
import onnx
import onnxruntime as ort  # type: ignore[import-untyped,unused-ignore]
import pytest
from onnx import helper, numpy_helper

from paceline.backends.base import Device
from paceline.backends.errors import LoadError
from paceline.backends.onnx.model_files import read_model_files
from paceline.backends.onnx.options import OnnxOptions
from paceline.backends.onnx.sessions import open_session
from tests import models

ROWS = np.arange(8, dtype=np.float32).reshape(2, 4)
FLOAT = onnx.TensorProto.FLOAT


def weights(name: str, first: float) -> onnx.TensorProto:
    return numpy_helper.from_array(np.arange(first, first + 4, dtype=np.float32), name)


def move(tensor: onnx.TensorProto, file: IO[bytes], location: str, with_length: bool = True) -> None:
    """Move the data of `tensor` to the end of `file`, which is at `location`."""
    place = {"location": location, "offset": str(file.tell()), "length": str(len(tensor.raw_data))}
    file.write(tensor.raw_data)
    tensor.ClearField("raw_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    for key, value in place.items():
        if key != "length" or with_length:
            tensor.external_data.add(key=key, value=value)


def everywhere() -> tuple[onnx.ModelProto, list[onnx.TensorProto]]:
    """OUTPUT0 = INPUT0 plus weights from each place where a model can have some, and those."""
    branch = helper.make_graph(
        [helper.make_node("Identity", ["inner"], ["branched"])],
        "branch",
        [],
        [helper.make_tensor_value_info("branched", FLOAT, [4])],
        [weights("inner", 3)],
    )
    function = helper.make_function(
        "here",
        "Add5",
        ["a"],
        ["b"],
        [
            helper.make_node("Constant", [], ["five"], value=weights("five", 5)),
            helper.make_node("Add", ["a", "five"], ["b"]),
        ],
        [helper.make_opsetid("", 17)],
    )
    nodes = [
        helper.make_node("Add", ["INPUT0", "outer"], ["h1"]),
        helper.make_node("Constant", [], ["constant"], value=weights("value", 2)),
        helper.make_node("Add", ["h1", "constant"], ["h2"]),
        helper.make_node("If", ["yes"], ["chosen"], then_branch=branch, else_branch=branch),
        helper.make_node("Add", ["h2", "chosen"], ["h3"]),
        helper.make_node("Add", ["h3", "sparse"], ["h4"]),
        helper.make_node("Add5", ["h4"], ["OUTPUT0"], domain="here"),
    ]
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info("INPUT0", FLOAT, ["batch", 4])],
        [helper.make_tensor_value_info("OUTPUT0", FLOAT, ["batch", 4])],
        [weights("outer", 1), numpy_helper.from_array(np.array(True), "yes")],
    )
    indices = numpy_helper.from_array(np.arange(4), "indices")
    graph.sparse_initializer.append(helper.make_sparse_tensor(weights("sparse", 4), indices, [4]))
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("here", 1)]
    model = helper.make_model(graph, functions=[function], opset_imports=opsets, ir_version=8)
    main = model.graph
    return model, [
        main.initializer[0],
        main.sparse_initializer[0].values,
        main.node[1].attribute[0].t,
        *(one.g.initializer[0] for one in main.node[3].attribute),
        model.functions[0].node[0].attribute[0].t,
    ]


def test_weights_are_found_wherever_a_model_can_have_them(tmp_path: Path) -> None:
    model, tensors = everywhere()
    path = tmp_path / "model.onnx"
    whole = ort.InferenceSession(model.SerializeToString()).run(None, {"INPUT0": ROWS})
    with (tmp_path / "w.bin").open("wb") as file:
        for tensor in tensors:
            move(tensor, file, "w.bin")
    models.write(model, path)
    session = open_session("m", path, OnnxOptions(), Device()).session
    (tmp_path / "w.bin").unlink()
    assert np.array_equal(session.run(None, {"INPUT0": ROWS}), whole)


@pytest.mark.parametrize("with_length", [True, False])
@pytest.mark.parametrize("location", ["w.bin", "./w.bin", "sub/w.bin", "sub/../w.bin", "sub//w.bin"])
def test_weights_in_any_file_of_the_folder_are_found(tmp_path: Path, location: str, with_length: bool) -> None:
    model, tensors = everywhere()
    (tmp_path / "sub").mkdir()
    with (tmp_path / location).open("wb") as file:
        file.write(bytes(4096))
        move(tensors[0], file, location)
        move(tensors[1], file, location)
        move(tensors[2], file, location, with_length)
    path = models.write(model, tmp_path / "model.onnx")
    session = open_session("m", path, OnnxOptions(), Device()).session
    assert session.run(None, {"INPUT0": ROWS})[0].tolist() == [[15, 21, 27, 33], [19, 25, 31, 37]]


@pytest.mark.parametrize(
    ("location", "why"),
    [
        ("../w.bin", "its weights: expected a file inside the model's folder, got '../w.bin'"),
        ("/etc/hostname", "its weights: expected a file inside the model's folder, got '/etc/hostname'"),
        ("link", "its weights: expected a file inside the model's folder, got 'link'"),
        ("none", "its weights 'none': No such file or directory"),
        ("folder", "its weights 'folder': expected a file, got something else"),
        ("", "its weights '': Is a directory"),
    ],
)
@pytest.mark.parametrize("place", [0, 2], ids=["an initializer", "a constant"])
def test_weights_that_are_no_file_of_the_folder_are_refused(
    tmp_path: Path, place: int, location: str, why: str
) -> None:
    model, tensors = everywhere()
    folder = tmp_path / "m"
    (folder / "folder").mkdir(parents=True)
    (folder / "link").symlink_to("../w.bin")
    with (tmp_path / "w.bin").open("wb") as file:
        move(tensors[place], file, location)
    path = models.write(model, folder / "model.onnx")
    with pytest.raises(LoadError) as error:
        open_session("m", path, OnnxOptions(), Device())
    assert str(error.value) == f"model 'm': can't open '{path}': {why}"


@pytest.mark.parametrize("place", [0, 2], ids=["an initializer", "a constant"])
def test_weights_that_end_too_early_are_refused(tmp_path: Path, place: int) -> None:
    model, tensors = everywhere()
    with (tmp_path / "w.bin").open("wb") as file:
        move(tensors[place], file, "w.bin")
        file.truncate(15)
    path = models.write(model, tmp_path / "model.onnx")
    with pytest.raises(LoadError, match=r"expected bytes 0 to 16, got 15 bytes|out of bounds"):
        open_session("m", path, OnnxOptions(), Device())


@pytest.mark.parametrize("content", [models.mlp().SerializeToString(), b"", b"\xff" * 99, b"\x3b\x0a", b"\x3a\xff\x01"])
def test_file_without_weights_elsewhere_is_left_to_onnxruntime(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(content)
    assert read_model_files(path).model == str(path)
    assert not read_model_files(path).weights


@pytest.mark.parametrize("place", ["graph", "branch", "branch of a branch", "function"])
@pytest.mark.parametrize("training", [True, False])
def test_nodes_are_known_wherever_they_are(tmp_path: Path, place: str, training: bool) -> None:
    model, _ = everywhere()
    branch = model.graph.node[3].attribute[0].g
    if place == "branch of a branch":
        branch.node.add(op_type="If").attribute.add(name="then_branch", type=onnx.AttributeProto.GRAPH)
        branch = branch.node[-1].attribute[0].g
    graph = {"graph": model.graph, "function": model.functions[0]}.get(place, branch)
    outputs = ["y", "mean", "variance"] if training else ["y"]
    graph.node.append(helper.make_node("BatchNormalization", [*"xsbmv"], outputs))
    facts = read_model_files(models.write(model, tmp_path / "model.onnx")).facts
    assert facts.trains is training
    found = [operators for operators in (facts.operators, facts.inner_operators) if "BatchNormalization" in operators]
    assert found == [facts.operators if place == "graph" else facts.inner_operators]
