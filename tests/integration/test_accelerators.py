"""Execution accelerators of `config.pbtxt` in a running server: OpenVINO where it is installed, and refusals."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import grpc
import numpy as np
import onnxruntime as ort
import pytest

from paceline.protos import inference_pb2 as pb
from tests import models
from tests.integration.controlling import explicit, load
from tests.integration.serving import failure_of, serving
from tests.wire import infer

OPENVINO = "optimization { execution_accelerators { cpu_execution_accelerator { name: 'openvino' } } }"
ON_CPU = "max_batch_size: 8 dynamic_batching { } instance_group { kind: KIND_CPU }"


def write(repository: Path, config: str) -> None:
    models.write(models.mlp((16, 64, 4)), repository / "m" / "1" / "model.onnx")
    (repository / "m" / "config.pbtxt").write_text(config)


async def test_openvino_serves_batches_with_the_same_answers_as_the_cpu(tmp_path: Path) -> None:
    if "OpenVINOExecutionProvider" not in ort.get_available_providers():
        pytest.skip("this onnxruntime has no OpenVINOExecutionProvider")
    write(tmp_path, f"{ON_CPU} {OPENVINO}")
    session = ort.InferenceSession(tmp_path / "m" / "1" / "model.onnx", providers=["CPUExecutionProvider"])
    rows = np.random.default_rng(3).standard_normal((12, 1, 16)).astype(np.float32)
    async with serving(tmp_path) as served:
        answers = await asyncio.gather(*(served.infer(infer("m", {"INPUT0": row})) for row in rows))
        assert await served.metric("nv_inference_count") >= 12
    for row, answer in zip(rows, answers, strict=True):
        (expected,) = session.run(None, {"INPUT0": row})
        found = np.frombuffer(answer.raw_output_contents[0], np.float32).reshape(expected.shape)
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


async def test_missing_openvino_fails_the_load_and_the_error_names_the_package(tmp_path: Path) -> None:
    if "OpenVINOExecutionProvider" in ort.get_available_providers():
        pytest.skip("this onnxruntime has it")
    write(tmp_path, f"{ON_CPU} {OPENVINO}")
    async with serving(tmp_path, settings=explicit(tmp_path)) as served:
        code, text = await failure_of(load(served, "m"))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert "the package onnxruntime-openvino has it" in text
        assert not (await served.stub.ModelReady(pb.ModelReadyRequest(name="m"))).ready


@pytest.mark.parametrize(
    ("accelerators", "fault"),
    [
        (
            "gpu_execution_accelerator { name: 'vulkan' }",
            "gpu_execution_accelerator: expected one of cuda, tensorrt, got 'vulkan'",
        ),
        (
            "cpu_execution_accelerator { name: 'tensorrt' }",
            "cpu_execution_accelerator: expected one of openvino, got 'tensorrt'",
        ),
        (
            "gpu_execution_accelerator { name: 'tensorrt' parameters { key: 'workspace' value: '1' } }",
            "execution accelerator 'tensorrt': expected one of .*, got 'workspace'",
        ),
    ],
)
async def test_unknown_accelerator_or_parameter_fails_the_load_and_is_named(
    tmp_path: Path, accelerators: str, fault: str
) -> None:
    write(tmp_path, f"{ON_CPU} optimization {{ execution_accelerators {{ {accelerators} }} }}")
    async with serving(tmp_path, settings=explicit(tmp_path)) as served:
        code, text = await failure_of(load(served, "m"))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert re.search(fault, text)


@pytest.mark.parametrize(
    ("key", "value"), [("trt_engine_cache_path", "/tmp/x"), ("trt_dump_subgraphs", "1")], ids=lambda text: text
)
async def test_client_that_loads_a_model_cannot_choose_where_the_server_writes(
    tmp_path: Path, key: str, value: str
) -> None:
    write(tmp_path, ON_CPU)
    accelerator = f'"name": "tensorrt", "parameters": {{"{key}": "{value}"}}'
    brought = f'{{"optimization": {{"executionAccelerators": {{"gpuExecutionAccelerator": [{{{accelerator}}}]}}}}}}'
    async with serving(tmp_path, settings=explicit(tmp_path)) as served:
        code, text = await failure_of(load(served, "m", config=brought))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert f"'tensorrt': {key}: clients may not choose where the server writes files" in text
        await load(served, "m")
        assert (await served.stub.ModelReady(pb.ModelReadyRequest(name="m"))).ready
