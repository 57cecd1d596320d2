"""What loads, unloads and folders that have gone change of what serves, and what they leave behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.protos import model_config_pb2 as pb
from paceline.server.errors import LoadFailed, ModelNotFound, ModelNotReady
from paceline.server.models.layout import ModelFolder
from paceline.server.models.load_queue import always
from tests.ensembles import ensemble_config, write_ensemble
from tests.harness import touch
from tests.polling import eventually_async
from tests.unit.server.found import find_models
from tests.unit.server.models.repository_bench import MAX_MODELS, Bench


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    for model in bench.models.values():
        model.gate.open()
    await bench.repository.stop()


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
