"""Environments that models bring along."""

from __future__ import annotations

import io
import sys
import tarfile
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.backends.base import Device, ModelSource
from paceline.backends.errors import LoadError
from paceline.backends.python.backend import PythonBackend
from paceline.backends.python.environments import unpack
from tests.unit.backends.python_models import model_source

SOURCE = """
import os, sys
class Model:
    inputs = {"x": ("FP32", [-1])}
    outputs = {"y": ("FP32", [-1])}
    def execute(self, inputs): return {"y": inputs["x"]}
assert os.environ["PATH"].startswith(os.environ["CONDA_PREFIX"] + "/bin")
assert os.environ["WRAPPED"] == "yes"
"""
WRAPPER = f'#!/bin/sh\nWRAPPED=yes exec {sys.executable} "$@"\n'


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelSource:
    """A model whose environment is to be found; what is unpacked is in `tmp_path / "temporary"`."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    folder = tmp_path / "m" / "1"
    folder.mkdir(parents=True)
    (folder / "model.py").write_text(SOURCE)
    return model_source(folder / "model.py")


def at(source: ModelSource, path: str, **more: str) -> ModelSource:
    return replace(source, parameters={"EXECUTION_ENV_PATH": path, **more})


def archive(path: Path, *entries: tarfile.TarInfo, content: str = WRAPPER) -> Path:
    with tarfile.open(path, "w:gz") as made:
        for entry in entries:
            if entry.isreg():
                entry.size = len(content)
            made.addfile(entry, io.BytesIO(content.encode()) if entry.isreg() else None)
    return path


def entry(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.type, made.linkname, made.mode = kind, link, 0o755
    return made


def unpacked(root: Path) -> list[Path]:
    return [*(root / "temporary").iterdir()]


def test_folder_beside_the_model_is_used(source: ModelSource, tmp_path: Path) -> None:
    python = tmp_path / "m" / "env" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(WRAPPER)
    python.chmod(0o755)
    PythonBackend().open(at(source, "$$TRITON_MODEL_DIRECTORY/env"), Device()).close()
    assert not unpacked(tmp_path)


def test_archive_is_unpacked_while_the_model_is_open(source: ModelSource, tmp_path: Path) -> None:
    packed = archive(tmp_path / "env.tar.gz", entry("bin/python3"), entry("bin/python", tarfile.SYMTYPE, "python3"))
    opened = PythonBackend().open(at(source, str(packed)), Device())
    assert len(unpacked(tmp_path)) == 1
    opened.close()
    assert not unpacked(tmp_path)


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("env", "expected an absolute path, or one that begins with"),
        ("$$TRITON_MODEL_DIRECTORY/no.tar.gz", "No such file or directory"),
        ("$$TRITON_MODEL_DIRECTORY/1/model.py", "can't be used: file could not be opened successfully"),
        ("$$TRITON_MODEL_DIRECTORY", "expected bin/python in .*/m, found none"),
    ],
)
def test_unusable_environment_fails_the_load(source: ModelSource, tmp_path: Path, path: str, words: str) -> None:
    with pytest.raises(LoadError, match=words):
        PythonBackend().open(at(source, path), Device())
    assert not unpacked(tmp_path)


@pytest.mark.parametrize(
    "bad",
    [
        entry("../outside"),
        entry("bin/python", tarfile.SYMTYPE, "/bin/sh"),
        entry("bin/python", tarfile.SYMTYPE, "../../../bin/sh"),
        entry("device", tarfile.CHRTYPE),
    ],
    ids=lambda one: f"{one.name} {one.linkname}",
)
def test_archive_with_entries_elsewhere_is_refused(source: ModelSource, tmp_path: Path, bad: tarfile.TarInfo) -> None:
    packed = archive(tmp_path / "env.tar.gz", bad)
    with pytest.raises(LoadError, match="can't be used"):
        PythonBackend().open(at(source, str(packed)), Device())
    assert not unpacked(tmp_path)
    assert not (tmp_path / "temporary" / "outside").exists()


def test_truncated_archive_fails_the_load(source: ModelSource, tmp_path: Path) -> None:
    packed = archive(tmp_path / "env.tar.gz", entry("bin/python"), content="# " + "text " * 10_000)
    packed.write_bytes(packed.read_bytes()[:-40])
    with pytest.raises(LoadError, match="can't be used"):
        PythonBackend().open(at(source, str(packed)), Device())
    assert not unpacked(tmp_path)


@pytest.mark.parametrize(("most_bytes", "most_entries"), [(len(WRAPPER), 10), (10_000, 1)])
def test_archive_that_is_too_large_is_refused(tmp_path: Path, most_bytes: int, most_entries: int) -> None:
    packed = archive(tmp_path / "env.tar.gz", entry("one"), entry("two"))
    with pytest.raises(LoadError, match=f"expected at most {most_entries} entries and {most_bytes} bytes, got more"):
        unpack(packed, tmp_path / "there", most_bytes, most_entries)


def test_interpreter_and_environment_exclude_each_other(source: ModelSource) -> None:
    both = at(source, "/env", **{"paceline.python_executable": "python"})
    with pytest.raises(LoadError, match=r"expected none, as paceline.python_executable names an interpreter"):
        PythonBackend().open(both, Device())
