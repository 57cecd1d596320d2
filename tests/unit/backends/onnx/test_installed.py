"""Which packages of ONNX Runtime are found, and what is said of an installation that can't be used."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.backends.installed import packages
from tests.fault.test_startup import failed_start
from tests.harness import ServerProcess, write_identity
from tests.models import mlp, write

BROKEN = ["raise ImportError('libonnxruntime.so.1: no such file')", ""]
"""What may be left in `__init__.py` of a package that was half removed; nothing: no such file, or another's."""


def install(folder: Path, name: str, version: str) -> None:
    """What pip writes about a package."""
    written = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    written.mkdir()
    (written / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


@pytest.mark.parametrize("name", ["onnxruntime", "onnxruntime-gpu", "onnxruntime-openvino"])
def test_any_one_package_alone_is_accepted(tmp_path: Path, name: str) -> None:
    install(tmp_path, name, "1.31.1")
    install(tmp_path, "onnxruntime-extensions", "0.14.0")  # has a folder of its own
    assert packages([str(tmp_path)]) == [f"{name}==1.31.1"]


def test_second_package_is_told_with_how_to_remove_it(tmp_path: Path) -> None:
    write(mlp(), tmp_path / "models" / "m" / "1" / "model.onnx")
    (there,) = packages()
    other = "onnxruntime-openvino" if there.startswith("onnxruntime==") else "onnxruntime"
    install(tmp_path, other, "1.27.0")
    with ServerProcess(tmp_path / "models", env={"PYTHONPATH": str(tmp_path)}) as server:
        (told,) = (record for record in server.log if "same folder" in record["message"])
    assert told["level"] == "WARNING"
    assert f"pip uninstall {min(other, there.partition('==')[0])} && " in told["message"]


@pytest.mark.parametrize("rest", BROKEN)
def test_half_removed_package_is_one_line_that_says_what_to_install(tmp_path: Path, rest: str) -> None:
    write(mlp(), tmp_path / "models" / "m" / "1" / "model.onnx")
    (tmp_path / "onnxruntime").mkdir()
    (tmp_path / "onnxruntime" / "__init__.py").write_text(rest)
    (there,) = packages()
    text = failed_start(tmp_path / "models", env={"PYTHONPATH": str(tmp_path)})
    assert text.startswith("failed to load model 'm': onnxruntime can't be used: ")
    assert text.endswith(f"Installed: {there}. Try: pip install --force-reinstall --no-deps {there}")


def test_other_backends_do_without_onnx_runtime(tmp_path: Path) -> None:
    write_identity(tmp_path / "models")
    (tmp_path / "onnxruntime").mkdir()
    (tmp_path / "onnxruntime" / "__init__.py").write_text(BROKEN[0])
    with ServerProcess(tmp_path / "models", env={"PYTHONPATH": str(tmp_path)}) as server:
        assert server.terminate() == 0
