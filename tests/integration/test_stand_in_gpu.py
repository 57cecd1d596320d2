"""The CUDA path on a GPU that isn't one (`tests/cuda/stand_in.py`): ONNX Runtime's own provider, from the wheel, on
libraries that carry out what it queues as late, or in an order as random, as CUDA allows."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import onnxruntime as ort  # type: ignore[import-untyped,unused-ignore]
import pytest

from tests.cuda import stand_in
from tests.harness import REPO

_OPTIONS = ("-o", "addopts=--import-mode=importlib", "-m", "gpu", "-rs", "-p", "no:cacheprovider", "-q")
_WITHOUT = ("this cuDNN is a stand-in", "libnvinfer.so.10: cannot open")


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if "CUDAExecutionProvider" not in ort.get_available_providers():
        pytest.skip("this onnxruntime is built without CUDA")
    return stand_in.libraries(tmp_path_factory.mktemp("gpu"))


@pytest.mark.parametrize("seed", ["", "1", "2"], ids=["late", "random-1", "random-2"])
def test_what_needs_a_gpu_passes(seed: str, libraries: Path, tmp_path: Path) -> None:
    files = [str(one) for one in (REPO / "tests").rglob("test_*.py") if "mark.gpu" in one.read_text()]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *_OPTIONS, "--basetemp", str(tmp_path / "their"), *files],
        cwd=REPO,
        env={**environment, "LD_LIBRARY_PATH": str(libraries), "STAND_IN_SEED": seed},
        capture_output=True,
        text=True,
        timeout=110,
    )
    said = f"{run.stdout[-8000:]}\n{run.stderr[-4000:]}"
    assert run.returncode == 0, said
    reasons = re.findall(r"^SKIPPED \[\d+\] \S+: (.*)$", run.stdout, re.MULTILINE)
    assert [one for one in reasons if not any(known in one for known in _WITHOUT)] == [], said
