from __future__ import annotations

import re
import threading
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from paceline.backends.base import Device, DeviceKind, GroupKind, InstanceGroup, ModelSource
from paceline.backends.errors import ExecutionError, LoadError
from paceline.backends.identity import IdentityBackend
from paceline.backends.spec import Array, ModelSpec, Tensors, TensorSpec
from tests.memory_models import (
    MemoryBackend,
    MemoryInstance,
    MemoryModel,
    change_datatype,
    linear_latency,
    lose_output,
    lose_row,
)

PAIR = TensorSpec("x", "FP32", (2,))
BATCHED = ModelSpec((PAIR,), (TensorSpec("y", "FP32", (2,)),), batched=True)
WHOLE = ModelSpec((TensorSpec("x", "FP32", (-1, 2)),), (TensorSpec("y", "FP32", (-1, 2)),))


def _rows(count: int, value: float = 0) -> tuple[Array]:
    return (np.full((count, 2), value, np.float32),)


def _instance(model: MemoryModel) -> MemoryInstance:
    return model.instance(BATCHED, Device())


def test_memory_model_default_returns_its_inputs() -> None:
    execution = _instance(MemoryModel(WHOLE)).execute([_rows(1, 5), _rows(2, 7)])

    assert [result[0].tolist() for result in execution.results] == [[[5, 5]], [[7, 7], [7, 7]]]


def test_memory_model_compute_sees_the_stacked_rows() -> None:
    model = MemoryModel(WHOLE, lambda inputs: [inputs[0] + len(inputs[0])])

    execution = _instance(model).execute([_rows(1), _rows(2)])

    assert execution.results[1][0].tolist() == [[3, 3], [3, 3]]


def test_memory_model_waits_for_the_latency_of_the_batchs_rows() -> None:
    waits: list[float] = []
    model = MemoryModel(WHOLE, latency=linear_latency(0.5, 0.25), wait=waits.append)

    _instance(model).execute([_rows(1), _rows(3)])
    model.latency = None
    _instance(model).execute([_rows(1)])

    assert waits == [1.5]


def test_memory_model_record_lists_rows_per_request_and_failures() -> None:
    model = MemoryModel(WHOLE)
    instance = _instance(model)
    instance.execute([_rows(1), _rows(3)])
    model.faults.raise_next(ExecutionError("boom"))
    with pytest.raises(ExecutionError):
        instance.execute([_rows(2)])

    assert model.batches == [(1, 3), (2,)]


def test_memory_model_unbatched_records_one_row() -> None:
    model = MemoryModel(WHOLE)

    model.instance(WHOLE, Device()).execute([_rows(4)])

    assert model.batches == [(1,)]


@pytest.mark.parametrize("error", [ExecutionError("boom"), RuntimeError("a bug"), MemoryError()])
def test_memory_model_raises_exactly_the_given_error_and_recovers(error: Exception) -> None:
    model = MemoryModel(WHOLE)
    instance = _instance(model)
    model.faults.raise_next(error)

    with pytest.raises(type(error)) as caught:
        instance.execute([_rows(1)])

    assert caught.value is error
    assert len(instance.execute([_rows(1)]).results) == 1


@pytest.mark.parametrize(
    ("distortion", "message"),
    [
        (lose_row, "expected shape [3, 2], got [2, 2]"),
        (lose_output, "expected 1 outputs, got 0"),
        (change_datatype, "expected FP32, got numpy's complex64"),
    ],
)
def test_memory_model_distorted_outputs_are_an_execution_error(distortion: object, message: str) -> None:
    model = MemoryModel(WHOLE)
    instance = _instance(model)
    model.faults.distort_next(distortion)  # type: ignore[arg-type]

    with pytest.raises(ExecutionError, match=re.escape(message)):
        instance.execute([_rows(1), _rows(2)])
    assert len(instance.execute([_rows(1)]).results) == 1


def test_memory_model_gate_holds_an_execution_until_released() -> None:
    model = MemoryModel(WHOLE)
    instance = _instance(model)
    model.gate.close()
    results: list[Tensors] = []
    thread = threading.Thread(target=lambda: results.extend(instance.execute([_rows(1)]).results), daemon=True)
    thread.start()
    model.gate.wait_entered(1)

    assert results == []
    assert model.batches == [(1,)]
    model.gate.release()
    thread.join(timeout=60)
    assert len(results) == 1


def test_memory_model_counts_its_open_instances() -> None:
    model = MemoryModel(WHOLE)
    first, _ = _instance(model), _instance(model)

    first.close()

    assert (model.open_instances, first.closed, model.closed) == (1, True, False)


def test_memory_instance_used_after_close_is_an_error() -> None:
    instance = _instance(MemoryModel(WHOLE))
    instance.close()

    with pytest.raises(ExecutionError, match="the instance is closed"):
        instance.execute([_rows(1)])


def test_memory_backend_opens_the_model_of_that_name() -> None:
    model = MemoryModel(WHOLE)
    backend = MemoryBackend({"m": model})

    assert backend.open(ModelSource("m", Path()), Device()) is model
    with pytest.raises(LoadError, match=re.escape("model 'n': no such model in memory, only ['m']")):
        backend.open(ModelSource("n", Path()), Device())


def _identity_source(declared: ModelSpec | None = WHOLE, parameters: Mapping[str, str] | None = None) -> ModelSource:
    return ModelSource("m", Path("absent"), declared=declared, parameters=parameters or {})


def test_identity_declared_pairs_need_no_file() -> None:
    model = IdentityBackend().open(_identity_source(), Device())

    assert (model.spec, model.platform, model.latency) == (WHOLE, "identity", None)
    assert _instance(model).execute([_rows(1, 3)]).results[0][0].tolist() == [[3, 3]]


def test_identity_delays_make_a_linear_latency() -> None:
    parameters = {"execute_delay_ms": "20", "paceline.execute_delay_per_row_us": "500.5"}

    model = IdentityBackend().open(_identity_source(parameters=parameters), Device())

    assert model.latency is not None
    assert model.latency(4) == pytest.approx(0.020 + 4 * 500.5e-6)


@pytest.mark.parametrize("parameter", ["execute_delay_ms", "paceline.execute_delay_per_row_us"])
@pytest.mark.parametrize("value", ["-1", "soon", "nan", "inf", ""])
def test_identity_malformed_delay_names_model_parameter_expected_and_got(parameter: str, value: str) -> None:
    message = f"model 'm': parameter '{parameter}': expected a number not below 0, got '{value}'"
    with pytest.raises(LoadError, match=re.escape(message)):
        IdentityBackend().open(_identity_source(parameters={parameter: value}), Device())


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        (None, "backend 'identity' needs the inputs and outputs in the configuration"),
        (ModelSpec((), ()), "backend 'identity' needs the inputs and outputs in the configuration"),
        (ModelSpec((PAIR, PAIR), (PAIR,)), "backend 'identity' expected 2 outputs, one per input, got 1"),
        (
            ModelSpec((PAIR,), (TensorSpec("y", "FP64", (2,)),)),
            "output 'y': expected FP32 [2] like input 'x', got FP64 [2]",
        ),
        (
            ModelSpec((PAIR,), (TensorSpec("y", "FP32", (3,)),)),
            "output 'y': expected FP32 [2] like input 'x', got FP32 [3]",
        ),
    ],
)
def test_identity_unpaired_declaration_is_refused(declared: ModelSpec | None, message: str) -> None:
    with pytest.raises(LoadError, match=re.escape(f"model 'm': {message}")):
        IdentityBackend().open(_identity_source(declared), Device())


def test_devices_of_identity_models_are_cpus() -> None:
    backend, cpu = IdentityBackend(), Device(DeviceKind.CPU)

    assert backend.devices([]) == (cpu,)
    assert backend.devices([InstanceGroup(GroupKind.CPU, 2), InstanceGroup(GroupKind.AUTO)]) == (cpu, cpu, cpu)
    with pytest.raises(LoadError, match="expected a kind other than KIND_GPU"):
        backend.devices([InstanceGroup(GroupKind.GPU)])
