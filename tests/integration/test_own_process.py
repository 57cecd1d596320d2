"""ONNX models in their own processes: whatever ends such a process, the server and all other models keep serving."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
from pathlib import Path

import grpc
import numpy as np
import pytest

from paceline.protos import inference_pb2 as pb
from paceline.protos.inference_pb2_grpc import GRPCInferenceServiceStub
from paceline.server.config import Settings
from paceline.server.models.defaults import parse_backend_config
from tests import models, odd_models
from tests.harness import ServerProcess, touch
from tests.integration.controlling import explicit, index, load, load_request, unload
from tests.integration.serving import Served, failure_of, serving
from tests.operators import build_library, twice
from tests.polling import eventually, eventually_async, eventually_awaited
from tests.wire import infer

INTERNAL = grpc.StatusCode.INTERNAL
OWN = 'parameters { key: "paceline.own_process" value { string_value: "true" } }'
FOUR = f"max_batch_size: 4 dynamic_batching {{ max_queue_delay_microseconds: 100000000 }} {OWN}"
"""Batches leave when they are full, so that it is known which requests share one."""
SMALLEST = -(2**63)


def write_quotient(root: Path, config: str = OWN, name: str = "m") -> Path:
    path = models.write(models.quotient(), root / name / "1" / "model.onnx")
    (root / name / "config.pbtxt").write_text(config)
    return path


async def divide(served: Served, first: int, second: int, name: str = "m") -> int | tuple[grpc.StatusCode, str]:
    inputs = {"INPUT0": np.array([[first]], np.int64), "INPUT1": np.array([[second]], np.int64)}
    try:
        response = await served.infer(infer(name, inputs))
    except grpc.aio.AioRpcError as error:
        return error.code(), error.details() or ""
    return int(np.frombuffer(response.raw_output_contents[0], np.int64)[0])


async def is_refused(served: Served) -> bool:
    answer = await divide(served, 8, 2)
    return isinstance(answer, tuple) and answer[0] is grpc.StatusCode.UNAVAILABLE


def processes(name: str = "m") -> list[int]:
    """The ids of this process's children that run model `name`."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            arguments = (folder / "cmdline").read_bytes().split(b"\0")
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            continue
        if f"paceline:{name}".encode() in arguments and parent == os.getpid():
            found.append(int(folder.name))
    return found


async def test_input_that_crashes_the_process_fails_only_its_own_request(tmp_path: Path) -> None:
    write_quotient(tmp_path, FOUR)
    write_quotient(tmp_path, name="other")
    async with serving(tmp_path) as served:
        others = processes("other")
        *good, (status, text) = await asyncio.gather(
            *(divide(served, *pair) for pair in ((8, 2), (9, 3), (10, 5), (SMALLEST, -1)))
        )
        assert good == [4, 3, 2]
        assert (status, text) == (
            INTERNAL,
            "model 'm': the model's process was killed by SIGFPE while it executed this batch",
        )
        assert await asyncio.gather(*(divide(served, 8, 2) for _ in range(4))) == [4] * 4
        # One lost by the whole batch, one by the faulty request alone.
        assert await served.metric("paceline_lost_instances") == 2
        assert await divide(served, 6, 2, "other") == 3
        assert len(others) == 1
        assert processes("other") == others


async def test_model_that_crashes_its_trial_process_runs_in_its_own_process(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = models.write(twice(), tmp_path / "m" / "1" / "model.onnx")
    build_library(path.with_name("twice.so"), least=4)
    (path.parents[1] / "config.pbtxt").write_text('model_operations { op_library_filename: "twice.so" }')
    models.write(models.identity(), tmp_path / "other" / "1" / "model.onnx")
    three, four = (np.ones((1, size), np.float32) for size in (3, 4))
    async with serving(tmp_path, settings=Settings(paths=(tmp_path,), allow_op_libraries=True)) as served:
        told = (await served.stub.ModelConfig(pb.ModelConfigRequest(name="m"))).config
        assert told.parameters["paceline.own_process"].string_value == "true"
        assert (told.max_batch_size, told.platform) == (0, "onnxruntime_onnx")
        status, text = await failure_of(served.infer(infer("m", {"INPUT0": three})))
        assert (status, "was killed by SIGFPE" in text) == (INTERNAL, True)
        assert (await served.infer(infer("m", {"INPUT0": four}))).raw_output_contents[0] == (2 * four).tobytes()
        assert (await served.infer(infer("other", {"INPUT0": three}))).raw_output_contents[0] == three.tobytes()
    assert "model 'm' runs in its own process, because it crashed its trial process" in caplog.text
    assert "the process that ran it was killed by SIGFPE" in caplog.text


async def test_model_configured_without_its_own_process_stays_in_the_servers(tmp_path: Path) -> None:
    path = models.write(twice(), tmp_path / "m" / "1" / "model.onnx")
    build_library(path.with_name("twice.so"), least=4)
    library = 'model_operations { op_library_filename: "twice.so" }'
    (path.parents[1] / "config.pbtxt").write_text(f"{library} {OWN.replace('true', 'false')}")
    async with serving(tmp_path, settings=Settings(paths=(tmp_path,), allow_op_libraries=True)) as served:
        four = np.ones((1, 4), np.float32)
        assert (await served.infer(infer("m", {"INPUT0": four}))).raw_output_contents[0] == (2 * four).tobytes()
        assert processes() == []


async def test_each_instance_has_a_process_and_unloading_the_model_ends_them_all(tmp_path: Path) -> None:
    write_quotient(tmp_path, f"{OWN} instance_group {{ count: 3 kind: KIND_CPU }}")
    async with serving(tmp_path, settings=explicit(tmp_path, load=("m",))) as served:
        first = processes()
        assert len(first) == 3
        touch(tmp_path / "m")
        await load(served, "m")
        await eventually_async(lambda: not set(first) & set(processes()), "the end of those before")
        assert len(processes()) == 3
        assert await divide(served, 8, 2) == 4
        await unload(served, "m")
        await eventually_async(lambda: processes() == [], "the end of all processes")


async def test_process_killed_while_idle_costs_no_request(tmp_path: Path) -> None:
    write_quotient(tmp_path)
    async with serving(tmp_path) as served:
        for _ in range(3):
            (process,) = processes()
            os.kill(process, signal.SIGKILL)
            assert await asyncio.gather(*(divide(served, 8, 2) for _ in range(4))) == [4] * 4


async def test_execution_that_hangs_in_an_operator_is_killed_with_its_process(tmp_path: Path) -> None:
    path = models.write(twice(), tmp_path / "m" / "1" / "model.onnx")
    build_library(path.with_name("twice.so"), endless=3)
    limit = 'parameters { key: "paceline.execution_timeout_ms" value { string_value: "300" } }'
    config = f'max_batch_size: 4 model_operations {{ op_library_filename: "twice.so" }} {limit} {OWN}'
    (path.parents[1] / "config.pbtxt").write_text(config)
    async with serving(tmp_path, settings=Settings(paths=(tmp_path,), allow_op_libraries=True)) as served:
        (process,) = processes()
        assert (await failure_of(served.infer(infer("m", {"INPUT0": np.ones((1, 3), np.float32)}))))[0] is INTERNAL
        four = np.ones((1, 4), np.float32)

        async def executes() -> bool:  # on a busy machine, that may take longer than the limit, too
            (found,) = await asyncio.gather(served.infer(infer("m", {"INPUT0": four})), return_exceptions=True)
            return not isinstance(found, grpc.aio.AioRpcError) and found.raw_output_contents == [(2 * four).tobytes()]

        await eventually_awaited(executes, "an execution by another process")
        await eventually_async(lambda: process not in processes(), "the end of what hung")
        await eventually_async(lambda: not served.server.repository.hangs, "nothing hangs")


async def test_batch_without_memory_in_its_process_is_rerun_in_smaller_ones(tmp_path: Path) -> None:
    path = models.write(odd_models.memory_hungry(2), tmp_path / "m" / "1" / "model.onnx")
    (path.parents[1] / "config.pbtxt").write_text(FOUR)
    rows = [np.full((1, 1), number, np.float32) for number in range(4)]
    async with serving(tmp_path) as served:
        answers = await asyncio.gather(*(served.infer(infer("m", {"INPUT0": row})) for row in rows))
        assert [one.raw_output_contents[0] for one in answers] == [row.tobytes() for row in rows]
        assert await served.metric("paceline_out_of_memory") == 1
        assert await served.metric("paceline_allowed_batch_rows") == 2
        status, _ = await failure_of(served.infer(infer("m", {"INPUT0": np.zeros((3, 1), np.float32)})))
        assert status is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await served.metric("paceline_lost_instances") == 0


async def test_library_that_ends_the_process_on_opening_fails_the_load(tmp_path: Path) -> None:
    path = models.write(twice(), tmp_path / "m" / "1" / "model.onnx")
    source = path.with_name("deadly.c")
    build_library(path.with_name("twice.so"))
    source.write_text("#include <unistd.h>\nvoid *RegisterCustomOps(void *o, void *r) { _exit(7); }\n")
    compiled = await asyncio.create_subprocess_exec("cc", "-shared", "-fPIC", "-o", path.with_name("d.so"), source)
    assert await compiled.wait() == 0
    (path.parents[1] / "config.pbtxt").write_text(f'model_operations {{ op_library_filename: "d.so" }} {OWN}')
    write_quotient(tmp_path, name="good")
    async with serving(tmp_path, settings=Settings(paths=(tmp_path,), allow_op_libraries=True)) as served:
        (line,) = [one for one in await index(served) if one[0] == "m"]
        assert "its process ended with exit status 7 while it opened" in line[3]
        assert await divide(served, 8, 2, name="good") == 4


async def test_replacement_process_is_not_used_when_the_model_file_has_changed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_quotient(tmp_path)
    with caplog.at_level(logging.ERROR, "paceline.server.instances"):
        async with serving(tmp_path) as served:
            models.write(models.identity(), path)
            assert isinstance(await divide(served, SMALLEST, -1), tuple)
            await eventually_async(lambda: "its files have changed since it was loaded" in caplog.text, "an attempt")
            assert await is_refused(served)
            models.write(models.quotient(), path)
            while await is_refused(served):
                await asyncio.sleep(0.05)
            assert await divide(served, 8, 2) == 4


async def test_model_uploaded_by_a_client_gets_another_process_when_one_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setenv("TMPDIR", str(scratch))
    (tmp_path / "models").mkdir()
    config = json.dumps({"parameters": {"paceline.own_process": {"string_value": "true"}}})
    brought = {"file:1/model.onnx": models.quotient().SerializeToString()}
    async with serving(tmp_path / "models", settings=explicit(tmp_path / "models")) as served:
        await load(served, "m", config=config, **brought)
        assert isinstance(await divide(served, SMALLEST, -1), tuple)
        assert await divide(served, 8, 2) == 4
        await load(served, "m", config=config, **brought)
        await eventually_async(lambda: len(list(scratch.iterdir())) == 1, "the files of the one before are gone")
        assert await divide(served, 8, 2) == 4
        await unload(served, "m")
        await eventually_async(lambda: not list(scratch.iterdir()), "all files are gone")


def test_uploaded_files_are_removed_even_when_a_second_sigterm_ends_the_server(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    (tmp_path / "models").mkdir()
    config = json.dumps({"parameters": {"paceline.own_process": {"string_value": "true"}}})
    flags = ("--model-control-mode", "explicit", "--drain-grace-secs", "60")
    with ServerProcess(tmp_path / "models", args=flags, env={"TMPDIR": str(scratch)}) as server:
        with grpc.insecure_channel(server.target) as channel:
            stub = GRPCInferenceServiceStub(channel)  # type: ignore[no-untyped-call]
            request = load_request("m", config=config, **{"file:1/model.onnx": models.quotient().SerializeToString()})
            stub.RepositoryModelLoad(request, timeout=60)
        assert len(list(scratch.iterdir())) == 1
        os.kill(server.pid, signal.SIGTERM)
        with grpc.insecure_channel(server.target) as channel:
            stub = GRPCInferenceServiceStub(channel)  # type: ignore[no-untyped-call]
            eventually(lambda: not stub.ServerReady(pb.ServerReadyRequest()).ready, "the first is taken")
        os.kill(server.pid, signal.SIGTERM)
        eventually(lambda: not list(scratch.iterdir()), "the files are gone")


async def test_backend_config_gives_models_their_own_process_unless_they_opt_out(tmp_path: Path) -> None:
    write_quotient(tmp_path, "", "apart")
    write_quotient(tmp_path, OWN.replace("true", "false"), "here")
    given = parse_backend_config(["onnxruntime,own-process=true"])
    async with serving(tmp_path, settings=Settings(paths=(tmp_path,), backend_config=given)) as served:
        assert (len(processes("apart")), len(processes("here"))) == (1, 0)
        assert await divide(served, 8, 2, "apart") == await divide(served, 8, 2, "here") == 4
