"""What a poll does about models that appear, change, fail and disappear on disk."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from paceline.server.models.layout import Layout
from paceline.server.models.model_record import IndexLine, ModelState
from paceline.server.models.poller import Poller
from tests.polling import eventually_async
from tests.unit.server.models.poller_bench import CONFIG, WARMED, Bench


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    bench = Bench(tmp_path / "repository")
    bench.root.mkdir()
    yield bench
    await bench.repository.stop()


def logged_messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the poller logged."""
    return [record.getMessage() for record in caplog.records if record.name == "paceline.server.poller"]


async def test_start_loads_existing_models_at_once(bench: Bench) -> None:
    bench.write("a")
    bench.write("b")
    await bench.start()
    assert bench.ready == {"a": ["1"], "b": ["1"]}


async def test_start_on_an_empty_repository_is_ready(bench: Bench) -> None:
    await bench.start()
    assert bench.repository.index() == []
    assert bench.repository.ready


async def test_poll_without_changes_does_nothing(bench: Bench) -> None:
    bench.write("a")
    await bench.start()
    before = bench.load_ids
    assert not await bench.look()
    assert bench.load_ids == before


async def test_poll_loads_a_new_model_when_two_polls_saw_the_same(bench: Bench) -> None:
    await bench.start()
    bench.write("a")
    assert await bench.look()
    assert bench.ready == {}
    assert bench.repository.ready, "nobody misses what was never loaded"
    assert not await bench.look()
    assert bench.ready == {"a": ["1"]}


async def test_poll_of_a_model_that_keeps_changing_waits_until_it_is_written(bench: Bench) -> None:
    await bench.start()
    folder = bench.write("a")
    for size in range(5):
        (folder / "1" / "model.onnx").write_bytes(b"x" * size)
        assert await bench.look()
        assert bench.ready == {}
    assert not await bench.look()
    assert bench.ready == {"a": ["1"]}


def rewrite_config(folder: Path) -> None:
    (folder / "config.pbtxt").write_text(f"{CONFIG} max_batch_size: 3")


def touch_model_file(folder: Path) -> None:
    (folder / "1" / "model.onnx").write_bytes(b"new")


def change_time_alone(folder: Path) -> None:
    about = (folder / "config.pbtxt").stat()
    os.utime(folder / "config.pbtxt", ns=(about.st_atime_ns, about.st_mtime_ns + 1))


def change_size_alone(folder: Path) -> None:
    about = (folder / "config.pbtxt").stat()
    (folder / "config.pbtxt").write_text(CONFIG + " ")
    os.utime(folder / "config.pbtxt", ns=(about.st_atime_ns, about.st_mtime_ns))


def replace_by_one_of_its_time_and_size(folder: Path) -> None:
    about, other = (folder / "config.pbtxt").stat(), folder.parent.parent / "other"
    other.write_text(CONFIG.replace('"', "'"))
    os.utime(other, ns=(about.st_atime_ns, about.st_mtime_ns))
    while other.stat().st_ctime_ns == about.st_ctime_ns:  # until the clock of the file system has moved on
        os.utime(other, ns=(about.st_atime_ns, about.st_mtime_ns))
    other.replace(folder / "config.pbtxt")
    replaced = (folder / "config.pbtxt").stat()
    assert (replaced.st_mtime_ns, replaced.st_size) == (about.st_mtime_ns, about.st_size)


def add_file_deep_inside(folder: Path) -> None:
    (folder / "1" / "weights" / "layer0").mkdir(parents=True)
    (folder / "1" / "weights" / "layer0" / "w.bin").touch()


@pytest.mark.parametrize(
    "change",
    [
        rewrite_config,
        touch_model_file,
        change_time_alone,
        change_size_alone,
        replace_by_one_of_its_time_and_size,
        add_file_deep_inside,
    ],
)
async def test_poll_reloads_a_changed_model_and_no_other(bench: Bench, change: object) -> None:
    folder = bench.write("a")
    bench.write("b")
    await bench.start()
    a, b = bench.load_ids
    change(folder)  # type: ignore[operator]
    await bench.settle()
    assert bench.load_ids[0] != a
    assert bench.load_ids[1] == b
    again = bench.load_ids
    await bench.settle()
    assert bench.load_ids == again


async def test_poll_follows_versions_that_come_and_go(bench: Bench) -> None:
    folder = bench.write("a", f"{CONFIG} version_policy {{ latest {{ num_versions: 2 }} }}")
    await bench.start()
    for present, served in (([2], ["1", "2"]), ([3], ["2", "3"])):
        for version in present:
            (folder / str(version)).mkdir()
        await bench.settle()
        assert bench.ready == {"a": served}
    (folder / "3").rmdir()
    await bench.settle()
    assert bench.ready == {"a": ["1", "2"]}
    (folder / "config.pbtxt").write_text(f"{CONFIG} version_policy {{ specific {{ versions: [ 1, 9 ] }} }}")
    await bench.settle()
    assert bench.ready == {"a": ["1"]}


async def test_poll_unloads_a_deleted_model_when_two_polls_missed_it_and_forgets_it(bench: Bench) -> None:
    folder = bench.write("a")
    bench.write("b")
    await bench.start()
    folder.rename(bench.root.parent / "elsewhere")
    assert await bench.look()
    assert bench.ready == {"a": ["1"], "b": ["1"]}
    assert not await bench.look()
    assert bench.ready == {"b": ["1"]}
    assert bench.repository.ready
    await eventually_async(lambda: not bench.repository.leaving, "the model closed")
    await bench.look()
    assert [line.name for line in bench.repository.index()] == ["b"]


async def test_poll_of_a_model_without_a_place_loads_it_when_another_has_gone(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "models", max_models=1)
    folder = bench.write("b")
    await bench.start()
    bench.write("a")
    await bench.settle()
    assert bench.ready == {"b": ["1"]}
    folder.rename(tmp_path / "elsewhere")
    await bench.settle()
    await bench.look()
    assert bench.ready == {"a": ["1"]}
    await bench.repository.stop()


async def test_model_without_a_place_at_the_start_is_loaded_when_another_has_gone(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "models", max_models=1)
    folders = {name: bench.write(name) for name in "ab"}
    await bench.start()
    (served,) = bench.ready
    await bench.settle()
    assert bench.ready == {served: ["1"]}
    folders.pop(served).rename(tmp_path / "elsewhere")
    await bench.settle()
    await bench.look()
    assert bench.ready == {name: ["1"] for name in folders}
    await bench.repository.stop()


@pytest.mark.parametrize("first", [True, False], ids=["at the start", "later"])
async def test_model_without_a_place_is_loaded_when_the_one_that_had_it_fails(tmp_path: Path, first: bool) -> None:
    bench = Bench(tmp_path / "models", max_models=1)
    bench.root.mkdir()
    if not first:
        await bench.start()
    bench.write("a", f"{CONFIG} instance_group {{ passive: true }}")
    bench.write("b")
    if first:
        await bench.start()
    await bench.settle()
    await bench.look()
    assert bench.ready == {"b": ["1"]}
    assert not await bench.look()
    await bench.repository.stop()


async def test_poll_of_a_folder_that_one_poll_missed_changes_nothing(bench: Bench) -> None:
    folder = bench.write("a")
    await bench.start()
    before = bench.load_ids
    folder.rename(bench.root.parent / "elsewhere")
    assert await bench.look()
    (bench.root.parent / "elsewhere").rename(folder)
    assert not await bench.look()
    assert bench.load_ids == before


async def test_changed_model_that_fails_to_load_keeps_the_old_one(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    folder = bench.write("a")
    await bench.start()
    before = bench.load_ids
    (folder / "config.pbtxt").write_text(f"{CONFIG} instance_group {{ passive: true }}")
    with caplog.at_level(logging.ERROR, "paceline.server.poller"):
        for _ in range(5):
            await bench.look()
    assert bench.load_ids == before
    assert bench.repository.ready
    (text,) = logged_messages(caplog)
    assert text == (
        "load failed for model 'a': instance_group.passive is not supported by this build; it is not tried again "
        "until its files change"
    )
    (line,) = bench.repository.index()
    assert line == IndexLine(
        "a", "1", ModelState.READY, "the last load failed: instance_group.passive is not supported by this build"
    )
    (folder / "config.pbtxt").write_text(CONFIG)
    await bench.settle()
    assert bench.load_ids != before
    assert bench.repository.index() == [IndexLine("a", "1", ModelState.READY)]


async def test_new_model_that_fails_to_load_makes_the_server_unready(
    bench: Bench,
) -> None:
    bench.write("a", "nonsense")
    await bench.start()
    assert not bench.repository.ready
    bench.write("a")
    await bench.settle()
    assert bench.repository.ready
    bench.write("b", "nonsense")
    await bench.settle()
    assert not bench.repository.ready
    shutil.rmtree(bench.root / "b")
    await bench.settle()
    assert bench.repository.ready
    assert bench.ready == {"a": ["1"]}


async def test_poll_continues_while_a_model_loads_and_checks_that_one_again_afterwards(bench: Bench) -> None:
    await bench.start()
    folder = bench.write("slow", WARMED)
    model = bench.models["slow"]
    model.gate.close()
    assert await bench.poller.poll_once()
    assert not await bench.poller.poll_once()
    await asyncio.to_thread(model.gate.wait_entered, 1)
    bench.write("fast")
    (folder / "config.pbtxt").write_text(f"{WARMED} # changed meanwhile")
    assert await bench.poller.poll_once()
    assert not await bench.poller.poll_once()
    # Only then does the poller look at it again.
    await eventually_async(lambda: bench.poller._under_way.keys() == {"slow"}, "the other model's load over")
    assert bench.ready == {"fast": ["1"]}
    shutil.rmtree(bench.root / "fast")
    assert await bench.poller.poll_once()
    assert not await bench.poller.poll_once()
    await eventually_async(lambda: not bench.ready, "the other model unloaded")
    assert model.gate.entered == 1
    model.gate.open()
    await bench.poller.ended()
    before = bench.load_ids
    assert len(before) == 1
    assert not await bench.look(), "what changed meanwhile was seen twice"
    assert bench.load_ids != before
    assert bench.ready == {"slow": ["1"]}


async def test_run_cancelled_during_a_load_leaves_no_task_behind(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.poller = Poller(bench.layout, bench.repository, interval_s=0.001)
    await bench.start()
    following = asyncio.create_task(bench.poller.run())
    bench.write("a", WARMED)
    model = bench.models["a"]
    model.gate.close()
    bench.write("b")
    await eventually_async(lambda: "b" in bench.ready and model.gate.entered, "one model serving, one being loaded")
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
    await bench.repository.stop()
    assert asyncio.all_tasks() == {asyncio.current_task()}
    model.gate.open()


async def test_poll_of_a_duplicate_name_keeps_what_serves(tmp_path: Path) -> None:
    one, two = Bench(tmp_path / "one"), tmp_path / "two"
    one.write("a")
    two.mkdir()
    one.layout = Layout([one.root, two])
    one.poller = Poller(one.layout, one.repository, interval_s=1e6)
    await one.start()
    before = one.load_ids
    (two / "a" / "1").mkdir(parents=True)
    await one.settle()
    assert one.load_ids == before
    (line,) = one.repository.index()
    assert (line.state, "model appears in two or more repositories" in line.reason) == (ModelState.READY, True)
    shutil.rmtree(two / "a")
    await one.settle()
    assert one.repository.index() == [IndexLine("a", "1", ModelState.READY)]
    await one.repository.stop()


async def test_poll_of_an_unreadable_repository_changes_nothing_and_is_logged_once(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.write("a")
    await bench.start()
    before = bench.load_ids
    bench.root.rename(bench.root.parent / "elsewhere")
    with caplog.at_level(logging.WARNING, "paceline.server.poller"):
        for _ in range(3):
            assert not await bench.look()
    (text,) = logged_messages(caplog)
    assert text.startswith("the repositories can't be read, so models stay as they are: ")
    assert bench.load_ids == before
    (bench.root.parent / "elsewhere").rename(bench.root)
    await bench.settle()
    assert bench.load_ids == before


async def test_poll_of_one_models_folder_follows_its_replacement(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    folder = bench.write("a")
    bench.layout = Layout([folder])
    bench.poller = Poller(bench.layout, bench.repository, interval_s=1e6)
    await bench.start()
    (before,) = bench.load_ids
    shutil.rmtree(folder)
    await bench.look()
    bench.write("a", f"{CONFIG} max_batch_size: 2")
    await bench.settle()
    (after,) = bench.load_ids
    assert after != before
    assert bench.repository.get("a", "").max_batch_rows == 2
    await bench.repository.stop()


async def test_run_polls_at_every_interval_and_survives_errors(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.write("a")
    bench.poller = Poller(bench.layout, bench.repository, interval_s=0.001)
    await bench.start()
    following = asyncio.create_task(bench.poller.run())
    bench.write("b")
    await eventually_async(lambda: "b" in bench.ready, "the new model serving")
    bench.root.rename(tmp_path.parent / f"{tmp_path.name}-away")
    await asyncio.sleep(0)
    (tmp_path.parent / f"{tmp_path.name}-away").rename(bench.root)
    bench.write("c")
    await eventually_async(lambda: "c" in bench.ready, "the next model serving")
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
    await bench.repository.stop()
