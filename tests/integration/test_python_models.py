"""Python models: who may load them, how they batch, and what callers see when they fail."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from paceline.protos import inference_pb2 as pb
from paceline.server.app import Server
from paceline.server.config import Settings
from paceline.server.errors import StartError
from tests import models, puppet
from tests.integration.controlling import explicit, index, load, unload
from tests.integration.probing import probe
from tests.integration.serving import Served, failure_of, serving
from tests.polling import eventually_async
from tests.wire import infer

INTERNAL = grpc.StatusCode.INTERNAL
INVALID = grpc.StatusCode.INVALID_ARGUMENT
CONFIG = 'backend: "python"'
FOUR = "max_batch_size: 4 dynamic_batching { max_queue_delay_microseconds: 100000000 }"
"""Batches leave when they are full, so that it is known which requests share one."""


def allowing(root: Path) -> Settings:
    return Settings(paths=(root,), allow_python_models=True)


def write(root: Path, config: str | None = None, name: str = "m") -> Path:
    """Write the puppet model into a repository. The model's folder."""
    puppet.write_puppet(root / name / "1")
    if config is not None:
        (root / name / "config.pbtxt").write_text(f"{CONFIG} {config}")
    return root / name


def request(*elements: int) -> pb.ModelInferRequest:
    return infer("m", {"INPUT0": np.array(elements, np.int64).reshape(-1, 1)})


def loads(root: Path) -> int:
    """How often the model was loaded."""
    return len((root / "m" / "1" / "loads").read_text().splitlines())


def numbers(response: pb.ModelInferResponse) -> list[int]:
    listed: list[int] = np.frombuffer(response.raw_output_contents[0], np.int64).tolist()
    return listed


async def together(served: Served, *elements: int) -> list[Any]:
    """Answers, or status and message, of one request for each element, all at once."""

    async def one(element: int) -> object:
        try:
            return numbers(await served.infer(request(element)))
        except grpc.aio.AioRpcError as error:
            return error.code(), error.details()

    return list(await asyncio.gather(*map(one, elements)))


async def test_python_model_is_refused_unless_the_server_allows_it(tmp_path: Path) -> None:
    path = write(tmp_path) / "1" / "model.py"
    path.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n{path.read_text()}")
    models.write(models.mlp(), tmp_path / "other" / "1" / "model.onnx")
    async with serving(tmp_path) as served:
        lines = {line[0]: line for line in await index(served)}
        assert lines["other"][2] == "READY"
        assert "allow it with --allow-python-models true" in lines["m"][3]
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("platform", ['backend: "python"', 'platform: "python"'])
async def test_python_model_by_backend_or_platform_is_refused_unless_the_server_allows_it(
    tmp_path: Path, platform: str
) -> None:
    folder = write(tmp_path)
    (folder / "config.pbtxt").write_text(platform)
    server = Server(Settings(paths=(tmp_path,), grpc_port=0, metrics_port=None))
    with pytest.raises(StartError, match="the model's code would run with this process's rights"):
        await server.start()
    assert not (folder / "1" / "loads").exists()


@pytest.mark.parametrize("allowed", [False, True])
@pytest.mark.parametrize("config", ["{}", '{"backend": "python"}', '{"platform": "python"}'])
async def test_python_model_uploaded_by_a_client_is_never_loaded(tmp_path: Path, allowed: bool, config: str) -> None:
    (tmp_path / "m").mkdir()
    code = f"open({str(tmp_path / 'ran')!r}, 'w')".encode()
    async with serving(tmp_path, settings=explicit(tmp_path, allow_python_models=allowed)) as served:
        status, text = await failure_of(load(served, "m", config=config, **{"file:1/model.py": code}))
        assert status is INVALID
        assert ("clients may not upload code" if allowed else "--allow-python-models true") in text
    assert not (tmp_path / "ran").exists()


async def test_python_model_in_the_repository_accepts_a_clients_configuration_but_no_program(tmp_path: Path) -> None:
    write(tmp_path)
    parameters = ("paceline.python_executable", "EXECUTION_ENV_PATH")
    async with serving(tmp_path, settings=explicit(tmp_path, allow_python_models=True)) as served:
        await load(served, "m", config='{"backend": "python", "max_batch_size": 3}')
        config = (await served.stub.ModelConfig(pb.ModelConfigRequest(name="m"), timeout=20)).config
        assert (config.max_batch_size, config.backend) == (3, "python")
        for parameter in parameters:
            program = f'{{"parameters": {{"{parameter}": {{"string_value": "/bin/true"}}}}}}'
            status, text = await failure_of(load(served, "m", config=program))
            assert status is INVALID
            assert f"{parameter}: clients may not choose a program to run" in text
        assert numbers(await served.infer(request(1))) == [10]


async def test_python_model_without_configuration_declares_everything_itself(tmp_path: Path) -> None:
    write(tmp_path)
    async with serving(tmp_path, settings=allowing(tmp_path)) as served:
        config = (await served.stub.ModelConfig(pb.ModelConfigRequest(name="m"), timeout=20)).config
        assert (config.backend, config.default_model_filename, config.max_batch_size) == ("python", "model.py", 32)
        assert [(group.name, group.count) for group in config.instance_group] == [("m", 1)]
        assert config.HasField("dynamic_batching")
        metadata = await served.stub.ModelMetadata(pb.ModelMetadataRequest(name="m"), timeout=20)
        assert metadata.platform == "python"
        assert [(one.name, one.datatype, list(one.shape)) for one in metadata.inputs] == [("INPUT0", "INT64", [-1, 1])]
        assert numbers(await served.infer(request(1, 2))) == [10, 20]


async def test_python_model_beside_an_onnx_model_is_not_served(tmp_path: Path) -> None:
    folder = write(tmp_path)
    models.write(models.identity("INT64", ("batch", 1)), folder / "1" / "model.onnx")
    async with serving(tmp_path) as served:
        assert numbers(await served.infer(request(7))) == [7]


async def test_python_model_without_a_version_folder_is_served(tmp_path: Path) -> None:
    folder = puppet.write_puppet(tmp_path / "m").parent
    async with serving(folder, settings=allowing(folder)) as served:
        assert numbers(await served.infer(request(7))) == [70]


async def test_python_model_gets_whole_batches(tmp_path: Path) -> None:
    write(tmp_path, FOUR)
    async with serving(tmp_path, settings=allowing(tmp_path)) as served:
        before = await served.metric("nv_inference_exec_count")
        assert await together(served, 1, 2, 3, 4) == [[10], [20], [30], [40]]
        assert await served.metric("nv_inference_exec_count") == before + 1


async def test_python_model_without_batch_axis_gets_requests_one_by_one(tmp_path: Path) -> None:
    write(
        tmp_path,
        """
        max_batch_size: 0
        input { name: "INPUT0" data_type: TYPE_INT64 dims: [ -1, 1 ] }
        output { name: "OUTPUT0" data_type: TYPE_INT64 dims: [ -1, 1 ] }
        """,
    )
    async with serving(tmp_path, settings=allowing(tmp_path)) as served:
        assert numbers(await served.infer(request(*range(100)))) == [10 * number for number in range(100)]


async def test_python_model_that_declares_nothing_gets_the_tensors_of_batch_input(tmp_path: Path) -> None:
    config = """
        max_batch_size: 4
        input { name: "INPUT0" data_type: TYPE_FP32 dims: [ -1 ] allow_ragged_batch: true }
        output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ 1 ] }
        batch_input { kind: BATCH_ELEMENT_COUNT target_name: "COUNT" data_type: TYPE_FP32 source_input: "INPUT0" }
        """
    folder = write(tmp_path, config)
    (folder / "1" / "model.py").write_text(
        "class Model:\n    def execute(self, inputs): return {'OUTPUT0': inputs['COUNT'].reshape(-1, 1)}\n"
    )
    async with serving(tmp_path, settings=allowing(tmp_path)) as served:
        response = await served.infer(infer("m", {"INPUT0": np.zeros((1, 7), np.float32)}))
        assert np.frombuffer(response.raw_output_contents[0], np.float32).tolist() == [7]


async def test_python_model_that_contradicts_its_configuration_fails_to_load(tmp_path: Path) -> None:
    write(
        tmp_path,
        """
        input { name: "INPUT0" data_type: TYPE_FP32 dims: [ 1 ] }
        output { name: "OUTPUT0" data_type: TYPE_INT64 dims: [ 1 ] }
        max_batch_size: 4
        """,
    )
    with pytest.raises(StartError, match="input 'INPUT0': expected data_type of the model, INT64, got FP32"):
        await Server(Settings(paths=(tmp_path,), grpc_port=0, metrics_port=None, allow_python_models=True)).start()


async def test_exception_in_a_python_model_fails_only_the_request_at_fault(tmp_path: Path) -> None:
    write(tmp_path, FOUR)
    async with serving(tmp_path, settings=allowing(tmp_path)) as served:
        *good, (status, text) = await together(served, 1, 2, 3, puppet.RAISE)
        assert good == [[10], [20], [30]]
        assert status is INTERNAL
        assert "ValueError: this is no good" in text


async def test_memory_error_of_a_python_model_does_not_make_batches_smaller(tmp_path: Path) -> None:
    write(tmp_path, FOUR)
    async with serving(tmp_path, settings=allowing(tmp_path)) as served:
        *good, (status, _) = await together(served, 1, 2, 3, puppet.MEMORY)
        assert good == [[10], [20], [30]]
        assert status is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await served.metric("paceline_allowed_batch_rows") == 4


async def test_crash_of_a_python_model_fails_only_the_request_at_fault(tmp_path: Path, frontends: int) -> None:
    write(tmp_path, FOUR)
    async with serving(tmp_path, settings=allowing(tmp_path)) as served:
        *good, (status, text) = await together(served, 1, 2, 3, puppet.SEGFAULT)
        assert good == [[10], [20], [30]]
        assert status is INTERNAL
        assert "the model's process was killed by SIGSEGV while it executed this batch" in text
        assert await together(served, 1, 2, 3, 4) == [[10], [20], [30], [40]]
    assert loads(tmp_path) == 3, "at the start, for those who were in its batch, and for what came later"


async def test_crash_of_a_python_model_fails_its_batch_if_failures_are_not_isolated(tmp_path: Path) -> None:
    once = 'parameters { key: "paceline.isolate_failures" value { string_value: "false" } }'
    write(tmp_path, f"{FOUR} {once}")
    async with serving(tmp_path, settings=allowing(tmp_path)) as served:
        for status, _ in await together(served, 1, 2, 3, puppet.SEGFAULT):
            assert status is INTERNAL
        assert await together(served, 1, 2, 3, 4) == [[10], [20], [30], [40]]
    assert loads(tmp_path) == 2


async def test_crash_of_one_instance_does_not_affect_the_others(tmp_path: Path) -> None:
    folder = write(tmp_path, "max_batch_size: 1 instance_group { count: 2 kind: KIND_CPU }") / "1"
    path = folder / "model.py"
    waits = """        if 5 in what:
            (HERE / "waits").touch()
            while not (HERE / "goes").exists():
                threading.Event().wait(0.01)
"""
    path.write_text(path.read_text().replace("        if -1 in what:", f"{waits}        if -1 in what:"))
    async with serving(tmp_path, settings=allowing(tmp_path)) as served:
        assert loads(tmp_path) == 2
        waiting = asyncio.create_task(served.infer(request(5)))
        await eventually_async((folder / "waits").exists, "an execution by one of them")
        assert (await failure_of(served.infer(request(puppet.EXIT))))[0] is INTERNAL
        await eventually_async(lambda: loads(tmp_path) == 3, "another process for the one that ended")
        (folder / "goes").touch()
        assert numbers(await waiting) == [50]
    assert loads(tmp_path) == 3


async def test_death_of_an_idle_process_costs_no_request(tmp_path: Path) -> None:
    write(tmp_path)
    async with serving(tmp_path, settings=allowing(tmp_path)) as served:
        for number in range(1, 4):
            (pid,) = numbers(await served.infer(request(puppet.PID)))
            os.kill(pid, signal.SIGKILL)
            # Some requests reach the dying process, others find none.
            assert await together(served, 1, 2, 3) == [[10], [20], [30]]
            assert await served.metric("paceline_lost_instances") == number
        os.kill(numbers(await served.infer(request(puppet.PID)))[0], signal.SIGKILL)
        await eventually_async(lambda: loads(tmp_path) == 5, "another process, although nobody asks")


async def test_model_is_unavailable_and_not_ready_until_a_process_of_it_can_be_started(
    tmp_path: Path, frontends: int
) -> None:
    folder = write(tmp_path)
    write(tmp_path, name="other")
    async with serving(tmp_path, settings=allowing(tmp_path)) as served:
        (folder / "1" / "broken").touch()
        assert (await failure_of(served.infer(request(puppet.EXIT))))[0] is INTERNAL
        # A request that arrives during the first attempt waits for it.
        assert await failure_of(served.infer(request(1))) == (
            grpc.StatusCode.UNAVAILABLE,
            "model 'm': no instance of the model is left; the server keeps trying to start another",
        )
        assert await probe(served, "/readyz") == (503, "models have no instance left: 'm'\n")
        assert await probe(served, "/livez") == (200, "ok\n"), "a restart isn't known to help, and others are served"
        other = infer("other", {"INPUT0": np.array([[1]], np.int64)})
        assert numbers(await served.infer(other)) == [10]
        (folder / "1" / "broken").unlink()
        await eventually_async(lambda: served.server.repository.ready, "a process again")
        assert numbers(await served.infer(request(1))) == [10]


async def test_instance_whose_process_cannot_be_restarted_gets_no_requests_while_others_do(tmp_path: Path) -> None:
    folder = write(tmp_path, "max_batch_size: 1 instance_group { count: 2 kind: KIND_CPU }")
    async with serving(tmp_path, settings=allowing(tmp_path)) as served:
        (folder / "1" / "broken").touch()
        assert (await failure_of(served.infer(request(puppet.EXIT))))[0] is INTERNAL
        assert await together(served, *range(1, 20)) == [[10 * number] for number in range(1, 20)]
        assert served.server.repository.ready


async def test_model_whose_warm_up_ends_its_process_is_served_cold(tmp_path: Path) -> None:
    folder = write(tmp_path)
    path = folder / "1" / "model.py"
    path.write_text(
        path.read_text().replace("        if -1 in what:", "        if 0 in what: os._exit(4)\n        if -1 in what:")
    )
    async with serving(tmp_path, settings=allowing(tmp_path)) as served:
        assert await together(served, *range(1, 5)) == [[10], [20], [30], [40]]
        for number in range(2, 4):
            os.kill(numbers(await served.infer(request(puppet.PID)))[0], signal.SIGKILL)
            assert await together(served, *range(1, 5)) == [[10], [20], [30], [40]]
            assert await served.metric("paceline_lost_instances") == number
        # By the load, by the first replacement, which was warmed up in vain, and by each replacement after that.
        assert loads(tmp_path) == 5


async def test_replacements_that_hang_while_loading_hold_up_nothing_else(tmp_path: Path) -> None:
    folder = write(tmp_path, "instance_group { count: 10 kind: KIND_CPU }")
    write(tmp_path, name="other")
    async with serving(tmp_path, settings=explicit(tmp_path, load=("*",), allow_python_models=True)) as served:
        path = folder / "1" / "model.py"
        started = [int(line.split()[0]) for line in (folder / "1" / "loads").read_text().splitlines()]
        path.write_text(
            f"open({str(folder / 'hanging')!r}, 'a').write('x')\nimport threading\nthreading.Event().wait()\n"
        )
        for pid in started:
            os.kill(pid, signal.SIGKILL)
        await eventually_async(lambda: (folder / "hanging").exists(), "loads that hang")
        await eventually_async(lambda: len((folder / "hanging").read_text()) == 10, "all of them")
        await asyncio.wait_for(index(served), 20)
        other = infer("other", {"INPUT0": np.array([[1]], np.int64)})
        assert numbers(await served.infer(other)) == [10]
        await asyncio.wait_for(unload(served, "other"), 20)
        await eventually_async(lambda: not served.server.repository.leaving, "the other model gone")
        await asyncio.wait_for(unload(served, "m"), 20)
        await eventually_async(lambda: not served.server.repository.hangs, "all gone")


async def test_processes_that_end_before_serving_are_restarted_at_growing_intervals(tmp_path: Path) -> None:
    folder = write(tmp_path)
    path = folder / "1" / "model.py"
    # For such dims no warm-up data is made up. A warm-up would count as serving.
    path.write_text(path.read_text().replace('"INT64", [-1, 1]', '"INT64", [-1, -1]'))
    async with serving(tmp_path, settings=explicit(tmp_path, load=("m",), allow_python_models=True)) as served:
        dying = """
import time
class Ending(Model):
    def load(self, context):
        with open(HERE / "starts", "a") as file:
            print(time.monotonic(), file=file)
        threading.Timer(0.3, os._exit, (3,)).start()  # once this has been told of: an end before is another thing
    def execute(self, inputs):
        threading.Event().wait()
Model = Ending
"""
        path.write_text(path.read_text() + dying)
        os.kill(numbers(await served.infer(request(puppet.PID)))[0], signal.SIGKILL)

        def starts() -> list[float]:
            file = folder / "1" / "starts"
            return [float(line) for line in file.read_text().splitlines()] if file.exists() else []

        await eventually_async(lambda: len(starts()) >= 4, "four starts")
        first, second, third, fourth = starts()[:4]
        assert second - first > 0.3 + 0.1
        assert third - second > 0.3 + 0.2
        assert fourth - third > 0.3 + 0.4
        # The unload doesn't wait for these intervals.
        await unload(served, "m")
        await eventually_async(lambda: not served.server.repository.hangs, "all of it gone")


async def test_printed_output_of_a_python_model_is_in_the_servers_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path)
    with caplog.at_level(logging.INFO, "paceline"):
        async with serving(tmp_path, settings=allowing(tmp_path)) as served:
            await served.infer(request(puppet.PRINT))
            await eventually_async(lambda: "model 'm': its words" in caplog.messages, "the line in the log")


async def test_reload_of_a_python_model_runs_the_new_code_and_ends_the_old_process(tmp_path: Path) -> None:
    folder = write(tmp_path)
    async with serving(tmp_path, settings=explicit(tmp_path, load=("m",), allow_python_models=True)) as served:
        (pid,) = set(numbers(await served.infer(request(puppet.PID))))
        path = folder / "1" / "model.py"
        path.write_text(path.read_text().replace("x * 10", "x * 11"))
        await load(served, "m")
        assert numbers(await served.infer(request(1))) == [11]
        await eventually_async(lambda: not Path(f"/proc/{pid}").exists(), "the old process gone")
        path.write_text("import nowhere")
        status, text = await failure_of(load(served, "m"))
        assert status is INVALID
        assert "ModuleNotFoundError: No module named 'nowhere'" in text
        assert numbers(await served.infer(request(1))) == [11]
