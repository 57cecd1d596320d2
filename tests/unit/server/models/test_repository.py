"""Which model answers to which name and version, and the errors for those that don't."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from paceline.backends.base import Device
from paceline.backends.spec import ModelSpec
from paceline.scheduler.errors import BatcherClosed
from paceline.server.errors import InvalidRequest, ModelNotFound, ModelNotReady
from tests.memory_models import MemoryInstance, MemoryModel
from tests.polling import eventually_async
from tests.unit.scheduler.workbench import submit
from tests.unit.server.models.repository_bench import SPEC, Bench


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
