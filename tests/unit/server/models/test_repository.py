"""Which model answers to which name and version, and the errors for those that don't."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from paceline.backends.base import Backend, Device
from paceline.backends.errors import LoadError
from paceline.backends.spec import ModelSpec, TensorSpec
from paceline.protos import model_config_pb2 as pb
from paceline.scheduler.errors import BatcherClosed
from paceline.server.errors import InvalidRequest, LoadFailed, ModelNotFound, ModelNotReady
from paceline.server.models.layout import ModelFolder
from paceline.server.models.load_queue import LoadQueue, always
from paceline.server.models.repository import Repository
from paceline.server.telemetry.metrics import Metrics
from paceline.server.telemetry.trace_settings import TraceConfig
from paceline.server.telemetry.tracing import Tracer
from tests.ensembles import ensemble_config, write_ensemble
from tests.harness import touch
from tests.memory_models import MemoryBackend, MemoryInstance, MemoryModel
from tests.polling import eventually_async
from tests.unit.scheduler.workbench import submit
from tests.unit.server.found import find_models

MAX_MODELS = 10
SPEC = ModelSpec((TensorSpec("a", "FP32", (-1, -1)),), (TensorSpec("x", "FP32", (-1, -1)),))


class Bench:
    """A repository over folders written by `add`, each a model in memory."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.models: dict[str, MemoryModel] = {}
        self.backends: dict[str, Backend] = {"memory": MemoryBackend(self.models)}
        self.metrics = Metrics()
        self.tracer = Tracer(TraceConfig(root / "traces.json"))
        self.repository = Repository(
            self.metrics, LoadQueue(self._backend_of), tracer=self.tracer, max_models=MAX_MODELS
        )

    def _backend_of(self, name: str) -> Backend:
        if name not in self.backends:
            raise LoadError(f"no backend '{name}'")
        return self.backends[name]

    def add(self, name: str, *versions: int, config: str = "") -> MemoryModel:
        for version in versions or (1,):
            (self.root / name / str(version)).mkdir(parents=True)
        (self.root / name / "config.pbtxt").write_text(f'backend: "memory" version_policy {{ all {{ }} }} {config}')
        self.models[name] = MemoryModel(SPEC)
        return self.models[name]

    def trace(self, name: str) -> None:
        """Give a model its own trace settings."""
        self.tracer.update(name, {"trace_rate": ["7"]})

    def is_traced(self, name: str) -> bool:
        """Whether it has them."""
        return self.tracer.settings(name)["trace_rate"] == "7"

    async def load(self) -> Repository:
        await self.repository.load_all(find_models([self.root]))
        return self.repository


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    for model in bench.models.values():
        model.gate.open()
    await bench.repository.stop()


async def test_get_by_name_and_version_finds_that_version(bench: Bench) -> None:
    bench.add("m", 2, 10)
    repository = await bench.load()
    assert [repository.get("m", version).version for version in ("2", "10")] == ["2", "10"]
    assert repository.versions("m") == ["2", "10"]


@pytest.mark.parametrize("version", ["", "-1"])
async def test_get_without_version_finds_the_latest_by_number(bench: Bench, version: str) -> None:
    bench.add("m", 9, 10, 2)
    assert (await bench.load()).get("m", version).version == "10"


@pytest.mark.parametrize(
    ("name", "version", "error", "text"),
    [
        ("n", "", ModelNotFound, "Request for unknown model: 'n' is not found; this server has ['m']"),
        ("n", "1", ModelNotFound, "Request for unknown model: 'n' is not found; this server has ['m']"),
        ("M", "", ModelNotFound, "Request for unknown model: 'M' is not found; this server has ['m']"),
        ("m", "2", ModelNotFound, "Request for unknown model: 'm' version 2 is not found; versions served: ['1', '3']"),
        (
            "m",
            "03",
            ModelNotFound,
            "Request for unknown model: 'm' version 03 is not found; versions served: ['1', '3']",
        ),
        ("m", "latest", InvalidRequest, "model 'm': expected a version number, got 'latest'"),
        ("m", "-3", InvalidRequest, "model 'm': expected a version number, got '-3'"),
        ("m", " 1", InvalidRequest, "model 'm': expected a version number, got ' 1'"),
        ("m", "\u0661", InvalidRequest, "model 'm': expected a version number, got '\u0661'"),
    ],
)
async def test_get_of_an_unknown_name_or_version_is_refused_with_the_reason(
    bench: Bench, name: str, version: str, error: type[Exception], text: str
) -> None:
    bench.add("m", 1, 3)
    repository = await bench.load()
    with pytest.raises(error) as caught:
        repository.get(name, version)
    assert str(caught.value) == text


async def test_get_error_among_many_models_names_a_few(bench: Bench) -> None:
    for number in range(8):
        bench.add(f"m{number}")
    repository = await bench.load()
    with pytest.raises(ModelNotFound) as caught:
        repository.get("n", "")
    assert str(caught.value).endswith("this server has ['m0', 'm1', 'm2', 'm3', 'm4'] and 3 more")


async def test_failed_model_is_not_ready_and_the_others_are(bench: Bench) -> None:
    bench.add("good")
    bench.add("bad", config="instance_group { passive: true }")
    repository = await bench.load()
    assert repository.get("good", "").name == "good"
    assert not repository.ready
    assert repository.failures == {"bad": "instance_group.passive is not supported by this build"}
    assert [model.name for model in repository.models] == ["good"]
    for version in ("", "-1", "1", "7"):
        with pytest.raises(ModelNotReady) as caught:
            repository.get("bad", version)
        assert (
            str(caught.value)
            == "Request for unknown model: 'bad' is not ready: instance_group.passive is not supported by this build"
        )
    assert repository.versions("bad") == []


async def test_is_ready_distinguishes_ready_from_failed_and_raises_for_unknown(bench: Bench) -> None:
    bench.add("good", 1)
    bench.add("bad", config="instance_group { passive: true }")
    repository = await bench.load()
    assert repository.is_ready("good", "")
    assert repository.is_ready("good", "1")
    assert not repository.is_ready("bad", "")
    with pytest.raises(ModelNotFound):
        repository.is_ready("good", "2")
    with pytest.raises(ModelNotFound):
        repository.is_ready("other", "")
    with pytest.raises(InvalidRequest):
        repository.is_ready("good", "one")


async def test_ready_once_everything_is_loaded(bench: Bench) -> None:
    bench.add("a")
    bench.add("b", 1, 2)
    repository = await bench.load()
    assert repository.ready
    assert not repository.failures
    assert [(model.name, model.version) for model in repository.models] == [("a", "1"), ("b", "1"), ("b", "2")]


async def test_model_is_known_but_not_ready_while_loading(bench: Bench) -> None:
    slow = bench.add("slow", config='input { name: "a" data_type: TYPE_FP32 dims: 1 }')  # known dims: it is warmed up
    slow.gate.close()
    loading = asyncio.create_task(bench.load())
    await asyncio.to_thread(slow.gate.wait_entered, 1)
    assert not bench.repository.ready
    with pytest.raises(ModelNotReady, match=r"^Request for unknown model: 'slow' is not ready: LOADING$"):
        bench.repository.get("slow", "")
    slow.gate.open()
    assert (await loading).ready


async def test_cancelled_load_returns_although_a_thread_still_loads(bench: Bench) -> None:
    stuck = bench.add("stuck", config='input { name: "a" data_type: TYPE_FP32 dims: 1 }')
    stuck.gate.close()
    loading = asyncio.create_task(bench.load())
    await asyncio.to_thread(stuck.gate.wait_entered, 1)
    loading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(loading, 5)


async def test_model_executes_through_its_batcher(bench: Bench) -> None:
    bench.add("m", config="instance_group { count: 2 }")
    model = (await bench.load()).get("m", "")
    array = np.ones((2, 3), np.float32)
    (result,) = await submit(model.batcher, (array,), 2, (3,))
    assert result.tolist() == array.tolist()
    assert (model.platform, model.spec.batched) == ("memory", True)


async def test_stop_executes_queued_requests_and_closes_everything(bench: Bench) -> None:
    opened = bench.add("m")
    repository = await bench.load()
    batcher = repository.get("m", "").batcher
    opened.gate.close()
    futures = [submit(batcher, (np.ones((1, 1), np.float32),), 1, number) for number in range(3)]
    stopping = asyncio.create_task(repository.stop())
    await asyncio.to_thread(opened.gate.wait_entered, 1)
    with pytest.raises(BatcherClosed):
        submit(batcher, (np.ones((1, 1), np.float32),), 1, 0)
    assert not stopping.done()
    opened.gate.open()
    await stopping
    assert all(future.done() and future.exception() is None for future in futures)
    assert opened.closed
    assert opened.open_instances == 0


class UnclosableInstance(MemoryInstance):
    def close(self) -> None:
        raise LookupError("it can't be closed")


class UnclosableModel(MemoryModel):
    """The second of two instances raises when it is closed."""

    def instance(self, spec: ModelSpec, device: Device) -> MemoryInstance:
        return UnclosableInstance(self, spec, device) if self.open_instances else super().instance(spec, device)


async def test_stop_closes_the_others_if_one_instance_raises(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    other = bench.add("other")
    bench.add("m", config="instance_group { count: 2 }")
    opened = bench.models["m"] = UnclosableModel(SPEC)
    repository = await bench.load()
    await repository.stop()
    assert (opened.open_instances, opened.closed) == (0, True)
    assert (other.open_instances, other.closed) == (0, True)
    assert [one.message for one in caplog.records if one.exc_info] == ["model 'm' version 1 could not be closed"]


async def test_stop_twice_and_abandon_afterwards_do_nothing_more(bench: Bench) -> None:
    bench.add("m")
    repository = await bench.load()
    await repository.stop()
    await repository.stop()
    repository.abandon()


async def test_abandon_answers_all_requests_and_leaves_executions_running(bench: Bench) -> None:
    opened = bench.add("m")
    repository = await bench.load()
    batcher = repository.get("m", "").batcher
    opened.gate.close()
    futures = [submit(batcher, (np.ones((1, 1), np.float32),), 1, number) for number in range(2)]
    await asyncio.to_thread(opened.gate.wait_entered, 1)
    repository.abandon()
    for answer in await asyncio.gather(*futures, return_exceptions=True):
        assert isinstance(answer, BatcherClosed)


async def test_stopped_model_is_removed_from_the_metrics(bench: Bench) -> None:
    bench.add("m", 1, 2)
    repository = await bench.load()
    first, second = repository.models
    assert [b'version="1"' in bench.metrics.text(), b'version="2"' in bench.metrics.text()] == [True, True]
    await first.stop()
    assert [b'version="1"' in bench.metrics.text(), b'version="2"' in bench.metrics.text()] == [False, True]
    second.abandon()
    assert b'model="m"' not in bench.metrics.text()


async def test_loaded_model_reports_how_long_loading_took(bench: Bench) -> None:
    bench.add("m")
    await bench.load()
    (line,) = [line for line in bench.metrics.text().splitlines() if line.startswith(b"nv_model_load_duration_secs{")]
    assert 0 < float(line.split()[1]) < 60


async def test_abandon_does_not_close_an_unloaded_model_that_executes(bench: Bench) -> None:
    opened = bench.add("m")
    repository = await bench.load()
    batcher = repository.get("m", "").batcher
    opened.gate.close()
    future = submit(batcher, (np.ones((1, 1), np.float32),), 1, 0)
    await asyncio.to_thread(opened.gate.wait_entered, 1)
    await repository.unload("m")
    assert [model.name for model in repository.leaving] == ["m"]
    repository.abandon()
    with pytest.raises(BatcherClosed):
        await future
    await eventually_async(lambda: not repository.leaving, "the end of waiting")
    assert (opened.closed, opened.open_instances) == (False, 1)


OVERRIDE = pb.ModelConfig(backend="memory", max_batch_size=2)


@pytest.mark.parametrize(
    ("override", "change", "stays"),
    [(None, False, True), (None, True, False), (OVERRIDE, False, False)],
    ids=["unchanged", "touched", "with a configuration"],
)
async def test_load_of_what_serves_unchanged_does_nothing(
    bench: Bench, override: pb.ModelConfig | None, change: bool, stays: bool
) -> None:
    bench.add("m", 1, 2)
    repository = await bench.load()
    before, lines = repository.get("m", ""), repository.index()
    (folder,) = find_models([bench.root])
    if change:
        touch(bench.root / "m")
    await repository.load("m", always(folder), override)
    assert (repository.get("m", "") is before) is stays
    before = repository.get("m", "")
    await asyncio.gather(*(repository.load("m", always(folder)) for _ in range(3)))
    assert (repository.get("m", "") is before) is (override is None)
    await eventually_async(lambda: not repository.leaving, "what was replaced gone")
    assert repository.index() == lines


async def test_load_of_a_model_that_is_a_single_file_always_loads(bench: Bench) -> None:
    # Its weights may lie beside it.
    bench.backends["onnxruntime"] = bench.backends["memory"]
    bench.add("m")
    repository = await bench.load()
    (folder,) = find_models([bench.root])
    file = next(path for path in folder.path.rglob("*") if path.is_file())
    before = repository.get("m", "")
    for _ in range(2):
        await repository.load("m", always(replace(folder, file=file)))
        assert repository.get("m", "") is not before
        before = repository.get("m", "")


async def test_load_after_a_failed_one_is_tried_though_nothing_changed(bench: Bench) -> None:
    model = bench.add("m")
    repository = await bench.load()
    before, (folder,) = repository.get("m", ""), find_models([bench.root])
    touch(bench.root / "m")
    del bench.models["m"]
    for _ in range(2):
        with pytest.raises(LoadFailed, match="no such model in memory"):
            await repository.load("m", always(folder))
    bench.models["m"] = model
    await repository.load("m", always(folder))
    assert repository.get("m", "") is not before
    assert [line.reason for line in repository.index()] == [""]


async def test_load_and_unload_after_stop_are_refused(bench: Bench) -> None:
    bench.add("m")
    repository = await bench.load()
    await repository.stop()
    (folder,) = find_models([bench.root])
    for operation in (repository.load("m", always(folder)), repository.unload("m")):
        with pytest.raises(ModelNotReady, match="the server is stopping"):
            await operation


async def test_take_note_adds_models_on_disk_and_forgets_unloaded_ones_that_are_gone(bench: Bench) -> None:
    bench.add("m")
    bench.add("n")
    repository = await bench.load()
    bench.add("later")
    repository.take_note(find_models([bench.root]))
    assert [line.name for line in repository.index()] == ["later", "m", "n"]
    assert not repository.is_ready("later", "")
    await repository.unload("n")
    await eventually_async(lambda: not repository.leaving, "the model closed")
    repository.take_note([])
    assert [(line.name, line.version) for line in repository.index()] == [("m", "1")]
    with pytest.raises(ModelNotFound, match=r"^Request for unknown model: 'n' is not found; this server has \['m'\]$"):
        repository.get("n", "")


async def test_trace_settings_are_removed_when_the_model_is_forgotten(bench: Bench) -> None:
    bench.add("gone")
    bench.add("there")
    repository = await bench.load()
    for name in ("gone", "there"):
        bench.trace(name)
        await repository.unload(name)
    await eventually_async(lambda: not repository.leaving, "the models closed")
    assert bench.is_traced("gone")
    repository.take_note([folder for folder in find_models([bench.root]) if folder.name == "there"])
    assert not bench.is_traced("gone")
    assert bench.is_traced("there")


async def test_trace_settings_of_failed_loads_are_kept_only_for_remembered_models(bench: Bench) -> None:
    names = [f"bad{number}" for number in range(2 * MAX_MODELS)]
    for name in names:
        bench.add(name, config="instance_group { passive: true }")
        (folder,) = (one for one in find_models([bench.root]) if one.name == name)
        with pytest.raises(LoadFailed):
            await bench.repository.load(name, always(folder))
        bench.trace(name)
    assert [line.name for line in bench.repository.index()] == sorted(names[MAX_MODELS:])
    assert [name for name in names if bench.is_traced(name)] == names[MAX_MODELS:]


async def test_ensemble_that_follows_shares_no_instances_with_its_predecessor(bench: Bench) -> None:
    bench.add("m")
    config = ensemble_config([("m", {"a": "in"}, {"x": "out"})], {"in": "FP32 -1 -1"}, {"out": "FP32 -1 -1"}, rows=0)
    write_ensemble(bench.root, "e", config)
    repository = await bench.load()
    before = repository.get("e", "")
    touch(bench.root / "m")
    await repository.load("m", always(find_models([bench.root])[1]))
    after = repository.get("e", "")
    assert after is not before
    # It stops them while those of its successor execute.
    assert not {*before.instances.runners}.intersection(after.instances.runners)


async def test_forgotten_ensembles_stay_in_no_others_way(bench: Bench) -> None:
    config = ensemble_config([("nowhere", {"a": "in"}, {"x": "out"})])
    for number in range(2 * MAX_MODELS):
        path = write_ensemble(bench.root, f"bad{number}", config)
        (folder,) = (one for one in find_models([bench.root]) if one.name == path.name)
        with pytest.raises(LoadFailed, match="nowhere"):
            await bench.repository.load(path.name, always(folder))
    assert len(bench.repository.index()) == MAX_MODELS


async def test_trace_settings_are_removed_with_a_load_that_finds_nothing(bench: Bench) -> None:
    def find() -> AbstractContextManager[ModelFolder]:
        bench.trace("nothing")  # while it is loading, and only known because of that
        raise ModelNotFound("nothing is there")

    with pytest.raises(ModelNotFound):
        await bench.repository.load("nothing", find)
    assert not bench.is_traced("nothing")
