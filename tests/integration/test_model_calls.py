"""Python models that call other models: what calls are to the models that they reach, and what becomes of them."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests import models, open_puppet
from tests.calling_puppet import write_caller
from tests.integration.calling import ALONE, BATCHED, ECHO, ENCODE, TELL, asking, echoing, numbers, served, statistics
from tests.integration.controlling import explicit, load, unload
from tests.integration.serving import echo_model, failure_of, serving
from tests.polling import eventually_async
from tests.wire import infer


async def test_call_gives_what_a_client_gets(tmp_path: Path) -> None:
    async with served(tmp_path) as started:
        expected = numbers(await started.infer(infer("encoder", {"INPUT0": np.ones((1, 16), np.float32)})))
        assert numbers(await started.infer(asking(ENCODE, 1))) == expected
        counted = await statistics(started, "encoder")
        assert (counted.inference_count, counted.inference_stats.success.count) == (2, 2)


async def test_calls_share_batches_with_each_other_and_clients(tmp_path: Path) -> None:
    echo = echo_model()
    async with echoing(tmp_path, echo, f"{ALONE} instance_group {{ count: 2 }}") as started:
        echo.gate.close()
        first = infer("echo", {"a": np.zeros((1, 16), np.float32)})
        running = [asyncio.ensure_future(started.infer(first))]
        await asyncio.to_thread(echo.gate.wait_entered, 1)
        running += [asyncio.ensure_future(started.infer(one)) for one in (asking(ECHO, 1), asking(ECHO, 2), first)]
        await eventually_async(lambda: started.waiting("echo") == 3, "all calls have arrived")
        echo.gate.open()
        answers = [numbers(one) for one in await asyncio.gather(*running)]
        assert answers[1:3] == [[1] * 4, [2] * 4]
        assert echo.batches == [(1,), (1, 1, 1)]


async def test_many_clients_of_a_caller_batch_where_it_calls(tmp_path: Path) -> None:
    async with served(tmp_path, f"{BATCHED} instance_group {{ count: 2 }}") as started:
        rows = np.random.default_rng(0).standard_normal((64, 16)).astype(np.float32)
        asked = [infer("m", {"run": np.array([[ENCODE.encode()]], object), "x": row[None]}) for row in rows]
        answers = await asyncio.gather(*map(started.infer, asked))
        counted = await statistics(started, "encoder")
        assert counted.inference_count == 64
        assert counted.execution_count < 64
        expected = await asyncio.gather(*[started.infer(infer("encoder", {"INPUT0": row[None]})) for row in rows])
        np.testing.assert_allclose([numbers(one) for one in answers], [numbers(one) for one in expected], rtol=1e-5)


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("models['encoder'].infer({'INPUT0': x}, version='7')", "NOT_FOUND: Request for unknown model: 'encoder'"),
        ("models['absent'].infer({'x': x})", "NOT_FOUND: Request for unknown model: 'absent' is not found"),
        ("models['encoder'].infer({'x': x})", "INVALID_ARGUMENT: model 'encoder': unexpected input 'x'"),
        ("models['encoder'].infer({'INPUT0': x * 1j})", "INVALID_ARGUMENT: model 'encoder': input 'INPUT0': expected"),
        ("models['encoder'].infer({'INPUT0': x.astype('f8')})", "INVALID_ARGUMENT: model 'encoder': input 'INPUT0': "),
        ("models['encoder'].infer({'INPUT0': x[:, :3]})", "INVALID_ARGUMENT: "),
        ("models['encoder'].infer({'INPUT0': x}, outputs=['z'])", "INVALID_ARGUMENT: unexpected inference output 'z'"),
        ("models['encoder'].infer({'INPUT0': x}, parameters={'priority': 'high'})", "INVALID_ARGUMENT: "),
        ("models['encoder'].infer({'INPUT0': x}, timeout_s=1e-9)", "DEADLINE_EXCEEDED: model 'encoder': Deadline"),
        ("[*models['encoder'].stream_infer({'INPUT0': x[:, :3]})]", "INVALID_ARGUMENT: "),
    ],
)  # fmt: skip
async def test_refused_call_raises_what_a_client_gets(tmp_path: Path, code: str, expected: str) -> None:
    async with served(tmp_path, calls="encoder, absent") as started:
        _, text = await failure_of(started.infer(asking(TELL % code)))
        assert text.startswith(f"model 'm': ValueError: {expected}")
        assert numbers(await started.infer(asking(ENCODE)))


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("models['absent'].infer({'x': x})", grpc.StatusCode.NOT_FOUND),
        ("models['encoder'].infer({'x': x})", grpc.StatusCode.INVALID_ARGUMENT),
        ("models['encoder'].infer({'INPUT0': x}, timeout_s=1e-9)", grpc.StatusCode.DEADLINE_EXCEEDED),
    ],
)
async def test_uncaught_failure_keeps_its_status(tmp_path: Path, code: str, status: grpc.StatusCode) -> None:
    async with served(tmp_path, calls="encoder, absent") as started:
        assert (await failure_of(started.infer(asking(code))))[0] is status


async def test_failure_of_the_called_model_reaches_the_code(tmp_path: Path) -> None:
    echo = echo_model()
    async with echoing(tmp_path, echo) as started:
        echo.faults.raise_next(RuntimeError("no luck"))
        _, text = await failure_of(started.infer(asking(TELL % ECHO)))
        assert text == "model 'm': ValueError: INTERNAL: model 'echo': no luck"
        assert started.failed("echo") == 1
        assert numbers(await started.infer(asking(ECHO, 3))) == [3] * 4


async def test_call_ends_with_the_deadline_of_its_caller(tmp_path: Path) -> None:
    echo = echo_model()
    async with echoing(tmp_path, echo) as started:
        echo.gate.close()
        code, _ = await failure_of(started.infer(asking(ECHO), timeout_s=0.3))
        assert code is grpc.StatusCode.DEADLINE_EXCEEDED
        # The called model still executes, and its caller is free again.
        assert numbers(await started.infer(asking("y += 1"))) == [1] * 4


async def test_cancelled_request_withdraws_its_calls(tmp_path: Path) -> None:
    echo = echo_model()
    async with echoing(tmp_path, echo) as started:
        echo.gate.close()
        busy = asyncio.ensure_future(started.infer(infer("echo", {"a": np.zeros((1, 16), np.float32)})))
        await asyncio.to_thread(echo.gate.wait_entered, 1)
        call = asyncio.ensure_future(started.infer(asking(ECHO)))
        await eventually_async(lambda: started.waiting("echo") == 1, "the call has arrived")
        call.cancel()
        await eventually_async(lambda: started.waiting("echo") == 0, "the call is withdrawn")
        assert numbers(await started.infer(asking("y += 1"))) == [1] * 4
        echo.gate.open()
        await busy
        assert echo.batches == [(1,)]


async def test_killed_process_leaves_nothing_in_the_called_model(tmp_path: Path) -> None:
    echo = echo_model()
    async with echoing(tmp_path, echo) as started:
        pid = int(numbers(await started.infer(asking("y += os.getpid()")))[0])
        echo.gate.close()
        busy = asyncio.ensure_future(started.infer(infer("echo", {"a": np.zeros((1, 16), np.float32)})))
        await asyncio.to_thread(echo.gate.wait_entered, 1)
        call = asyncio.ensure_future(started.infer(asking(ECHO)))
        await eventually_async(lambda: started.waiting("echo") == 1, "the call has arrived")
        os.kill(pid, signal.SIGKILL)
        _, text = await failure_of(call)
        assert "was killed by SIGKILL while it executed this batch" in text
        await eventually_async(lambda: started.waiting("echo") == 0, "the call is withdrawn")
        echo.gate.open()
        await busy
        assert echo.batches == [(1,)]
        assert numbers(await started.infer(asking(ECHO, 2))) == [2] * 4
        for model in ("m", "echo"):
            labels = f'model="{model}",version="1"'
            assert await started.metric("nv_inference_pending_request_count", labels) == 0


async def test_stopping_server_answers_the_calls_of_accepted_requests(tmp_path: Path) -> None:
    echo = echo_model()
    async with echoing(tmp_path, echo) as started:
        watch = health_pb2_grpc.HealthStub(started.channel).Watch(health_pb2.HealthCheckRequest())
        await watch.read()
        echo.gate.close()
        call = asyncio.ensure_future(started.infer(asking(f"{ECHO}\n{ECHO}", 3)))
        await asyncio.to_thread(echo.gate.wait_entered, 1)
        stopping = asyncio.ensure_future(started.server.stop(20))
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        echo.gate.open()
        assert numbers(await call) == [3] * 4
        assert await stopping


async def test_called_model_may_be_unloaded_and_loaded_again(tmp_path: Path) -> None:
    async with served(tmp_path, settings=explicit(tmp_path, allow_python_models=True)) as started:
        await load(started, "encoder")
        await load(started, "m")
        expected = numbers(await started.infer(asking(ENCODE, 1)))
        await unload(started, "encoder")
        _, text = await failure_of(started.infer(asking(TELL % ENCODE)))
        assert "NOT_FOUND: Request for unknown model: 'encoder' has no available versions" in text
        await load(started, "encoder")
        assert numbers(await started.infer(asking(ENCODE, 1))) == expected
        await unload(started, "encoder")
        await load(started, "m")
        assert numbers(await started.infer(asking(ENCODE, 1))) == expected


@pytest.mark.parametrize(
    "answers",
    [
        "[float(one['y'][0, 0]) for one in models['many'].stream_infer(given)]",
        "asyncio.run(collected(models['many'].async_stream_infer(given)))",
    ],
)
async def test_decoupled_model_is_called_as_an_iterator(tmp_path: Path, answers: str) -> None:
    count = "for n in range(40): send(n)\nrequest.end()"
    code = f"""
async def collected(answers):
    return [float(one['y'][0, 0]) async for one in answers]
given = {{'x': np.array([[1]])}}
parameters = {{'run': {count!r}}}
many = models['many']
y[0, :2] = len(answers := {answers.replace("given)", "given, parameters=parameters)")}), sum(answers)
"""
    (tmp_path / "repository").mkdir()
    folder = open_puppet.write(tmp_path / "repository")
    folder.rename(folder.parent / "many")
    async with served(tmp_path / "repository", calls="many") as started:
        assert numbers(await started.infer(asking(code)))[:2] == [40, sum(range(40))]


async def test_closed_iterator_cancels_the_called_model(tmp_path: Path) -> None:
    folder = open_puppet.write(tmp_path)
    folder.rename(tmp_path / "many")
    endless = "while not request.cancelled: send(1)\nrequest.end()"
    code = f"""
answers = models['many'].stream_infer({{'x': np.array([[1]])}}, parameters={{'run': {endless!r}}})
next(answers)
answers.close()
"""
    async with served(tmp_path, calls="many") as started:
        await started.infer(asking(code))
        many = started.server.repository.get("many", "")
        assert many.open_requests is not None
        await eventually_async(lambda: not len(many.open_requests), "no request is open")


async def test_calls_go_on_after_execute_in_threads(tmp_path: Path) -> None:
    echo = echo_model()
    keep = """
def call():
    model.kept.append(models['echo'].infer({'a': np.full((1, 16), 7, np.float32)})['x'][0, 0])
model.thread = threading.Thread(target=call)
model.thread.start()
"""
    async with echoing(tmp_path, echo) as started:
        echo.gate.close()
        await started.infer(asking(keep))
        await asyncio.to_thread(echo.gate.wait_entered, 1)
        echo.gate.open()
        assert numbers(await started.infer(asking("model.thread.join()\ny += model.kept.pop()"))) == [7] * 4


async def test_fork_of_a_process_cannot_call(tmp_path: Path) -> None:
    fork = """
read, write = os.pipe()
if not os.fork():
    try:
        models['encoder'].infer({'INPUT0': x})
    except BaseException as error:
        os.write(write, str(error).encode())
    os._exit(0)
raise ValueError(os.read(read, 1000).decode())
"""
    async with served(tmp_path) as started:
        _, text = await failure_of(started.infer(asking(fork)))
        assert "models can only be called in the process that the server has started, not in a fork" in text
        assert numbers(await started.infer(asking(ENCODE)))


async def test_too_many_calls_of_a_process_are_refused(tmp_path: Path) -> None:
    echo = echo_model()
    code = """
async def all_at_once():
    calls = [asyncio.ensure_future(models['echo'].async_infer({'a': x})) for _ in range(1030)]
    done, _ = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
    error = done.pop().exception()
    for call in calls:
        call.cancel()
    await asyncio.wait(calls)
    raise ValueError(f'{error.status}: {error}')
asyncio.run(all_at_once())
"""
    async with echoing(tmp_path, echo) as started:
        echo.gate.close()
        _, text = await failure_of(started.infer(asking(code), timeout_s=None))
        assert "RESOURCE_EXHAUSTED: model 'echo' isn't called: 1024 calls of this process are under way" in text
        echo.gate.open()
        assert numbers(await started.infer(asking(ECHO, 2))) == [2] * 4


async def test_undeclared_model_is_refused_saying_how_to_declare_it(tmp_path: Path) -> None:
    async with served(tmp_path, calls="") as started:
        _, text = await failure_of(started.infer(asking(ENCODE)))
        assert "model 'm' doesn't say that it calls 'encoder'" in text
        assert 'parameters { key: "paceline.calls" value { string_value: "encoder" } }' in text


async def test_called_models_are_loaded_before_who_calls_them(tmp_path: Path) -> None:
    source = """
import numpy as np
class Model:
    inputs = {"run": ("BYTES", [-1, 1]), "x": ("FP32", [-1, 16])}
    outputs = {"y": ("FP32", [-1, 4])}
    def load(self, context):
        self.known = self.models["encoder"].infer({"INPUT0": np.ones((1, 16), np.float32)})["OUTPUT0"]
    def execute(self, inputs):
        return {"y": np.repeat(self.known, len(inputs["x"]), 0)}
"""
    models.write(models.mlp(), tmp_path / "encoder" / "1" / "model.onnx")
    write_caller(tmp_path, calls="encoder, b", source=source, name="a")
    write_caller(tmp_path, calls="a, encoder", source=source, name="b")
    settings = explicit(tmp_path, allow_python_models=True, model_load_thread_count=1)
    async with serving(tmp_path, settings=settings) as started:
        await load(started, "a")
        expected = numbers(await started.infer(infer("encoder", {"INPUT0": np.ones((1, 16), np.float32)})))
        for model in ("a", "b"):
            assert numbers(await started.infer(asking("", model=model))) == expected


async def test_call_is_a_step_of_a_sequence_and_has_an_id(tmp_path: Path) -> None:
    other = """
import numpy as np
class Model:
    def load(self, context):
        self.sums = {}
    def execute(self, inputs):
        row, = inputs["corrid"].ravel()
        self.sums[row] = self.sums.get(row, 0) * (not inputs["start"].any()) + inputs["x"][0, 0]
        return {"y": np.full((1, 4), self.sums[row], np.float32)}
"""
    controls = """
sequence_batching {
  max_sequence_idle_microseconds: 60000000
  control_input { name: "start" control { kind: CONTROL_SEQUENCE_START fp32_false_true: [ 0, 1 ] } }
  control_input { name: "corrid" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 } }
}
input { name: "x" data_type: TYPE_FP32 dims: [ 16 ] }
output { name: "y" data_type: TYPE_FP32 dims: [ 4 ] }
max_batch_size: 1
"""
    code = """
def step(value, **flags):
    given = {'sequence_id': 7, **flags}
    return models['sum'].infer({'x': x * 0 + value}, request_id='an id', parameters=given)['y']
step(1, sequence_start=True)
step(2)
y = step(4, sequence_end=True)
"""
    write_caller(tmp_path, controls, name="sum", source=other)
    async with served(tmp_path, calls="sum") as started:
        assert numbers(await started.infer(asking(code))) == [7] * 4
        text = (await failure_of(started.infer(asking(TELL % "models['sum'].infer({'x': x})"))))[1]
        assert "INVALID_ARGUMENT: " in text
        assert "sequence" in text
