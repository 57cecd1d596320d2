"""`--trace-config` from the start: what is traced of requests that succeed, fail, wait together or are split."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from paceline.backends.errors import ExecutionError
from paceline.protos import inference_pb2 as pb
from paceline.server.app import Server
from paceline.server.config import Settings
from paceline.server.errors import StartError
from paceline.server.telemetry.trace_settings import TraceConfig, TraceSettings
from tests import open_puppet
from tests.calling_puppet import write_caller
from tests.ensembles import ensemble_config, write_ensemble
from tests.integration.caching import CACHED
from tests.integration.controlling import explicit, load
from tests.integration.scripted import totals
from tests.integration.serving import echo_model, failure_of, serving, write_model
from tests.integration.streams import Stream
from tests.wire import infer, rows_of_floats


def settings(folder: Path, **how: Any) -> Settings:
    traces = TraceSettings(timestamps=True, rate=1, **how)
    return Settings(paths=(folder / "models",), trace=TraceConfig(folder / "t.json", traces))


def traces(folder: Path, name: str = "t.json") -> list[tuple[str, dict[str, int]]]:
    """The ids of the traced requests, each with its times by name, in ns."""
    content = json.loads((folder / name).read_text())
    times = [{one["name"]: one["ns"] for one in entry["timestamps"]} for entry in content[1::2]]
    return list(zip([entry["request_id"] for entry in content[::2]], times, strict=True))


async def test_requests_of_a_batch_share_the_times_of_its_execution(tmp_path: Path) -> None:
    config = "max_batch_size: 4 dynamic_batching { preferred_batch_size: 4 max_queue_delay_microseconds: 60000000 }"
    async with serving(tmp_path / "models", {"m": echo_model()}, config=config, settings=settings(tmp_path)) as served:
        await asyncio.gather(*(served.infer(infer("m", {"a": rows_of_floats(2)}, id=id)) for id in "ab"))
    (first, times), (second, others) = sorted(traces(tmp_path))
    assert (first, second) == ("a", "b")
    for name in ("COMPUTE_START", "COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START", "COMPUTE_END"):
        assert times[name] == others[name]
    for one in (times, others):
        assert list(one.values()) == sorted(one.values())


async def test_failed_requests_are_not_traced_and_do_not_use_up_the_count(tmp_path: Path) -> None:
    model = echo_model()
    async with serving(tmp_path / "models", {"m": model}, settings=settings(tmp_path, count=1)) as served:
        model.faults.raise_next(ExecutionError("no"))
        code, _ = await failure_of(served.infer(infer("m", {"a": rows_of_floats(1)}, id="bad")))
        assert code is grpc.StatusCode.INTERNAL
        await served.infer(infer("m", {"a": rows_of_floats(1)}, id="good"))
    assert [name for name, _ in traces(tmp_path, "t.json.0")] == ["good"]


async def test_requests_without_an_execution_of_their_own_are_traced(tmp_path: Path) -> None:
    open_puppet.write(tmp_path / "models", "max_batch_size: 4")
    write_model(tmp_path / "models", "echo", config=CACHED)
    how = replace(settings(tmp_path), allow_python_models=True, cache_bytes=2**20)
    async with serving(tmp_path / "models", {"echo": echo_model()}, settings=how) as served:
        stream = Stream(served)
        now = {"run": "send(1, True)"}
        await stream.send(infer("m", {"x": np.array([[1]], np.int64)}, id="ends before execute", parameters=now))
        await stream.message()
        for id in ("executed", "kept"):
            await served.infer(infer("echo", {"a": rows_of_floats(1)}, id=id))
    found = dict(traces(tmp_path))
    assert {id: "COMPUTE_START" in times for id, times in found.items()} == {
        "ends before execute": False, "executed": True, "kept": False,
    }  # fmt: skip
    for times in found.values():
        assert times["REQUEST_START"] <= times["REQUEST_END"]


async def test_steps_of_an_ensemble_are_children_of_its_trace(tmp_path: Path) -> None:
    models = {name: echo_model() for name in "mn"}
    steps = [("m", {"a": "in"}, {"x": "between"}), ("n", {"a": "between"}, {"x": "out"})]
    write_ensemble(tmp_path / "models", "both", ensemble_config(steps))
    config = "max_batch_size: 8 dynamic_batching { }"
    async with serving(tmp_path / "models", models, config=config, settings=settings(tmp_path, count=2)) as served:
        for id in "ab":
            await served.infer(infer("both", {"in": rows_of_floats(1)}, id=id))
        await served.infer(infer("m", {"a": rows_of_floats(1)}, id="c"))
    heads = json.loads((tmp_path / "t.json.0").read_text())[::2]
    assert [(one["id"], one.get("parent_id"), one["model_name"], one["request_id"]) for one in heads] == [
        (1, None, "both", "a"), (2, 1, "m", "a"), (3, 1, "n", "a"),
        (4, None, "both", "b"), (5, 4, "m", "b"), (6, 4, "n", "b"),
    ]  # fmt: skip


async def test_call_of_a_model_is_a_child_of_its_callers_trace(tmp_path: Path) -> None:
    write_caller(tmp_path / "models", "max_batch_size: 1", calls="echo")
    how = replace(settings(tmp_path), allow_python_models=True)
    call = np.array([[b"y = models['echo'].infer({'a': x})['x'][:, :4]"]], object)
    async with serving(tmp_path / "models", {"echo": echo_model()}, settings=how) as served:
        await served.infer(infer("m", {"run": call, "x": np.zeros((1, 16), np.float32)}, id="a"))
    heads = json.loads((tmp_path / "t.json").read_text())[::2]
    assert [(one["id"], one.get("parent_id"), one["model_name"]) for one in heads] == [(1, None, "m"), (2, 1, "echo")]


async def test_split_request_is_traced_once(tmp_path: Path) -> None:
    config = 'max_batch_size: 2 parameters { key: "paceline.split_oversized" value { string_value: "true" } }'
    async with serving(tmp_path / "models", {"m": echo_model()}, config=config, settings=settings(tmp_path)) as served:
        await served.infer(infer("m", {"a": rows_of_floats(5)}, id="long"))
    assert [name for name, _ in traces(tmp_path)] == ["long"]


async def test_traces_that_cannot_be_written_are_lost_but_no_request_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "models").mkdir()
    there = tmp_path / "traces"
    there.mkdir()
    traced = replace(settings(there), paths=(tmp_path / "models",))
    async with serving(tmp_path / "models", {"m": echo_model()}, settings=traced) as served:
        there.rmdir()
        for _ in range(3):
            assert (await served.infer(infer("m", {"a": rows_of_floats(1)}))).outputs
        assert totals(await served.metrics())["success"] == 3
    assert f"3 traces were not written to {there}/t.json: No such file or directory" in caplog.messages


async def test_settings_of_a_model_that_failed_to_load_are_kept_for_it(tmp_path: Path) -> None:
    repository = tmp_path / "models"
    models = {"other": echo_model()}
    write_model(repository, "m")
    off = TraceConfig(tmp_path / "t.json", TraceSettings(rate=1))
    given = explicit(repository, load=("m", "other"), trace=off, allow_remote_settings=True)
    async with serving(repository, models, settings=given) as served:
        change = pb.TraceSettingRequest(model_name="m")
        change.settings["trace_level"].value.append("TIMESTAMPS")
        told = await served.stub.TraceSetting(change, timeout=20)
        assert list(told.settings["trace_level"].value) == ["TIMESTAMPS"]
        models["m"] = echo_model()
        await load(served, "m")
        for name in models:
            await served.infer(infer(name, {"a": rows_of_floats(1)}, id=name))
    assert [name for name, _ in traces(tmp_path)] == ["m"]


async def test_unwritable_trace_file_keeps_the_server_from_starting(tmp_path: Path) -> None:
    (tmp_path / "models" / "m").mkdir(parents=True)
    there = TraceConfig(tmp_path / "none" / "t.json")
    server = Server(
        Settings(paths=(tmp_path / "models",), grpc_address="127.0.0.1", grpc_port=0, metrics_port=None, trace=there)
    )
    with pytest.raises(StartError, match=r"^--trace-config: .*none/t.json: expected a file in a folder that can be"):
        await server.start()
