"""What the fingerprint of a model on disk covers: links, hidden files, one file alone."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from paceline.server.models.layout import Layout, look_at, model_folder


def test_fingerprint_follows_links_and_survives_cycles_and_broken_links(tmp_path: Path) -> None:
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "w.bin").write_bytes(b"123")
    (tmp_path / "m" / "1" / "weights").symlink_to(tmp_path / "weights")
    (tmp_path / "m" / "1" / "circle").symlink_to(tmp_path / "m")
    (tmp_path / "m" / "nowhere").symlink_to(tmp_path / "gone")
    folder = model_folder("m", tmp_path / "m")
    found = {Path(path).name: size for path, *_, size in look_at(folder).files}
    assert found == {"w.bin": 3, "nowhere": -1}
    before = look_at(folder).files
    (tmp_path / "weights" / "w.bin").write_bytes(b"1234")
    assert look_at(folder).files != before


def test_fingerprint_includes_where_links_lead(tmp_path: Path) -> None:
    """This is how a mounted ConfigMap is replaced; files written at the same time may differ in nothing else."""
    (tmp_path / "m" / "1").mkdir(parents=True)
    for number in (1, 2):
        (tmp_path / str(number)).mkdir()
    (tmp_path / "1" / "model.onnx").write_bytes(b"1")
    os.link(tmp_path / "1" / "model.onnx", tmp_path / "2" / "model.onnx")
    (tmp_path / "data").symlink_to(tmp_path / "1")
    (tmp_path / "m" / "1" / "model.onnx").symlink_to(tmp_path / "data" / "model.onnx")
    folder = model_folder("m", tmp_path / "m")
    before = look_at(folder).files
    (tmp_path / "new").symlink_to(tmp_path / "2")
    (tmp_path / "new").replace(tmp_path / "data")
    assert look_at(folder).files != before
    (tmp_path / "m" / "2").mkdir()
    before = look_at(folder).files
    (tmp_path / "m" / "2" / "model.onnx").symlink_to(tmp_path / "data" / "model.onnx")
    assert look_at(folder).files != before, "another version of the same file"


@pytest.mark.parametrize("hidden", [".DS_Store", "1/._model.onnx", ".git/HEAD", "1/.config.pbtxt.swp"])
def test_fingerprint_leaves_out_hidden_files(tmp_path: Path, hidden: str) -> None:
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "1" / "model.onnx").write_bytes(b"1")
    folder = model_folder("m", tmp_path / "m")
    before = look_at(folder).files
    (tmp_path / "m" / hidden).parent.mkdir(exist_ok=True)
    (tmp_path / "m" / hidden).write_bytes(b"1")
    assert look_at(folder).files == before


def test_fingerprint_of_a_bare_file_is_of_that_file_only(tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_bytes(b"1")
    (tmp_path / "n.onnx").write_bytes(b"1")
    layout = Layout([tmp_path / "m.onnx"])
    layout.open()
    (folder,) = layout.models()
    assert [Path(path).name for path, *_ in look_at(folder).files] == ["m.onnx"]
    (tmp_path / "m.onnx").unlink()
    assert [size for *_, size in look_at(folder).files] == [-1]
