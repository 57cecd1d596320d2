"""Layouts that are looked at again: which models they have then, by name, and the name that one may be given."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from paceline.server.errors import StartError
from paceline.server.models.layout import Layout, ModelFolder
from tests.unit.server.found import opened, touch


def test_empty_layout_sees_models_come_and_go(tmp_path: Path) -> None:
    layout = opened(tmp_path)
    assert layout.models() == []
    touch(tmp_path / "m" / "1" / "model.onnx")
    assert [model.name for model in layout.models()] == ["m"]
    shutil.rmtree(tmp_path / "m")
    assert layout.models() == []


def test_folder_being_replaced_is_not_taken_for_a_repository(tmp_path: Path) -> None:
    touch(tmp_path / "m" / "1" / "model.onnx")
    layout = opened(tmp_path / "m")
    (tmp_path / "m" / "1" / "model.onnx").unlink()
    assert [(model.name, model.versions.keys()) for model in layout.models()] == [("m", {1})]
    shutil.rmtree(tmp_path / "m")
    assert layout.models() == []


def test_layout_of_a_deleted_file_has_no_model(tmp_path: Path) -> None:
    layout = opened(touch(tmp_path / "m.onnx"))
    assert layout.model("m") == ModelFolder("m", tmp_path, {1: tmp_path}, file=tmp_path / "m.onnx")
    (tmp_path / "m.onnx").unlink()
    assert layout.model("m") is None


def test_layout_of_deleted_repository_raises(tmp_path: Path) -> None:
    (tmp_path / "repository").mkdir()
    layout = opened(tmp_path / "repository")
    (tmp_path / "repository").rmdir()
    with pytest.raises(FileNotFoundError):
        layout.models()
    with pytest.raises(FileNotFoundError):
        layout.model("m")


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../m", "repository/m", "m/1", "m/", "/", "./m", ".hidden", "lost+found", "M", "m\0", "m2"]
)
def test_layout_name_without_folder_finds_nothing(tmp_path: Path, name: str) -> None:
    for folder in ("m", "repository/m", "repository/.hidden", "repository/lost+found"):
        touch(tmp_path / folder / "1" / "model.onnx")
    layout = opened(tmp_path / "repository")
    assert layout.model("m") is not None
    assert layout.model(name) is None
    assert layout.model(str(tmp_path / "m")) is None


def test_layout_name_in_several_repositories_has_duplicates(tmp_path: Path) -> None:
    for repository in ("one", "two", "three"):
        touch(tmp_path / repository / ("m" if repository != "three" else "n") / "1" / "model.onnx")
    layout = opened(tmp_path / "one", tmp_path / "two", tmp_path / "three")
    model = layout.model("m")
    assert model is not None
    assert model.duplicates == (tmp_path / "one" / "m", tmp_path / "two" / "m")
    assert [(folder.name, bool(folder.duplicates)) for folder in layout.models()] == [("m", True), ("n", False)]


def test_layout_path_given_twice_counts_once(tmp_path: Path) -> None:
    touch(tmp_path / "m" / "1" / "model.onnx")
    (model,) = opened(tmp_path, tmp_path).models()
    assert not model.duplicates


@pytest.mark.parametrize("folder", ["models", "models/1"], ids=["right inside", "version folder"])
def test_layout_name_is_given_to_one_model(tmp_path: Path, folder: str) -> None:
    touch(tmp_path / folder / "model.onnx")
    layout = Layout([tmp_path / "models"], model_name="resnet")
    layout.open()
    (model,) = layout.models()
    assert (model.name, model.renamed, model.versions) == ("resnet", True, {1: tmp_path / folder})
    assert layout.model("resnet") == model
    assert layout.model("models") is None


def test_layout_name_leaves_repository_models_alone(tmp_path: Path) -> None:
    touch(tmp_path / "repository" / "a" / "1" / "model.onnx")
    touch(tmp_path / "alone.onnx")
    layout = Layout([tmp_path / "repository", tmp_path / "alone.onnx"], model_name="named")
    layout.open()
    assert [(model.name, model.renamed) for model in layout.models()] == [("a", False), ("named", True)]


def test_layout_name_for_no_model_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    touch(tmp_path / "repository" / "a" / "1" / "model.onnx")
    Layout([tmp_path / "repository"], model_name="named").open()
    assert [record.getMessage() for record in caplog.records] == [
        "no model is named 'named', as --model-name or INFERENCE_SERVICE_NAME says: models in repositories keep the "
        f"names of their folders, and {tmp_path}/repository is one"
    ]


def test_layout_name_for_two_models_is_refused(tmp_path: Path) -> None:
    paths = [touch(tmp_path / "a.onnx"), touch(tmp_path / "b.onnx")]
    with pytest.raises(StartError, match=r"--model-name m: expected one model, got .*a\.onnx, .*b\.onnx"):
        Layout(paths, model_name="m").open()
