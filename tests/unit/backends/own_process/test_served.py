"""Models served from their own processes: they behave as in the server's process."""

from __future__ import annotations

import os
import pickle
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from paceline.backends.base import Device, DeviceKind, ModelSource, OpenModel
from paceline.backends.errors import ExecutionError, LoadError, OutOfMemory, ProcessError, StalePlan
from paceline.backends.onnx.backend import OnnxBackend
from paceline.backends.onnx.instance import OnnxInstance
from paceline.backends.onnx.options import OWN_PROCESS, OnnxOptions
from paceline.backends.own_process.model import Model
from paceline.backends.own_process.served import OwnProcessOnnxModel
from paceline.backends.own_process.session import Job
from paceline.backends.python.instance import PythonInstance
from paceline.backends.python.messages import FAILED
from paceline.backends.python.process import ModelProcess
from paceline.backends.spec import MISSING, Array, ModelSpec, Tensors
from paceline.backends.trials import Trial
from tests import models, odd_models
from tests.host_accelerator import HostAccelerator
from tests.operators import build_library, twice
from tests.polling import eventually
from tests.unit.backends.onnx_models import batched
from tests.unit.backends.python_models import is_alive

CPU = Device()


def source_of(folder: Path, model: onnx.ModelProto | None = None, own: str = "true", **more: object) -> ModelSource:
    path = folder / "model.onnx"
    if model is not None:
        models.write(model, path)
    return ModelSource("m", path, parameters={OWN_PROCESS: own}, **more)  # type: ignore[arg-type]


@contextmanager
def opened(source: ModelSource, device: Device = CPU) -> Iterator[OwnProcessOnnxModel]:
    model = OnnxBackend().open(source, device)
    assert isinstance(model, OwnProcessOnnxModel)
    try:
        yield model
    finally:
        model.close()


@contextmanager
def serving(model: OpenModel, spec: ModelSpec) -> Iterator[PythonInstance]:
    instance = model.instance(spec, CPU)
    assert isinstance(instance, PythonInstance)
    try:
        yield instance
    finally:
        instance.close()


def process_of(instance: PythonInstance) -> ModelProcess:
    assert instance._process is not None
    return instance._process


def executed(model: OpenModel, spec: ModelSpec, requests: Sequence[Tensors]) -> Sequence[Tensors | Exception]:
    instance = model.instance(spec, CPU)
    try:
        return instance.execute(requests).results
    finally:
        instance.close()


FLOATS = np.arange(6, dtype=np.float32).reshape(2, 3)
TEXTS = np.array([[b"a", b""], ["\u00e9".encode(), b"d"]], object)
# Other datatypes and no elements: tests/property/test_transport.py.
SAME: dict[str, tuple[onnx.ModelProto, list[Tensors]]] = {
    "FP32": (models.identity(), [[FLOATS], [FLOATS[:1]]]),
    "BF16": (models.identity("BF16"), [[FLOATS.astype(np.uint16)]]),
    "BYTES": (models.identity("BYTES"), [[TEXTS], [TEXTS[:1]]]),
    "two of each": (models.add_sub("FP32", 3), [[FLOATS, FLOATS], [FLOATS[:1], -FLOATS[:1]]]),
    "other dims": (models.transpose(), [[np.arange(12, dtype=np.float32).reshape(1, 2, 6)]]),
    "left out": (odd_models.classifier(), [[FLOATS[:, :2]]]),
}


@pytest.mark.parametrize("what", SAME)
def test_execute_equals_execute_in_the_servers_process(what: str, tmp_path: Path) -> None:
    proto, requests = SAME[what]
    here = OnnxBackend().open(source_of(tmp_path, proto, own="false"), CPU)
    with opened(source_of(tmp_path)) as apart:
        assert (apart.spec, apart.platform) == (here.spec, here.platform)
        spec = batched(here.spec)
        for one, other in zip(executed(apart, spec, requests), executed(here, spec, requests), strict=True):
            assert not isinstance(one, Exception)
            assert not isinstance(other, Exception)
            for got, expected in zip(one, other, strict=True):
                assert got.dtype == expected.dtype
                np.testing.assert_array_equal(got, expected)
    here.close()


def test_execute_without_an_optional_input_uses_the_graphs_default(tmp_path: Path) -> None:
    given: Array = np.array([1.5], np.float32)
    with opened(source_of(tmp_path, models.with_default())) as model, serving(model, model.spec) as instance:
        for bias, expected in ((MISSING, [10.0]), (given, [1.5]), (MISSING, [10.0])):
            (result,) = instance.execute([[given, bias]]).results
            assert not isinstance(result, Exception)
            assert [one.tolist() for one in result] == [[1.5], expected]


def test_execute_gives_the_served_outputs_in_their_order(tmp_path: Path) -> None:
    with opened(source_of(tmp_path, models.add_sub("FP32", 3))) as model:
        spec = batched(model.spec)
        (result,) = executed(model, replace(spec, outputs=spec.outputs[::-1]), [[FLOATS, FLOATS]])
        assert not isinstance(result, Exception)
        assert [one.tolist() for one in result] == [(0 * FLOATS).tolist(), (2 * FLOATS).tolist()]
        (result,) = executed(model, replace(spec, outputs=spec.outputs[1:]), [[FLOATS, FLOATS]])
        assert not isinstance(result, Exception)
        assert [one.tolist() for one in result] == [(0 * FLOATS).tolist()]


def test_failed_execute_keeps_the_class_and_message_of_its_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(source_of(tmp_path, models.quotient())) as model, serving(model, batched(model.spec)) as instance:
        with pytest.raises(ExecutionError, match=r"^onnx runtime error 1: .* Integer division by zero") as caught:
            instance.execute([[np.ones((1, 1), np.int64), np.zeros((1, 1), np.int64)]])
        assert type(caught.value) is ExecutionError
        assert not instance.has_ended
    with (
        opened(source_of(tmp_path, odd_models.memory_hungry(1))) as model,
        serving(model, batched(model.spec)) as instance,
    ):
        with pytest.raises(OutOfMemory, match=r"^onnx runtime error"):
            instance.execute([[np.zeros((2, 1), np.float32)]])
        assert not instance.has_ended
    assert "Traceback" not in caplog.text


def test_execute_whose_process_has_lost_its_device_loses_the_instance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process may still have the device, so it isn't reported as lost."""
    with opened(source_of(tmp_path, models.identity())) as model, serving(model, batched(model.spec)) as instance:
        monkeypatch.setattr(process_of(instance), "_asked", lambda *_: (FAILED, "CUDA failure 700", "DeviceLost"))
        process = process_of(instance)
        with pytest.raises(ProcessError, match=r"^CUDA failure 700$"):
            instance.execute([[FLOATS]])
        eventually(lambda: process.ended, "its end: the next one needs what it has of the device")


def test_execute_with_an_outdated_plan_raises_stale_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(source_of(tmp_path, models.identity())) as model, serving(model, batched(model.spec)) as instance:
        monkeypatch.setattr(process_of(instance), "_asked", lambda *_: (FAILED, "an outdated plan", "StalePlan"))
        with pytest.raises(StalePlan, match=r"^an outdated plan$"):
            instance.execute([[FLOATS]])


@pytest.mark.parametrize("by_rows", [True, False])
def test_outdated_plan_is_avoided_by_padding_if_the_model_is_batched(
    by_rows: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, ...]] = []
    run = OnnxInstance.run

    def wary(self: OnnxInstance, inputs: Sequence[Array]) -> Tensors:
        seen.append(inputs[0].shape)
        if len(inputs[0]) == len(FLOATS):
            raise StalePlan("outdated")
        return run(self, inputs)

    monkeypatch.setattr(OnnxInstance, "run", wary)
    path = models.write(models.identity(), tmp_path / "model.onnx")
    model = Model()
    found = pickle.loads(model.answer(pickle.dumps(Job("m", path, OnnxOptions()))))
    model.answer(pickle.dumps(batched(found.spec) if by_rows else found.spec))
    if by_rows:
        assert model.execute({"INPUT0": FLOATS})["OUTPUT0"].tolist() == FLOATS.tolist()
        assert seen == [(2, 3), (3, 3)]
    else:
        with pytest.raises(StalePlan):
            model.execute({"INPUT0": FLOATS})
    model.close()


def test_failed_open_has_the_same_message_as_in_the_servers_process(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(b"no model")
    with pytest.raises(LoadError) as here:
        OnnxBackend().open(source_of(tmp_path, own="false"), CPU)
    with pytest.raises(LoadError) as apart:
        OnnxBackend().open(source_of(tmp_path), CPU)
    assert str(apart.value) == str(here.value)
    with pytest.raises(LoadError, match=r"output 'OUTPUT0': .*has no datatype in the v2 protocol"):
        OnnxBackend().open(source_of(tmp_path, odd_models.sequence_output()), CPU)


def test_open_on_a_missing_gpu_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"^model 'm': onnxruntime couldn't use GPU 7: "):
        OnnxBackend().open(source_of(tmp_path, models.identity()), Device(DeviceKind.GPU, 7))


def test_open_with_graphs_runs_without_them_and_logs_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with opened(source_of(tmp_path, models.identity(), cuda_graphs=True)) as model:
        (result,) = executed(model, batched(model.spec), [[FLOATS]])
        assert not isinstance(result, Exception)
    assert "model 'm' runs without CUDA graphs, as it is in a process of its own" in caplog.text


def test_outputs_that_the_protocol_cannot_carry_are_reported_in_the_servers_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(source_of(tmp_path, odd_models.classifier())):
        assert "model 'm' is served without its output 'OUTPUT1'" in caplog.text


@pytest.mark.parametrize("kind", ["mean", "cumulate"])
def test_try_rows_finds_the_same_as_in_the_servers_process(kind: str, tmp_path: Path) -> None:
    proto = models.over_rows(kind) if kind != "mean" else models.mlp()
    here = OnnxBackend().open(source_of(tmp_path, proto, own="false"), CPU)
    with opened(source_of(tmp_path)) as apart:
        assert apart.try_rows() == here.try_rows()
    here.close()


def test_try_rows_that_ends_its_process_leaves_the_model_usable(tmp_path: Path) -> None:
    library = build_library(tmp_path / "twice.so", least=4)
    with opened(source_of(tmp_path, twice(), op_libraries=(library,))) as model:
        assert model.try_rows() == Trial(model.spec, "the process that ran it was killed by SIGFPE", deadly=True)
        (result,) = executed(model, batched(model.spec), [[np.ones((1, 4), np.float32)]])
        assert not isinstance(result, Exception)


def test_execute_that_ends_the_process_says_how(tmp_path: Path) -> None:
    library = build_library(tmp_path / "twice.so", least=4)
    with (
        opened(source_of(tmp_path, twice(), op_libraries=(library,))) as model,
        serving(model, batched(model.spec)) as instance,
        pytest.raises(ProcessError, match="was killed by SIGFPE while it executed this batch"),
    ):
        instance.execute([[FLOATS[:1]]])


def test_instance_has_a_process_that_ends_with_it(tmp_path: Path) -> None:
    with opened(source_of(tmp_path, models.identity())) as model:
        spec = batched(model.spec)
        with serving(model, spec) as one, serving(model, spec) as other:
            pids = {process_of(one).pid, process_of(other).pid}
            assert len(pids) == 2
        eventually(lambda: not any(map(is_alive, pids)), "both have ended")


def test_instance_gets_another_process_if_the_first_has_ended_meanwhile(tmp_path: Path) -> None:
    with opened(source_of(tmp_path, models.identity())) as model:
        first = model._first
        os.kill(first.pid, signal.SIGKILL)
        eventually(lambda: first.ended, "its end")
        with serving(model, batched(model.spec)) as instance:
            assert process_of(instance) is not first
            instance.execute([[FLOATS]])


def test_trial_and_first_instance_share_a_process(tmp_path: Path) -> None:
    with opened(source_of(tmp_path, models.mlp())) as model:
        first = model._first
        assert not model.try_rows().deadly
        with serving(model, batched(model.spec)) as instance:
            assert process_of(instance) is first


def test_abandoning_a_model_ends_the_process_of_an_instance_that_is_being_opened(tmp_path: Path) -> None:
    """The file can't be read to its end, as on a mount that is gone."""
    with opened(source_of(tmp_path, models.identity())) as model, serving(model, batched(model.spec)):
        (tmp_path / "model.onnx").unlink()
        os.mkfifo(tmp_path / "model.onnx")
        with ThreadPoolExecutor(1) as threads:
            another = threads.submit(model.instance, batched(model.spec), CPU)
            eventually(lambda: model._loading, "a process that opens it")
            (process,) = model._loading
            model.abandon()
            with pytest.raises(LoadError, match=r"^model 'm': its process was killed by SIGKILL while "):
                another.result(20)
        assert process.ended


def test_tensor_without_a_name_is_not_unpickled(tmp_path: Path) -> None:
    """Only the server asks questions: what callers send is never unpickled."""
    node = onnx.helper.make_node("Identity", ["INPUT0"], ["OUTPUT0"])
    inputs = [models.tensor("INPUT0", "BYTES", ["batch", 1]), models.tensor("", "BYTES", ["batch", 1])]
    proto = models.model([node], inputs, [models.tensor("OUTPUT0", "BYTES", ["batch", 1])])
    path = tmp_path / "unpickled"
    question = pickle.dumps(_Touch(path), 0)
    with opened(source_of(tmp_path, proto)) as model, serving(model, batched(model.spec)) as instance:
        rows = np.array([[question]], object)
        (result,) = instance.execute([[rows, rows]]).results
        assert not isinstance(result, Exception)
        assert result[0].tolist() == [[question]]
    assert not path.exists()


class _Touch:
    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._path),)


def test_instance_of_a_file_that_has_changed_is_refused_until_it_is_back(tmp_path: Path) -> None:
    """Its tensors are as before, but it would compute something else."""
    path = tmp_path / "model.onnx"
    first, second = models.mlp(seed=0), models.mlp(seed=1)
    rows = np.ones((1, 16), np.float32)
    with opened(source_of(tmp_path, first)) as model:
        spec = batched(model.spec)
        (before,) = executed(model, spec, [[rows]])
        models.write(second, path)
        with pytest.raises(LoadError, match="model 'm': its files have changed since it was loaded; load it again"):
            model.instance(spec, CPU)
        models.write(first, path)
        (after,) = executed(model, spec, [[rows]])
    assert not isinstance(before, Exception)
    assert not isinstance(after, Exception)
    assert before[0].tolist() == after[0].tolist()


class Counted:
    """Counts how often files are needed."""

    def __init__(self) -> None:
        self.needed = 0

    def keep(self) -> None:
        self.needed += 1

    def release(self) -> None:
        self.needed -= 1


def test_files_are_kept_until_the_model_is_closed(tmp_path: Path) -> None:
    files = Counted()
    with opened(source_of(tmp_path, models.identity(), files=files)):
        assert files.needed == 1
    assert files.needed == 0
    here = OnnxBackend().open(source_of(tmp_path, own="false", files=files), CPU)
    here.instance(batched(here.spec), CPU).close()
    assert files.needed == 0, "its session is there for all instances"
    here.close()
    assert files.needed == 0


def test_files_of_a_model_on_a_device_are_kept_until_it_is_closed(tmp_path: Path) -> None:
    """There, an instance that replaces another opens them again."""
    files = Counted()
    source = source_of(tmp_path, models.mlp(), own="false", files=files)
    model = OnnxBackend(accelerators=lambda _: HostAccelerator()).open(source, CPU)
    instances = [model.instance(batched(model.spec), CPU) for _ in range(2)]
    assert files.needed == 1
    for instance in instances:
        instance.close()
    for _ in range(2):
        model.close()
        assert files.needed == 0
