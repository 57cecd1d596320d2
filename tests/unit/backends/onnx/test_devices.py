"""Which device an ONNX model gets, and the error if it can't have the requested one."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import pytest

from paceline.backends.base import Device, DeviceKind, GroupKind, InstanceGroup, ModelSource
from paceline.backends.cuda.driver import count_gpus
from paceline.backends.errors import DriverFailed, ExecutionError, LoadError, NoDriver
from paceline.backends.onnx.backend import OnnxBackend
from paceline.backends.onnx.sessions import PROBE_MODEL
from paceline.backends.spec import ModelSpec, TensorSpec
from tests import models

CPU = Device(DeviceKind.CPU)
LOGGER = "paceline.backends.onnx"


def _gpu(index: int) -> Device:
    return Device(DeviceKind.GPU, index)


def _no_driver() -> int:
    raise LoadError("no driver here")


def _skip_without_gpu() -> int:
    try:
        return count_gpus()
    except LoadError as reason:
        pytest.skip(str(reason))


def _skip_with_gpu() -> None:
    try:
        count_gpus()
    except LoadError:
        return
    pytest.skip("says what happens where CUDA can't be used; here it can")


def _without_gpu() -> OnnxBackend:
    return OnnxBackend(_no_driver)


def _with_two() -> OnnxBackend:
    return OnnxBackend(lambda: 2)


def test_devices_cpu_group_never_asks_for_gpus() -> None:
    def asked() -> int:
        raise AssertionError("asked for GPUs")

    assert OnnxBackend(asked).devices([InstanceGroup(GroupKind.CPU, 2)]) == (CPU, CPU)


def test_devices_cpu_group_without_count_is_one_instance() -> None:
    assert _without_gpu().devices([InstanceGroup(GroupKind.CPU)]) == (CPU,)


def test_devices_gpu_groups_are_all_gpus_or_those_named() -> None:
    groups = [InstanceGroup(GroupKind.GPU), InstanceGroup(GroupKind.GPU, 2, (1,)), InstanceGroup(GroupKind.CPU)]

    assert _with_two().devices(groups) == (_gpu(0), _gpu(1), _gpu(1), _gpu(1), CPU)


def test_devices_gpu_out_of_range_is_refused() -> None:
    with pytest.raises(LoadError, match="expected GPUs below 2, the number there are, got GPU 2"):
        _with_two().devices([InstanceGroup(GroupKind.GPU, 1, (2,))])


def test_devices_gpu_without_driver_gives_its_reason() -> None:
    words = "^instance_group KIND_GPU: no driver here; KIND_CPU and KIND_AUTO don't need a GPU$"
    with pytest.raises(LoadError, match=words):
        _without_gpu().devices([InstanceGroup(GroupKind.GPU)])


def test_devices_gpu_with_a_cpu_build_of_onnxruntime_says_which_package_has_cuda() -> None:
    backend = OnnxBackend(lambda: 2, lambda: ["AzureExecutionProvider", "CPUExecutionProvider"])

    with pytest.raises(LoadError, match=r"has no CUDAExecutionProvider, only Azure.*onnxruntime-gpu has it"):
        backend.devices([InstanceGroup(GroupKind.GPU)])


@pytest.mark.parametrize("kind", [GroupKind.AUTO, GroupKind.MODEL])
def test_devices_auto_without_gpu_is_the_cpu_and_one_line_says_why(
    kind: GroupKind, caplog: pytest.LogCaptureFixture
) -> None:
    backend = _without_gpu()
    with caplog.at_level(logging.INFO, LOGGER):
        for _ in range(2):
            assert backend.devices([InstanceGroup(kind, 2)]) == (CPU, CPU)

    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("INFO", f"{kind.value} instances run on the CPU: no driver here")
    ]


def test_devices_auto_without_a_driver_says_no_gpu_and_no_more(caplog: pytest.LogCaptureFixture) -> None:
    def missing() -> int:
        raise NoDriver("no NVIDIA driver: libcuda.so.1 can't be loaded (no such file)")

    for providers in (["CPUExecutionProvider"], ["CUDAExecutionProvider", "CPUExecutionProvider"]):
        backend = OnnxBackend(missing, lambda providers=providers: providers)  # type: ignore[misc]
        with caplog.at_level(logging.INFO, LOGGER):
            assert backend.devices([]) == (CPU,)
        with pytest.raises(LoadError, match=r"libcuda.so.1 can't be loaded \(no such file\)"):
            backend.devices([InstanceGroup(GroupKind.GPU)])
    assert caplog.messages == ["KIND_AUTO instances run on the CPU: no GPU"] * 2


def test_devices_auto_with_a_driver_that_fails_is_the_cpu_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    def fails() -> int:
        raise DriverFailed("the NVIDIA driver failed: cuInit returned 802 (CUDA_ERROR_SYSTEM_NOT_READY)")

    backend = OnnxBackend(fails)
    for _ in range(2):
        assert backend.devices([]) == (CPU,)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "KIND_AUTO instances run on the CPU: the NVIDIA driver failed: cuInit returned 802" in record.getMessage()


def test_devices_no_group_is_auto() -> None:
    assert _without_gpu().devices([]) == (CPU,)


def test_devices_auto_with_gpu_that_cuda_cannot_use_is_the_cpu_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    _skip_with_gpu()

    with caplog.at_level(logging.INFO, LOGGER):
        assert _with_two().devices([]) == (CPU,)

    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.getMessage().startswith("KIND_AUTO instances run on the CPU although there is a GPU: ")


def test_open_on_an_unusable_gpu_never_uses_the_cpu(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    _skip_with_gpu()
    path = models.write(models.add_sub(), tmp_path / "model.onnx")

    with pytest.raises(LoadError) as caught:
        OnnxBackend().open(ModelSource("m", path), _gpu(0))

    assert str(caught.value).startswith(f"model 'm': can't open '{path}': onnxruntime couldn't use GPU 0: ")
    assert "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "")


def test_probe_model_is_the_identity_it_claims_to_be() -> None:
    probe = onnx.load_from_string(PROBE_MODEL)

    onnx.checker.check_model(probe, full_check=True)
    assert [node.op_type for node in probe.graph.node] == ["Identity"]


# --- on a GPU --------------------------------------------------------------------------------------------------------


def _spec(datatype: str, size: int, inputs: int = 1, outputs: int = 1) -> ModelSpec:
    return ModelSpec(
        tuple(TensorSpec(f"INPUT{i}", datatype, (size,)) for i in range(inputs)),
        tuple(TensorSpec(f"OUTPUT{i}", datatype, (size,)) for i in range(outputs)),
        batched=True,
    )


@pytest.mark.gpu
def test_devices_auto_with_usable_gpu_uses_and_logs_it(caplog: pytest.LogCaptureFixture) -> None:
    gpus = _skip_without_gpu()

    with caplog.at_level(logging.INFO, LOGGER):
        assert OnnxBackend().devices([]) == tuple(_gpu(index) for index in range(gpus))

    assert re.fullmatch(r"KIND_AUTO instances run on GPU 0(, \d+)*", caplog.records[-1].getMessage())


@pytest.mark.gpu
def test_execute_on_gpu_equals_the_cpu(tmp_path: Path) -> None:
    _skip_without_gpu()
    path = models.write(models.mlp((16, 64, 4)), tmp_path / "model.onnx")
    spec = ModelSpec((TensorSpec("INPUT0", "FP32", (16,)),), (TensorSpec("OUTPUT0", "FP32", (4,)),), batched=True)
    x = np.random.default_rng(3).standard_normal((8, 16)).astype(np.float32)

    on_gpu, on_cpu = (
        OnnxBackend().open(ModelSource("m", path), device).instance(spec, device).execute([(x[:3],), (x[3:],)])
        for device in (_gpu(0), CPU)
    )

    for (ours,), (reference,) in zip(on_gpu.results, on_cpu.results, strict=True):
        np.testing.assert_allclose(ours, reference, rtol=1e-2, atol=1e-2)  # TF32 on the GPU


@pytest.mark.gpu
@pytest.mark.parametrize("datatype", ["FP32", "FP16", "BF16", "INT64", "BOOL", "BYTES"])
def test_execute_on_gpu_identity_is_exact(datatype: str, tmp_path: Path) -> None:
    _skip_without_gpu()
    path = models.write(models.identity(datatype, ("batch", 2)), tmp_path / "model.onnx")
    instance = OnnxBackend().open(ModelSource("m", path), _gpu(0)).instance(_spec(datatype, 2), _gpu(0))
    sent = {
        "BYTES": np.array([[b"a\0", "é".encode()]], object),
        "BF16": np.array([[1, 0xFFFF]], np.uint16),
        "BOOL": np.array([[True, False]]),
    }.get(datatype, np.array([[1, 2]], {"FP32": np.float32, "FP16": np.float16, "INT64": np.int64}.get(datatype)))

    results = instance.execute([(sent,), (sent,)]).results

    assert [result[0].tolist() for result in results] == [sent.tolist()] * 2


@pytest.mark.gpu
@pytest.mark.parametrize(
    "parameters",
    [
        {"gpu_mem_limit": str(1 << 30), "arena_extend_strategy": "1", "do_copy_in_default_stream": "0"},
        {"memory.enable_memory_arena_shrinkage": "cpu:0;gpu:0;gpu:7", "cudnn_conv_algo_search": "0"},
    ],
)
def test_execute_on_gpu_with_parameters_runs(parameters: Mapping[str, str], tmp_path: Path) -> None:
    _skip_without_gpu()
    path = models.write(models.add_sub("FP32", 2), tmp_path / "model.onnx")
    model = OnnxBackend().open(ModelSource("m", path, parameters=parameters), _gpu(0))
    x = np.ones((1, 2), np.float32)

    results = model.instance(_spec("FP32", 2, 2, 2), _gpu(0)).execute([(x, x)]).results

    assert [output.tolist() for output in results[0]] == [[[2, 2]], [[0, 0]]]


@pytest.mark.gpu
def test_open_on_gpu_with_unknown_cuda_option_is_refused(tmp_path: Path) -> None:
    _skip_without_gpu()
    path = models.write(models.add_sub("FP32", 2), tmp_path / "model.onnx")

    with pytest.raises(LoadError, match="no_such_option"):
        OnnxBackend().open(ModelSource("m", path, accelerators=(("cuda", {"no_such_option": "1"}),)), _gpu(0))


@pytest.mark.gpu
def test_execute_on_gpu_failure_leaves_the_instance_usable(tmp_path: Path) -> None:
    _skip_without_gpu()
    path = models.write(models.identity("FP32", ("batch", 2)), tmp_path / "model.onnx")
    instance = OnnxBackend().open(ModelSource("m", path), _gpu(0)).instance(_spec("FP32", -1), _gpu(0))

    with pytest.raises(ExecutionError, match="onnx runtime error"):
        instance.execute([(np.ones((1, 3), np.float32),)])
    assert instance.execute([(np.ones((1, 2), np.float32),)]).results[0][0].tolist() == [[1, 1]]
