"""TensorRT and OpenVINO where they are installed, and the errors where they aren't: a model computes on what it asks
for or isn't loaded."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest

from paceline.backends.base import Device, DeviceKind, ModelSource
from paceline.backends.cuda.driver import count_gpus
from paceline.backends.errors import LoadError
from paceline.backends.onnx.backend import OnnxBackend, OnnxModel
from paceline.backends.onnx.options import CACHE_DIRECTORY, OnnxOptions, parse_options
from paceline.backends.onnx.providers import ready_accelerator
from paceline.backends.spec import ModelSpec, TensorSpec
from tests import models

CPU, GPU = Device(), Device(DeviceKind.GPU, 0)
SPEC = ModelSpec((TensorSpec("INPUT0", "FP32", (16,)),), (TensorSpec("OUTPUT0", "FP32", (4,)),), batched=True)
TENSORRT, OPENVINO = "TensorrtExecutionProvider", "OpenVINOExecutionProvider"
LOGGER = "paceline.backends.onnx"


def source(tmp_path: Path, parameters: Mapping[str, str] | None = None, **more: object) -> ModelSource:
    path = models.write(models.mlp((16, 64, 4)), tmp_path / "model.onnx")
    return ModelSource("m", path, parameters=parameters or {}, **more)  # type: ignore[arg-type]


def opened(tmp_path: Path, given: Mapping[str, str], device: Device = CPU) -> OnnxModel:
    accelerators = {"cpu_accelerators" if device is CPU else "accelerators": ((name_for(device), given),)}
    # Staging batches needs a driver, and its absence would be the first error.
    return OnnxBackend(accelerators=lambda device: None).open(source(tmp_path, **accelerators), device)


def name_for(device: Device) -> str:
    return "openvino" if device is CPU else "tensorrt"


def needs(provider: str) -> None:
    if provider not in ort.get_available_providers():
        pytest.skip(f"this onnxruntime has no {provider}")


def results(model: OnnxModel, device: Device, x: np.ndarray) -> np.ndarray:  # type: ignore[type-arg]
    (result,) = model.instance(SPEC, device).execute([(x,)]).results
    assert not isinstance(result, Exception)
    return result[0]


# --- where they are missing ------------------------------------------------------------------------------------------


def test_missing_openvino_is_refused_naming_the_package_that_has_it(tmp_path: Path) -> None:
    if OPENVINO in ort.get_available_providers():
        pytest.skip("this onnxruntime has it")
    with pytest.raises(LoadError) as caught:
        opened(tmp_path, {})
    assert re.fullmatch(
        r"model 'm': can't open '.*': execution accelerator 'openvino': this onnxruntime \S+ has no "
        r"OpenVINOExecutionProvider, only .*; the package onnxruntime-openvino has it, which takes the place of "
        r"onnxruntime-gpu",
        str(caught.value),
    )


def test_tensorrt_without_its_libraries_is_refused_naming_the_first_missing_one(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    needs(TENSORRT)
    try:
        count_gpus()
    except LoadError:
        with pytest.raises(LoadError) as caught:
            opened(tmp_path, {"trt_engine_cache_path": str(tmp_path / "engines")}, GPU)
        assert re.search(rf"onnxruntime couldn't use {TENSORRT}: lib\S+: cannot open shared object", str(caught.value))
        assert "it needs TensorRT 10" in str(caught.value)
        assert "\n" not in str(caught.value)
        assert capfd.readouterr() == ("", "")
    else:
        pytest.skip("there is a GPU")


def test_tensorrt_in_a_build_without_it_is_refused_by_name(tmp_path: Path) -> None:
    if TENSORRT in ort.get_available_providers():
        pytest.skip("this onnxruntime has it")
    with pytest.raises(LoadError, match=f"'tensorrt': this onnxruntime .* has no {TENSORRT}"):
        opened(tmp_path, {}, GPU)


def test_accelerator_of_another_device_is_ignored_and_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, LOGGER):
        OnnxBackend().open(source(tmp_path, accelerators=(("tensorrt", {}),)), CPU)
    assert [record.getMessage() for record in caplog.records] == [
        "model 'm': instances on the CPU ignore its gpu_execution_accelerator"
    ]


# --- where TensorRT stores its engines --------------------------------------------------------------------------------


def ready(tmp_path: Path, given: Mapping[str, str], directory: str = "", rows: int = 8) -> Mapping[str, str]:
    needs(TENSORRT)
    path = models.write(models.mlp((16, 64, 4)), tmp_path / "model.onnx")
    options = OnnxOptions(tensorrt=given, cache_directory=directory, largest_rows=rows)
    found = ready_accelerator("m", path, options, GPU)
    assert found.tensorrt is not None
    assert found.tensorrt["device_id"] == "0"
    return found.tensorrt


def test_engines_are_stored_in_the_users_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    place = tmp_path / "cache" / "paceline" / f"tensorrt-{ort.__version__}" / "m"
    found = ready(tmp_path, {})
    assert (found["trt_engine_cache_enable"], found["trt_engine_cache_path"]) == ("True", str(place))
    assert place.stat().st_mode & 0o077 == 0


def test_engines_are_stored_where_the_model_or_else_the_flag_says(tmp_path: Path) -> None:
    flag, own = tmp_path / "flag", tmp_path / "own"
    assert ready(tmp_path, {}, str(flag))["trt_engine_cache_path"].startswith(str(flag))
    assert ready(tmp_path, {"trt_engine_cache_path": str(own)}, str(flag))["trt_engine_cache_path"] == str(own)
    assert own.is_dir()


def test_engines_that_are_not_stored_need_no_folder(tmp_path: Path) -> None:
    found = ready(tmp_path, {"trt_engine_cache_enable": "False"}, "/dev/null/nowhere")
    assert "trt_engine_cache_path" not in found


@pytest.mark.parametrize("asked", [{"trt_engine_cache_path": "/dev/null/x"}, {"trt_engine_cache_enable": "True"}])
def test_requested_engine_cache_that_cannot_be_written_is_refused(
    asked: Mapping[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    with pytest.raises(
        LoadError, match=r"engines can't be stored: .*; expected a folder that the server can write to, in"
    ):
        ready(tmp_path, asked)


def test_default_engine_cache_that_cannot_be_written_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    assert ready(tmp_path, {})["trt_engine_cache_enable"] == "False"
    assert "TensorRT rebuilds its engines at each start" in caplog.text


def test_profile_has_the_models_shapes_up_to_the_largest_batch(tmp_path: Path) -> None:
    found = ready(tmp_path, {"trt_engine_cache_enable": "False"})
    assert found["trt_profile_min_shapes"] == "INPUT0:1x16"
    assert found["trt_profile_opt_shapes"] == found["trt_profile_max_shapes"] == "INPUT0:8x16"


def test_profile_given_by_the_model_is_kept(tmp_path: Path) -> None:
    given = {"trt_engine_cache_enable": "False", "trt_profile_max_shapes": "INPUT0:4x16"}
    assert ready(tmp_path, given) == {**given, "device_id": "0"}


# --- where they are installed ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [{}, {"precision": "FP32", "num_of_threads": "1"}])
def test_openvino_answers_as_the_cpu_and_logs_how_many_nodes_it_computes(
    given: Mapping[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    needs(OPENVINO)
    x = np.random.default_rng(1).standard_normal((3, 16)).astype(np.float32)
    expected = results(OnnxBackend().open(source(tmp_path), CPU), CPU, x)
    with caplog.at_level(logging.INFO, LOGGER):
        model = opened(tmp_path, given)
    np.testing.assert_allclose(results(model, CPU, x), expected, rtol=1e-4, atol=1e-5)
    assert re.search(rf"{OPENVINO} computes \d+ of the model's \d+ nodes", caplog.text)


def test_openvino_that_can_compute_no_node_is_refused(tmp_path: Path) -> None:
    needs(OPENVINO)
    path = models.write(models.identity("BYTES"), tmp_path / "model.onnx")
    with pytest.raises(LoadError, match=f"{OPENVINO} takes none of the model's 1 nodes"):
        OnnxBackend().open(ModelSource("m", path, cpu_accelerators=(("openvino", {}),)), CPU)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["FP32", "FP16"])
def test_tensorrt_answers_as_the_cpu_and_stores_its_engine(precision: str, tmp_path: Path) -> None:
    needs(TENSORRT)
    try:
        count_gpus()
    except LoadError as error:
        pytest.skip(str(error))
    x = np.random.default_rng(1).standard_normal((3, 16)).astype(np.float32)
    expected = results(OnnxBackend().open(source(tmp_path), CPU), CPU, x)
    given = {"precision_mode": precision, "trt_engine_cache_path": str(tmp_path / "engines")}
    try:
        model = opened(tmp_path, given, GPU)
    except LoadError as error:
        if "cannot open shared object" in str(error):
            pytest.skip(str(error))
        raise
    np.testing.assert_allclose(results(model, GPU, x), expected, rtol=2e-2, atol=2e-2)
    assert list((tmp_path / "engines").iterdir())


def test_cache_directory_reaches_the_options(tmp_path: Path) -> None:
    assert parse_options(source(tmp_path, {CACHE_DIRECTORY: "/x"})).cache_directory == "/x"
