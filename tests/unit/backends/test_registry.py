from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from paceline.backends.errors import LoadError
from paceline.backends.identity import IdentityBackend
from paceline.backends.onnx.backend import OnnxBackend
from paceline.backends.registry import BACKENDS, backend

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("name", ["onnxruntime", "onnxruntime_onnx"])
def test_backend_by_backend_or_platform_name_is_onnx_runtime(name: str) -> None:
    assert isinstance(backend(name), OnnxBackend)


def test_backend_identity_is_the_one_in_memory() -> None:
    assert isinstance(backend("identity"), IdentityBackend)


@pytest.mark.parametrize("name", BACKENDS)
def test_backend_exists_for_each_listed_name(name: str) -> None:
    assert backend(name) is not None


@pytest.mark.parametrize("name", ["tensorrt", "tensorrt_plan", "pytorch", "", "ONNXRUNTIME"])
def test_backend_unknown_name_lists_the_known_ones(name: str) -> None:
    with pytest.raises(LoadError, match=f"expected one of identity, onnxruntime, python, got '{name}'"):
        backend(name)


@pytest.mark.parametrize(
    "module",
    [
        "paceline.backends.identity",
        "paceline.backends.batching",
        "paceline.backends.registry",
        "paceline.backends.onnx.options",
    ],
)
def test_import_of_modules_that_run_no_onnx_model_does_not_import_onnxruntime(module: str) -> None:
    code = f"import sys, {module}; sys.exit('onnxruntime' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False, timeout=60).returncode == 0
