"""Loads on threads: how many at a time, which are retried, and what happens to one that nobody waits for."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from paceline.backends.base import Backend
from paceline.backends.errors import LoadError
from paceline.backends.spec import ModelSpec, TensorSpec
from paceline.server.errors import LoadHangs, ModelNotFound
from paceline.server.models.defaults import LoadDefaults
from paceline.server.models.layout import ModelFolder
from paceline.server.models.load_queue import Find, LoadQueue, always
from paceline.server.models.loader import LoadedVersion
from tests.memory_models import MemoryBackend, MemoryModel
from tests.polling import eventually_async
from tests.rlimits import without_threads
from tests.unit.server.found import find_models

SPEC = ModelSpec((TensorSpec("a", "FP32", (-1, -1)),), (TensorSpec("x", "FP32", (-1, -1)),))
WARMED = 'backend: "memory" max_batch_size: 1 input { name: "a" data_type: TYPE_FP32 dims: 1 }'
"""The model is warmed up, which a closed gate holds up: a load that takes long."""
_SAMPLE = """
model_warmup { batch_size: 1 inputs { key: "a" value { data_type: TYPE_FP32 dims: 1 zero_data: true } } }
"""


class Bench:
    """Folders of models in memory."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.models: dict[str, MemoryModel] = {}
        self.told: list[list[str]] = []

    def backend(self, name: str) -> Backend:
        return MemoryBackend(self.models)

    def add(self, name: str, config: str = WARMED) -> MemoryModel:
        (self.root / name / "3").mkdir(parents=True)
        (self.root / name / "config.pbtxt").write_text(config)
        self.models[name] = MemoryModel(SPEC)
        return self.models[name]

    def folder(self, name: str) -> ModelFolder:
        return next(folder for folder in find_models([self.root]) if folder.name == name)

    async def load(self, loads: LoadQueue, name: str, find: Find | None = None) -> list[LoadedVersion]:
        return await loads.load(name, find or always(self.folder(name)), None, self.told.append, self.provide, ())

    async def provide(self, names: Sequence[str]) -> None:
        raise AssertionError(f"models in memory call nobody, got {names}")


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    for model in bench.models.values():
        model.gate.open()


async def test_load_returns_versions_ready_to_execute_and_reports_them(bench: Bench) -> None:
    model, loads = bench.add("m"), LoadQueue(bench.backend)
    (loaded,) = await bench.load(loads, "m")
    assert (loaded.name, loaded.version, bench.told) == ("m", 3, [["3"]])
    await eventually_async(lambda: not loads.under_way, "the load over")
    loaded.close()
    assert model.closed


async def test_loads_with_one_thread_run_one_by_one(bench: Bench) -> None:
    first, second = bench.add("a"), bench.add("b")
    first.gate.close()
    loads = LoadQueue(bench.backend, threads=1)
    tasks = [asyncio.create_task(bench.load(loads, name)) for name in "ab"]
    await asyncio.to_thread(first.gate.wait_entered, 1)
    assert second.gate.entered == 0
    first.gate.open()
    for loaded in await asyncio.gather(*tasks):
        loaded[0].close()


async def test_loads_with_several_threads_run_at_the_same_time(bench: Bench) -> None:
    together = threading.Barrier(3)
    for name in "abc":
        bench.add(name).faults.raise_when(lambda inputs: together.wait(10) < 0, LoadError("never"))
    loads = LoadQueue(bench.backend)
    for loaded in await asyncio.gather(*(bench.load(loads, name) for name in "abc")):
        loaded[0].close()


async def test_cancelled_load_continues_and_is_closed_when_it_ends(bench: Bench) -> None:
    model, loads = bench.add("m"), LoadQueue(bench.backend)
    model.gate.close()
    loading = asyncio.create_task(bench.load(loads, "m"))
    await asyncio.to_thread(model.gate.wait_entered, 1)
    loading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await loading
    assert loads.under_way
    model.gate.open()
    await eventually_async(lambda: model.closed and not loads.under_way, "what the load brought closed")
    assert model.open_instances == 0


async def test_failed_load_is_retried_as_often_as_asked_for(bench: Bench) -> None:
    tries = 0

    @contextmanager
    def fails(times: int) -> Iterator[ModelFolder]:
        nonlocal tries
        tries += 1
        if tries <= times:
            raise OSError("not there yet")
        yield bench.folder("m")

    bench.add("m")
    with pytest.raises(OSError, match="not there yet"):
        await bench.load(LoadQueue(bench.backend), "m", lambda: fails(1))
    tries = 0
    (loaded,) = await bench.load(LoadQueue(bench.backend, retries=2), "m", lambda: fails(2))
    assert tries == 3
    loaded.close()


async def test_load_of_an_unknown_model_is_not_retried(bench: Bench) -> None:
    finds = 0

    def find() -> None:
        nonlocal finds
        finds += 1
        raise ModelNotFound("no such model")

    with pytest.raises(ModelNotFound):
        await bench.load(LoadQueue(bench.backend, retries=2), "m", find)  # type: ignore[arg-type]
    assert finds == 1


async def test_load_that_takes_long_is_logged_once_it_has_begun(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    model = bench.add("m")
    model.gate.close()
    loads = LoadQueue(bench.backend, slow_after_s=0)

    def told() -> list[str]:
        return [one.getMessage() for one in caplog.records if one.name == "paceline.server.loading"]

    with caplog.at_level(logging.INFO, "paceline.server.loading"):
        loading = asyncio.create_task(bench.load(loads, "m"))
        await asyncio.to_thread(model.gate.wait_entered, 1)
        await eventually_async(told, "a line in the log")
        model.gate.open()
        (loaded,) = await loading
    assert told() == ["model 'm' is still loading after 0 s"]
    loaded.close()


@pytest.mark.parametrize("config", [WARMED, WARMED + _SAMPLE], ids=["default", "configured"])
@pytest.mark.usefixtures("without_minimum_execution_limit")
async def test_load_with_a_hanging_warm_up_fails_and_is_closed_when_that_ends(bench: Bench, config: str) -> None:
    model = bench.add("m", config)
    model.gate.close()
    loads = LoadQueue(bench.backend, LoadDefaults(execution_limit_ns=1), retries=1)
    with pytest.raises(LoadHangs, match="warm-up execution took longer than its limit: 1e-09 s"):
        await bench.load(loads, "m")
    await asyncio.to_thread(model.gate.wait_entered, 1)
    assert (loads.under_way, model.open_instances, model.closed) == (True, 1, False)
    model.gate.open()
    await eventually_async(lambda: model.closed and not loads.under_way, "what hung closed")
    assert (model.open_instances, model.gate.entered) == (0, 1)


@pytest.mark.usefixtures("without_minimum_execution_limit")
async def test_hanging_load_that_was_cancelled_before_is_under_way_until_it_ends(bench: Bench) -> None:
    model, _ = bench.add("m"), bench.add("n", 'backend: "memory"')
    model.gate.close()
    loads = LoadQueue(bench.backend, LoadDefaults(execution_limit_ns=200_000_000), threads=1)
    loading = asyncio.create_task(bench.load(loads, "m"))
    await asyncio.to_thread(model.gate.wait_entered, 1)
    loading.cancel()
    await asyncio.wait([loading])
    assert loading.cancelled()
    (loaded,) = await bench.load(loads, "n")  # once the thread has finished with the first one
    loaded.close()
    assert loads.under_way
    model.gate.open()
    await eventually_async(lambda: model.closed and not loads.under_way, "what hung closed")


async def test_load_that_failed_for_lack_of_threads_is_not_done_later(bench: Bench) -> None:
    model, loads = bench.add("m"), LoadQueue(bench.backend, threads=1)
    with without_threads(), pytest.raises(RuntimeError, match="can't start new thread"):
        await bench.load(loads, "m")
    assert not loads.under_way
    (loaded,) = await bench.load(loads, "m")
    assert (bench.told, model.open_instances) == ([["3"]], 1)
    loaded.close()


async def test_load_that_raises_stop_iteration_fails_with_a_runtime_error(bench: Bench) -> None:
    def find() -> None:
        raise StopIteration("odd")

    with pytest.raises(RuntimeError, match="StopIteration: odd"):
        await bench.load(LoadQueue(bench.backend), "m", find)  # type: ignore[arg-type]
