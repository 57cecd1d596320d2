"""What counts as a model on disk, under which name, with which versions."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.server.errors import StartError
from paceline.server.models.layout import ModelFolder
from tests.unit.server.found import find_models, opened, touch
from tests.unit.server.privileges import open_folder, unprivileged


def found(*paths: Path) -> dict[str, ModelFolder]:
    return {model.name: model for model in find_models(list(paths))}


def refusal(*paths: Path) -> str:
    with pytest.raises(StartError) as caught:
        find_models(list(paths))
    return str(caught.value)


def test_repository_gives_each_folder_as_a_model_by_name(tmp_path: Path) -> None:
    touch(tmp_path / "b" / "1" / "model.onnx")
    touch(tmp_path / "a" / "config.pbtxt")
    (tmp_path / "a" / "2").mkdir()
    assert find_models([tmp_path]) == [
        ModelFolder("a", tmp_path / "a", {2: tmp_path / "a" / "2"}),
        ModelFolder("b", tmp_path / "b", {1: tmp_path / "b" / "1"}),
    ]


def test_repository_files_and_hidden_folders_are_no_models(tmp_path: Path) -> None:
    touch(tmp_path / "README.md")
    touch(tmp_path / ".git" / "1" / "model.onnx")
    touch(tmp_path / "..data" / "m" / "1" / "model.onnx")
    touch(tmp_path / "m" / "1" / "model.onnx")
    assert found(tmp_path).keys() == {"m"}


@pytest.mark.parametrize("left_behind", ["._m.onnx", "__MACOSX/._m.onnx", "lost+found/#12", ".cache/1/x.onnx"])
@pytest.mark.parametrize("marker", ["m/1/m.onnx", "m/model.onnx", "m/m.onnx"])
def test_hidden_files_change_nothing_anywhere(tmp_path: Path, marker: str, left_behind: str) -> None:
    file = touch(tmp_path / marker)
    paths = (tmp_path, tmp_path / "m", file)
    before = [find_models([path]) for path in paths]
    for folder in {tmp_path, tmp_path / "m", file.parent}:
        touch(folder / left_behind)
    assert [find_models([path]) for path in paths] == before


def test_hidden_file_alone_is_no_model(tmp_path: Path) -> None:
    touch(tmp_path / "1" / "._model.onnx")
    touch(tmp_path / "._resnet.onnx")
    assert "no models here" in refusal(tmp_path / "1")
    assert found(tmp_path).keys() == {"1"}


def test_repository_empty_folder_is_a_model_without_versions(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    model = found(tmp_path)["m"]
    assert (model.versions, model.config, model.problem) == ({}, None, "")


def test_repository_models_may_be_links(tmp_path: Path) -> None:
    touch(tmp_path / "elsewhere" / "v7" / "1" / "model.onnx")
    (tmp_path / "repository").mkdir()
    (tmp_path / "repository" / "m").symlink_to(tmp_path / "elsewhere" / "v7")
    assert found(tmp_path / "repository")["m"].versions.keys() == {1}


def test_repository_broken_link_is_a_model_with_a_problem(tmp_path: Path) -> None:
    (tmp_path / "m").symlink_to(tmp_path / "gone")
    assert found(tmp_path)["m"].problem == f"{tmp_path}/m: No such file or directory"


@pytest.mark.parametrize(
    "marker",
    [
        "config.pbtxt",
        "model.onnx",
        "decoder_model_merged.onnx",
        "1/model.onnx",
        "0/model.onnx",
        "12/model.onnx",
        "1/net.onnx",
        "model.py",
        "1/model.py",
    ],
)
def test_model_folder_is_told_from_repository_by_contents(tmp_path: Path, marker: str) -> None:
    touch(tmp_path / "m" / marker)
    assert found(tmp_path / "m").keys() == {"m"}


def test_model_folder_may_have_folder_as_model_file(tmp_path: Path) -> None:
    touch(tmp_path / "m" / "1" / "model.onnx" / "model.onnx")
    assert found(tmp_path / "m")["m"].versions.keys() == {1}


def test_model_folder_with_bare_file_is_version_1(tmp_path: Path) -> None:
    touch(tmp_path / "m" / "model.onnx")
    model = found(tmp_path / "m")["m"]
    assert (model.versions, model.file) == ({1: tmp_path / "m"}, None)


def test_folder_as_exporters_write_pairs_is_a_model(tmp_path: Path) -> None:
    for name in ("encoder_model.onnx", "decoder_model.onnx", "decoder_model_merged.onnx", "config.json"):
        touch(tmp_path / "translator" / name)
    assert found(tmp_path / "translator")["translator"].versions == {1: tmp_path / "translator"}


def test_model_folder_prefers_versions_to_bare_file(tmp_path: Path) -> None:
    touch(tmp_path / "m" / "model.onnx")
    touch(tmp_path / "m" / "4" / "model.onnx")
    assert found(tmp_path / "m")["m"].versions.keys() == {4}


def test_linked_model_folder_is_named_like_the_link(tmp_path: Path) -> None:
    touch(tmp_path / "releases" / "2024-05" / "1" / "model.onnx")
    (tmp_path / "m").symlink_to(tmp_path / "releases" / "2024-05")
    assert found(tmp_path / "m").keys() == {"m"}


@pytest.mark.parametrize("path", [".", "../m", "./", "../m/."])
def test_relative_model_folder_is_named_like_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    touch(tmp_path / "m" / "1" / "model.onnx")
    monkeypatch.chdir(tmp_path / "m")
    assert found(Path(path)).keys() == {"m"}


EXPORT = ("config.json", "tokenizer.json", "1_Pooling/config.json", "openvino/openvino_model.xml", "onnx/model.onnx")


@pytest.mark.parametrize("other", ["onnx/model_quantized.onnx", "onnx/model.onnx_data", ".cache/x", "README.md"])
@pytest.mark.parametrize("given", ["models", "models/MiniLM-L6", "models/MiniLM-L6/onnx"])
def test_export_folder_is_a_model_named_like_it(tmp_path: Path, given: str, other: str) -> None:
    folder = tmp_path / "models" / "MiniLM-L6"
    for name in (*EXPORT, other):
        touch(folder / name)
    assert find_models([tmp_path / given]) == [ModelFolder("MiniLM-L6", folder, {1: folder / "onnx"})]


def test_export_folder_may_have_a_configuration(tmp_path: Path) -> None:
    config = touch(tmp_path / "m" / "config.pbtxt")
    for name in EXPORT:
        touch(tmp_path / "m" / name)
    (model,) = find_models([tmp_path / "m"])
    assert (model.name, model.config, model.versions) == ("m", config, {1: tmp_path / "m" / "onnx"})


def test_repository_may_have_a_model_called_onnx(tmp_path: Path) -> None:
    touch(tmp_path / "onnx" / "model.onnx")
    assert found(tmp_path).keys() == {"onnx"}
    assert found(tmp_path / "onnx").keys() == {"onnx"}


@pytest.mark.parametrize("file", ["model.onnx", "model.py"])
def test_version_folder_is_that_version_of_its_model(tmp_path: Path, file: str) -> None:
    for version in ("1", "3"):
        touch(tmp_path / "iris" / version / file)
    config = touch(tmp_path / "iris" / "config.pbtxt")
    (model,) = find_models([tmp_path / "iris" / "3"])
    assert model == ModelFolder("iris", tmp_path / "iris", {3: tmp_path / "iris" / "3"})
    assert model.config == config


def test_version_folder_belongs_to_configuration_above(tmp_path: Path) -> None:
    touch(tmp_path / "iris" / "1" / "net.onnx")
    assert found(tmp_path / "iris" / "1").keys() == {"net"}
    touch(tmp_path / "iris" / "config.pbtxt")
    assert found(tmp_path / "iris" / "1").keys() == {"iris"}


def test_model_whose_name_is_a_number_keeps_it(tmp_path: Path) -> None:
    touch(tmp_path / "7" / "config.pbtxt")
    touch(tmp_path / "8" / "1" / "model.onnx")
    assert found(tmp_path / "7", tmp_path / "8").keys() == {"7", "8"}


def test_versions_are_plain_numbers_and_others_are_ignored(tmp_path: Path) -> None:
    for name in ("0", "1", "10", "02", "00", "v3", "1.5", "-1", "\u0663", "4 "):
        (tmp_path / "m" / name).mkdir(parents=True)
    touch(tmp_path / "m" / "7")  # a file
    model = found(tmp_path)["m"]
    assert model.versions.keys() == {0, 1, 10}
    strays = ["-1", "00", "02", "1.5", "4 ", "7", "v3", "\u0663"]
    assert [stray.name for stray in model.strays] == strays


def test_folders_of_triton_and_hidden_ones_are_no_strays(tmp_path: Path) -> None:
    for name in ("1", "abc", "configs", "warmup", "initial_state", "__pycache__", "lost+found", ".git", "..data"):
        (tmp_path / "m" / name).mkdir(parents=True)
    touch(tmp_path / "m" / "config.pbtxt")
    assert [stray.name for stray in found(tmp_path)["m"].strays] == ["abc"]


def test_broken_link_is_no_stray(tmp_path: Path) -> None:
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "assets").symlink_to("x" * 300)  # an error other than "not found", for any user
    assert (found(tmp_path)["m"].strays, list(found(tmp_path)["m"].versions)) == ((), [1])


def test_folders_beside_a_model_file_are_no_strays(tmp_path: Path) -> None:
    touch(tmp_path / "m" / "model.onnx")
    (tmp_path / "m" / "weights").mkdir()
    assert found(tmp_path / "m")["m"].strays == ()


def test_versions_may_be_links(tmp_path: Path) -> None:
    touch(tmp_path / "weights" / "model.onnx")
    (tmp_path / "repository" / "m").mkdir(parents=True)
    (tmp_path / "repository" / "m" / "3").symlink_to(tmp_path / "weights")
    assert found(tmp_path / "repository")["m"].versions.keys() == {3}


def test_bare_file_is_version_1_of_its_model(tmp_path: Path) -> None:
    file = touch(tmp_path / "res.net.onnx")
    touch(tmp_path / "config.pbtxt")
    model = found(file)["res.net"]
    assert (model.file, model.versions) == (file, {1: tmp_path})
    assert model.config is None


def test_bare_file_may_be_a_link(tmp_path: Path) -> None:
    touch(tmp_path / "blob")
    (tmp_path / "m.onnx").symlink_to(tmp_path / "blob")
    assert found(tmp_path / "m.onnx").keys() == {"m"}


def test_config_of_folder_may_be_no_file(tmp_path: Path) -> None:
    config = touch(tmp_path / "a" / "config.pbtxt")
    (tmp_path / "b" / "config.pbtxt").mkdir(parents=True)
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "config.pbtxt").symlink_to("nowhere")
    (tmp_path / "d").mkdir()
    models = found(tmp_path)
    assert models["a"].config == config
    assert models["b"].config == tmp_path / "b" / "config.pbtxt"
    assert models["c"].config == tmp_path / "c" / "config.pbtxt"
    assert models["d"].config is None


def test_config_of_another_name_is_used_where_it_exists(tmp_path: Path) -> None:
    usual, edge = touch(tmp_path / "a" / "config.pbtxt"), touch(tmp_path / "a" / "configs" / "edge.pbtxt")
    other = touch(tmp_path / "b" / "config.pbtxt")
    (tmp_path / "c" / "1").mkdir(parents=True)
    models = {model.name: model for model in find_models([tmp_path], "edge")}
    assert [models[name].config for name in "abc"] == [edge, other, None]
    assert find_models([tmp_path])[0].config == usual


def test_several_paths_are_combined_in_name_order(tmp_path: Path) -> None:
    touch(tmp_path / "repository" / "c" / "1" / "model.onnx")
    touch(tmp_path / "b" / "model.onnx")
    touch(tmp_path / "a.onnx")
    models = find_models([tmp_path / "repository", tmp_path / "b", tmp_path / "a.onnx"])
    assert [model.name for model in models] == ["a", "b", "c"]


def test_models_of_same_name_are_one_entry(tmp_path: Path) -> None:
    touch(tmp_path / "one" / "m" / "1" / "model.onnx")
    touch(tmp_path / "m.onnx")
    model = found(tmp_path / "one", tmp_path / "m.onnx")["m"]
    assert (model.duplicates, model.versions) == ((tmp_path / "one" / "m", tmp_path / "m.onnx"), {})


def test_refused_path_that_does_not_exist(tmp_path: Path) -> None:
    assert refusal(tmp_path / "gone") == f"{tmp_path}/gone: No such file or directory"


def test_refused_path_too_long_for_the_system(tmp_path: Path) -> None:
    assert refusal(tmp_path / ("x" * 300)).endswith(": File name too long")


def test_refused_file_of_another_kind(tmp_path: Path) -> None:
    file = touch(tmp_path / "model.pt")
    assert refusal(file) == f"{file}: expected a .onnx file or a folder"


def test_refused_pipe_is_neither_file_nor_folder(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "m.onnx")
    assert refusal(tmp_path / "m.onnx") == f"{tmp_path}/m.onnx: Not a directory"


@pytest.mark.parametrize("content", [[], ["README.md"], [".hidden/1/model.onnx"]])
def test_refused_folder_without_models_says_what_was_expected(tmp_path: Path, content: list[str]) -> None:
    for name in content:
        touch(tmp_path / name)
    assert refusal(tmp_path) == (
        f"{tmp_path}: no models here; expected a model repository (<model>/<version>/model.onnx), one model's folder "
        "or a .onnx file"
    )


def test_refused_folder_with_several_files_names_them(tmp_path: Path) -> None:
    touch(tmp_path / "encoder.onnx")
    touch(tmp_path / "decoder.onnx")
    assert refusal(tmp_path) == (
        f"{tmp_path}: expected one .onnx file, or one called model.onnx, got decoder.onnx, encoder.onnx; to load "
        f"several, give each as a path of its own, or move it to {tmp_path}/<model>/<version>/model.onnx"
    )


@pytest.fixture
def folder() -> Iterator[Path]:
    with open_folder() as folder:
        yield folder


@pytest.mark.parametrize("mode", [0o000, 0o444, 0o111], ids=["nothing", "list only", "enter only"])
def test_refused_path_without_permission_to_read(folder: Path, mode: int) -> None:
    touch(folder / "locked" / "1" / "model.onnx")
    (folder / "locked").chmod(mode)
    with unprivileged():
        assert refusal(folder / "locked") == f"{folder}/locked: Permission denied"


@pytest.mark.parametrize("mode", [0o000, 0o444, 0o111], ids=["nothing", "list only", "enter only"])
def test_repository_unreadable_model_alone_has_a_problem(folder: Path, mode: int) -> None:
    touch(folder / "locked" / "1" / "model.onnx")
    touch(folder / "open" / "1" / "model.onnx")
    (folder / "locked").chmod(mode)
    with unprivileged():
        models = found(folder)
    assert models["locked"].problem == f"{folder}/locked: Permission denied"
    assert not models["locked"].versions
    assert (models["open"].problem, models["open"].versions.keys()) == ("", {1})


def test_find_models_ignores_lost_and_found(tmp_path: Path) -> None:
    (tmp_path / "lost+found").mkdir()
    (tmp_path / "m" / "1").mkdir(parents=True)
    assert [model.name for model in find_models([tmp_path])] == ["m"]


def test_folder_with_one_onnx_file_is_that_model(tmp_path: Path) -> None:
    file = touch(tmp_path / "resnet50.onnx")
    touch(tmp_path / "resnet50.onnx_data")
    (tmp_path / ".cache").mkdir()
    assert find_models([tmp_path]) == [ModelFolder("resnet50", tmp_path, {1: tmp_path}, file=file)]


@pytest.mark.parametrize("other", ["b.onnx", "m/1/model.onnx"], ids=["second file", "repository"])
def test_find_models_ignores_onnx_files_beside_others(tmp_path: Path, other: str) -> None:
    touch(tmp_path / "a.onnx")
    touch(tmp_path / other)
    layout = opened(tmp_path)
    assert [model.name for model in layout.models()] == [path.name for path in tmp_path.iterdir() if path.is_dir()]
