"""Telemetry about served models, which ONNX Runtime sends to its makers by default: it is switched off."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import grpc
import numpy as np
import pytest

from paceline.protos.inference_pb2_grpc import GRPCInferenceServiceStub
from tests import models
from tests.harness import REPO, ServerProcess
from tests.wire import infer

OWN = 'parameters { key: "paceline.own_process" value { string_value: "true" } }'


def telemetry_environment(folder: Path, told: str) -> dict[str, str]:
    """Variables for all places where ONNX Runtime keeps unsent telemetry; `told` is ORT_DISABLE_TELEMETRY."""
    folder.mkdir(exist_ok=True)
    return {"TMPDIR": str(folder), "HOME": str(folder), "XDG_CACHE_HOME": str(folder), "ORT_DISABLE_TELEMETRY": told}


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_nothing_is_reported_about_served_models(tmp_path: Path) -> None:
    path = models.write(models.mlp(), tmp_path / "models" / "here" / "1" / "model.onnx")
    models.write(models.mlp(), tmp_path / "models" / "apart" / "1" / "model.onnx")
    (tmp_path / "models" / "apart" / "config.pbtxt").write_text(OWN)
    source = f"import onnxruntime as ort; ort.InferenceSession({str(path)!r}, providers=['CPUExecutionProvider'])"
    env = {**os.environ, **telemetry_environment(tmp_path / "told", "0")}
    subprocess.run([sys.executable, "-c", source], env=env, cwd=REPO, check=True, timeout=60)
    if not files(tmp_path / "told"):
        pytest.skip("this onnxruntime tells nobody anything, or not here")
    with (
        ServerProcess(tmp_path / "models", env=telemetry_environment(tmp_path / "server", "")) as server,
        grpc.insecure_channel(server.target) as channel,
    ):
        stub = GRPCInferenceServiceStub(channel)  # type: ignore[no-untyped-call]
        for name in ("here", "apart"):
            stub.ModelInfer(infer(name, {"INPUT0": np.zeros((1, 16), np.float32)}), timeout=60)
        assert files(tmp_path / "server") == []
    assert files(tmp_path / "server") == []
