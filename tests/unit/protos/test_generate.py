"""The generator: the checked-in files are current, and it fails loudly when protoc writes something else."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.protos.generate import (
    PROTOS_DIR,
    REWRITES,
    TOOLS_VERSION,
    GenerateError,
    generate,
    main,
    require_tools,
    rewrite,
)


@pytest.fixture(scope="module")
def generated() -> dict[str, str]:
    return generate()


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    folder = tmp_path / "paceline" / "protos"
    shutil.copytree(PROTOS_DIR, folder, ignore=shutil.ignore_patterns("__pycache__"))
    (folder.parent / "__init__.py").touch()
    return folder


def run_generate(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "paceline.protos.generate", *arguments]
    return subprocess.run(command, cwd=folder.parents[1], capture_output=True, text=True, timeout=60, check=False)


def test_check_checked_in_files_are_current(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--check"]) == 0
    assert capsys.readouterr().out == ""


def test_check_names_edited_missing_and_stale_files(copied: Path) -> None:
    target = copied / "inference_pb2.py"
    target.write_text(target.read_text() + "EDITED = True\n")
    (copied / "model_config_pb2.pyi").unlink()
    (copied / "model_config_pb2_grpc.py").write_text("")
    result = run_generate(copied, "--check")
    assert result.returncode == 1
    assert "give: inference_pb2.py, model_config_pb2.pyi, model_config_pb2_grpc.py; run `python" in result.stderr
    assert "EDITED" in target.read_text()


def test_generate_edited_proto_changes_the_files_and_check_passes(copied: Path) -> None:
    proto = copied / "inference.proto"
    proto.write_text(proto.read_text() + "\nmessage Added { string name = 1; }\n")
    assert run_generate(copied, "--check").returncode == 1
    assert run_generate(copied).returncode == 0
    assert "class Added" in (copied / "inference_pb2.pyi").read_text()
    assert run_generate(copied, "--check").returncode == 0


def test_generate_broken_proto_exits_1_with_message(copied: Path) -> None:
    (copied / "inference.proto").write_text('syntax = "proto3"; message {')
    result = run_generate(copied)
    assert result.returncode == 1
    assert "error: protoc: expected exit status 0, got 1" in result.stderr
    assert "Traceback" not in result.stderr


def test_rewrite_expected_text_missing_raises_error() -> None:
    with pytest.raises(GenerateError, match=r"inference_pb2_grpc\.py: expected 1 of .* got 0; adapt REWRITES"):
        rewrite("inference_pb2_grpc.py", "import grpc\n")


def test_rewrite_expected_text_twice_raises_error() -> None:
    text = "\nimport inference_pb2 as inference__pb2\n"
    with pytest.raises(GenerateError, match=r"expected 1 of .* got 2"):
        rewrite("inference_pb2_grpc.py", text + text)


def test_rewrite_default_pool_left_raises_error() -> None:
    with pytest.raises(GenerateError, match=r"model_config_pb2\.pyi: '_descriptor_pool' is left"):
        rewrite("model_config_pb2.pyi", "x = _descriptor_pool.Default()\n")


def test_rewrite_each_file_names_its_source_command(generated: dict[str, str]) -> None:
    assert set(generated) == set(REWRITES)
    for text in generated.values():
        assert text.startswith("# Made from the .proto files by `python -m paceline.protos.generate`; do not edit.\n")


@pytest.mark.parametrize("installed", ["none", "1.75.0", "1.80.0"])
def test_require_tools_other_version_raises_error(installed: str) -> None:
    with pytest.raises(GenerateError, match=f"grpcio-tools: expected {TOOLS_VERSION}, got {installed}"):
        require_tools(installed)


def test_require_tools_pinned_version_passes() -> None:
    require_tools(TOOLS_VERSION)
