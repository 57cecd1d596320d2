"""What every backend promises (`backends/base.py`): the same tests for each of them.

A new backend joins by one more entry in `SUBJECTS`; nothing below names a backend.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic_ns

import numpy as np
import pytest

from paceline.backends.base import (
    Backend,
    Device,
    DeviceKind,
    GroupKind,
    InstanceGroup,
    ModelInstance,
    ModelSource,
    OpenModel,
)
from paceline.backends.cuda.accelerator import CudaAccelerator
from paceline.backends.cuda.driver import count_gpus
from paceline.backends.errors import ExecutionError, LoadError
from paceline.backends.identity import IdentityBackend
from paceline.backends.onnx.backend import OnnxBackend
from paceline.backends.python.backend import PythonBackend
from paceline.backends.spec import Array, ModelSpec, Tensors, TensorSpec
from paceline.protos.datatypes import by_name
from tests import models
from tests.cuda import stand_in
from tests.host_accelerator import HostAccelerator
from tests.memory_models import MemoryBackend, MemoryModel

CPU = Device(DeviceKind.CPU)


@dataclass(frozen=True)
class Subject:
    """One backend with a model of one input and one output whose rows don't depend on each other.

    `request(rows, seed)` is a request that it serves, `poisoned` a batch that makes an execution fail.
    """

    backend: Backend
    source: ModelSource
    device: Device
    spec: ModelSpec
    request: Callable[[int, int], tuple[Array, ...]]
    poisoned: Sequence[Tensors]


def _numbers(rows: int, seed: int) -> tuple[Array, ...]:
    return (np.random.default_rng(seed).integers(0, 4, (rows, 3)),)


def _texts(rows: int, seed: int) -> tuple[Array, ...]:
    texts = [[f"{seed}/{row}\0é".encode(), b""] for row in range(rows)]
    return (np.array(texts, object),)


def _floats(rows: int, seed: int) -> tuple[Array, ...]:
    return (np.random.default_rng(seed).standard_normal((rows, 2)).astype(np.float32),)


def _bits(rows: int, seed: int) -> tuple[Array, ...]:
    return (np.random.default_rng(seed).integers(0, 2**16, (rows, 2)).astype(np.uint16),)


def _spec(given: str, taken: str, size: int) -> ModelSpec:
    return ModelSpec((TensorSpec("INPUT0", given, (size,)),), (TensorSpec("OUTPUT0", taken, (size,)),), batched=True)


def _whole(spec: ModelSpec) -> ModelSpec:
    (given,), (taken,) = spec.inputs, spec.outputs
    return ModelSpec(
        (TensorSpec(given.name, given.datatype, (-1, *given.dims)),),
        (TensorSpec(taken.name, taken.datatype, (-1, *taken.dims)),),
    )


# An index outside the table of `models.gather`, beside a valid one.
_OUTSIDE: Sequence[Tensors] = [(np.zeros((1, 3), np.int64),), (np.full((1, 3), 99),)]


def _onnx_gather(folder: Path) -> Subject:
    path = models.write(models.gather(size=3), folder / "model.onnx")
    source = ModelSource("gather", path)
    return Subject(OnnxBackend(), source, CPU, _spec("INT64", "FP32", 3), _numbers, _OUTSIDE)


def _onnx_identity(
    folder: Path,
    datatype: str,
    request: Callable[[int, int], tuple[Array, ...]],
    device: Device = CPU,
    backend: OnnxBackend | None = None,
) -> Subject:
    path = models.write(models.identity(datatype, ("batch", 2)), folder / "model.onnx")
    (array,) = request(1, 0)
    poisoned = [(np.concatenate([array, array], axis=1),)]
    spec = _spec(datatype, datatype, 2)
    return Subject(backend or OnnxBackend(), ModelSource("identity", path), device, spec, request, poisoned)


def _staged(accelerator: CudaAccelerator | None = None) -> OnnxBackend:
    """Batches go through buffers, streams and bindings as on a GPU, but the CPU computes."""
    return OnnxBackend(accelerators=lambda device: accelerator or HostAccelerator())


def _onnx_staged(folder: Path) -> Subject:
    return replace(_onnx_gather(folder), backend=_staged())


def _onnx_on_gpu(folder: Path) -> Subject:
    try:
        count_gpus()
    except LoadError as reason:
        pytest.skip(str(reason))
    return _onnx_identity(folder, "FP32", _floats, Device(DeviceKind.GPU))


def _memory(folder: Path) -> Subject:
    spec = _spec("INT64", "INT64", 3)
    model = MemoryModel(_whole(spec), lambda inputs: [inputs[0] * 10])
    model.faults.raise_when(lambda inputs: bool((inputs[0] == 99).any()), ExecutionError("99 is too much"))
    source = ModelSource("memory", folder)
    return Subject(MemoryBackend({"memory": model}), source, CPU, spec, _numbers, _OUTSIDE)


def _identity(folder: Path) -> Subject:
    spec = _spec("INT64", "INT64", 3)
    poisoned = [(np.zeros((1, 3), np.int64),), (np.zeros((1, 4), np.int64),)]
    source = ModelSource("identity", folder, declared=_whole(spec))
    return Subject(IdentityBackend(), source, CPU, spec, _numbers, poisoned)


_PYTHON = """
import numpy as np

class Model:
    inputs = {"INPUT0": ("%s", [-1, %d])}
    outputs = {"OUTPUT0": ("%s", [-1, %d])}

    %s execute(self, inputs):
        (array,) = inputs.values()
        if (array == 99).any() or array.shape[1] != %d:
            raise ValueError("this\\nis too much")
        return {"OUTPUT0": array}
"""


def _python(
    folder: Path,
    datatype: str,
    size: int,
    request: Callable[[int, int], tuple[Array, ...]],
    poisoned: Sequence[Tensors],
    define: str = "def",
) -> Subject:
    path = folder / "model.py"
    path.write_text(_PYTHON % (datatype, size, datatype, size, define, size))
    spec = _spec(datatype, datatype, size)
    return Subject(PythonBackend(), ModelSource("python", path), CPU, spec, request, poisoned)


SUBJECTS: dict[str, Callable[[Path], Subject]] = {
    "onnx-cpu": _onnx_gather,
    "onnx-cpu-strings": lambda folder: _onnx_identity(folder, "BYTES", _texts),
    "onnx-cpu-bf16": lambda folder: _onnx_identity(folder, "BF16", _bits),
    "onnx-staged": _onnx_staged,
    "onnx-staged-bf16": lambda folder: _onnx_identity(folder, "BF16", _bits, backend=_staged()),
    "onnx-staged-floats": lambda folder: _onnx_identity(folder, "FP32", _floats, backend=_staged()),
    "onnx-staged-strings": lambda folder: _onnx_identity(folder, "BYTES", _texts, backend=_staged()),
    "onnx-staged-beside": lambda folder: _onnx_identity(
        folder, "FP32", _floats, backend=_staged(HostAccelerator("another"))
    ),
    "onnx-staged-driver": lambda folder: _onnx_identity(
        folder, "FP32", _floats, backend=_staged(stand_in.accelerator(folder))
    ),
    "memory": _memory,
    "identity": _identity,
    "python": lambda folder: _python(folder, "INT64", 3, _numbers, _OUTSIDE),
    "python-async": lambda folder: _python(folder, "INT64", 3, _numbers, _OUTSIDE, "async def"),
    "python-strings": lambda folder: _python(folder, "BYTES", 2, _texts, [(np.full((1, 3), b"", object),)]),
}


@pytest.fixture(params=[*SUBJECTS, pytest.param("onnx-gpu", marks=pytest.mark.gpu)])
def subject(request: pytest.FixtureRequest, tmp_path: Path) -> Subject:
    return _onnx_on_gpu(tmp_path) if request.param == "onnx-gpu" else SUBJECTS[request.param](tmp_path)


@pytest.fixture
def model(subject: Subject) -> Iterator[OpenModel]:
    opened = subject.backend.open(subject.source, subject.device)
    yield opened
    opened.close()


@pytest.fixture
def instance(subject: Subject, model: OpenModel) -> Iterator[ModelInstance]:
    made = model.instance(subject.spec, subject.device)
    yield made
    made.close()


def _lists(results: Sequence[Tensors]) -> list[list[object]]:
    return [[array.tolist() for array in result] for result in results]


def _alone(instance: ModelInstance, requests: Sequence[Tensors]) -> list[list[object]]:
    return _lists([instance.execute([request]).results[0] for request in requests])


def test_open_model_has_a_whole_unbatched_spec_and_a_platform(model: OpenModel, subject: Subject) -> None:
    assert not model.spec.batched
    assert [(t.name, t.datatype, t.dims[0]) for t in model.spec.inputs] == [
        (t.name, t.datatype, -1) for t in subject.spec.inputs
    ]
    assert len(model.spec.outputs) == len(subject.spec.outputs)
    assert model.platform


def test_devices_cpu_count_is_one_device_per_instance(subject: Subject) -> None:
    devices = subject.backend.devices([InstanceGroup(GroupKind.CPU, 2), InstanceGroup(GroupKind.CPU)])

    assert devices == (CPU,) * 3


def test_devices_default_is_at_least_one(subject: Subject) -> None:
    assert len(subject.backend.devices([])) >= 1


def test_instance_runs_on_the_device_it_was_made_for(instance: ModelInstance, subject: Subject) -> None:
    assert instance.device == subject.device


def test_execute_batch_equals_each_request_alone(instance: ModelInstance, subject: Subject) -> None:
    requests = [subject.request(rows, seed) for seed, rows in enumerate([1, 3, 1, 2])]

    assert _lists(instance.execute(requests).results) == _alone(instance, requests)


def test_execute_results_have_the_rows_and_datatypes_of_the_spec(instance: ModelInstance, subject: Subject) -> None:
    rows = [2, 1, 4]
    results = instance.execute([subject.request(count, seed) for seed, count in enumerate(rows)]).results

    for result, count in zip(results, rows, strict=True):
        assert [array.shape for array in result] == [(count, *t.dims) for t in subject.spec.outputs]
        assert [array.dtype for array in result] == [by_name(t.datatype).dtype for t in subject.spec.outputs]


@pytest.mark.parametrize("count", [1, 3])
def test_execute_accepts_read_only_arrays_and_leaves_them_unchanged(
    count: int, instance: ModelInstance, subject: Subject
) -> None:
    requests = [subject.request(2, seed) for seed in range(count)]
    before = _lists(requests)
    for request in requests:
        for array in request:
            array.flags.writeable = False

    instance.execute(requests)

    assert _lists(requests) == before


def test_execute_takes_strided_arrays_by_value(instance: ModelInstance, subject: Subject) -> None:
    plain = subject.request(3, 5)
    strided = tuple(np.asfortranarray(np.repeat(array, 2, axis=0))[::2] for array in plain)

    assert _alone(instance, [strided]) == _alone(instance, [plain])
    assert _lists(instance.execute([strided, strided]).results) == _alone(instance, [plain, plain])


def test_execute_earlier_results_survive_later_executions(instance: ModelInstance, subject: Subject) -> None:
    results = instance.execute([subject.request(2, 1), subject.request(2, 2)]).results
    before = _lists(results)

    for seed in range(3, 8):
        instance.execute([subject.request(2, seed), subject.request(2, seed + 10)])

    assert _lists(results) == before


def test_execute_failure_is_an_execution_error_and_the_instance_still_works(
    instance: ModelInstance, subject: Subject
) -> None:
    good = [subject.request(1, 1), subject.request(2, 2)]
    expected = _lists(instance.execute(good).results)

    with pytest.raises(ExecutionError) as caught:
        instance.execute(subject.poisoned)

    assert str(caught.value)
    assert "\n" not in str(caught.value)
    assert _lists(instance.execute(good).results) == expected


def test_execute_times_add_up_to_no_more_than_the_callers(instance: ModelInstance, subject: Subject) -> None:
    began_ns = monotonic_ns()
    execution = instance.execute([subject.request(1, 1), subject.request(1, 2)])
    took_ns = monotonic_ns() - began_ns

    times_ns = [execution.input_ns, execution.infer_ns, execution.output_ns]
    assert all(isinstance(time_ns, int) and time_ns >= 0 for time_ns in times_ns)
    assert sum(times_ns) <= took_ns


def test_execute_unbatched_spec_takes_one_request_whole(model: OpenModel, subject: Subject) -> None:
    instance = model.instance(model.spec, subject.device)
    request = subject.request(3, 1)

    (result,) = instance.execute([request]).results

    assert [len(array) for array in result] == [3] * len(subject.spec.outputs)
    with pytest.raises(ValueError, match="expected one request, got 2"):
        instance.execute([request, request])
    instance.close()


def test_execute_on_several_instances_at_the_same_time_keeps_answers_separate(
    model: OpenModel, subject: Subject
) -> None:
    instances = [model.instance(subject.spec, subject.device) for _ in range(3)]
    batches = [[subject.request(1 + i % 3, 10 * n + i) for i in range(20)] for n in range(3)]
    expected = [_alone(instances[0], batch) for batch in batches]

    def run(n: int) -> list[list[list[object]]]:
        return [_lists(instances[n].execute(batches[n]).results) for _ in range(10)]

    with ThreadPoolExecutor(3) as threads:
        for n, rounds in enumerate(threads.map(run, range(3))):
            assert all(results == expected[n] for results in rounds)
    for instance in instances:
        instance.close()


def test_close_of_one_instance_leaves_the_others_running(model: OpenModel, subject: Subject) -> None:
    first, second = (model.instance(subject.spec, subject.device) for _ in range(2))
    request = subject.request(2, 1)
    expected = _alone(first, [request])

    first.close()

    assert _alone(second, [request]) == expected
    second.close()


def test_model_closed_after_its_instances_can_be_opened_again(subject: Subject) -> None:
    request = subject.request(1, 1)
    answers = []
    for _ in range(2):
        opened = subject.backend.open(subject.source, subject.device)
        instance = opened.instance(subject.spec, subject.device)
        answers.append(_alone(instance, [request]))
        instance.close()
        opened.close()

    assert answers[0] == answers[1]
