"""Decoupled models: any number of answers over a stream, and what ends a request from either side."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import numpy as np
import pytest

from paceline.protos import inference_pb2 as pb
from paceline.server.config import Settings
from tests import open_puppet
from tests.integration.controlling import explicit, unload
from tests.integration.regions import register
from tests.integration.serving import Served, failure_of, serving
from tests.integration.streams import Stream
from tests.polling import eventually_async, eventually_awaited
from tests.shared_objects import held_by, request_shared_output, shared_object
from tests.wire import infer

FINAL = "triton_final_response"
EMPTY_FINAL = "triton_enable_empty_final_response"
COUNT = "for n in range(3): send(n)\n"
ENDLESS = "while not request.cancelled: send(1)\n"
KEEP = "model.kept.append(request)\n"
BATCHED = "max_batch_size: 8 dynamic_batching { }"
ONE_BY_ONE = "max_batch_size: 1"
Told = tuple[str, int | str | None, bool]
"""Id, the output, the error or nothing, and whether it is the last answer."""


@asynccontextmanager
async def served(root: Path, config: str = BATCHED, settings: Settings | None = None) -> AsyncIterator[Served]:
    open_puppet.write(root, config)
    allowing = settings or Settings(paths=(root,), allow_python_models=True)
    async with serving(root, settings=allowing) as started:
        yield started


def asking(code: str, request_id: str = "", **parameters: bool | int) -> pb.ModelInferRequest:
    """A request by which the model runs `code`."""
    request = infer("m", {"x": np.array([[1]], np.int64)})
    request.id = request_id
    request.parameters["run"].string_param = code
    for key, value in parameters.items():
        kind = "bool_param" if isinstance(value, bool) else "int64_param"
        setattr(request.parameters[key], kind, value)
    return request


def told(message: pb.ModelStreamInferResponse) -> Told:
    response = message.infer_response
    last = response.parameters[FINAL].bool_param
    if message.error_message:
        assert response.parameters["paceline_status"].string_param
        return response.id, message.error_message, last
    output = int(np.frombuffer(response.raw_output_contents[0], np.int64)[0]) if response.outputs else None
    return response.id, output, last


async def rest(stream: Stream) -> list[Told]:
    """All answers until the stream ends; no more is sent."""
    await stream.end()
    answers: list[Told] = []
    while isinstance(message := await asyncio.wait_for(stream.call.read(), 20), pb.ModelStreamInferResponse):
        answers.append(told(message))
    return answers


async def one(served: Served, code: str) -> int | str | None:
    """The one answer to a request on a stream of its own."""
    stream = Stream(served)
    await stream.send(asking(code))
    (answer,) = await rest(stream)
    return answer[1]


async def answers_with_one(served: Served) -> bool:
    return await one(served, "send(1, True)") == 1


async def settled(served: Served) -> pb.ModelStatistics:
    """The statistics, once no request is open any more."""
    model = served.server.repository.get("m", "")
    assert model.open_requests is not None
    await eventually_async(lambda: not len(model.open_requests), "no request is open")
    reply = await served.stub.ModelStatistics(pb.ModelStatisticsRequest(name="m"), timeout=20)
    return reply.model_stats[0]


def counts(statistics: pb.ModelStatistics) -> tuple[int, int]:
    return statistics.inference_stats.success.count, statistics.inference_stats.fail.count


@pytest.mark.usefixtures("frontends")
async def test_unary_request_is_refused_whatever_it_has(tmp_path: Path) -> None:
    text = "ModelInfer RPC doesn't support models with decoupled transaction policy"
    async with served(tmp_path) as started:
        for request in (asking("request.end()"), infer("m", {"no": np.zeros(3, np.int8)})):
            assert await failure_of(started.infer(request)) == (grpc.StatusCode.UNIMPLEMENTED, text)


@pytest.mark.parametrize(
    ("code", "expected", "and_if_asked"),
    [
        (COUNT + "request.end()", [0, 1, 2], True),
        (COUNT + "send(9, True)", [0, 1, 2, 9], False),
        ("request.end()", [], True),
        ("send(9, True)", [9], False),
    ],
)
@pytest.mark.usefixtures("frontends")
async def test_last_answer_says_so_or_an_empty_one_if_asked(
    tmp_path: Path, code: str, expected: Sequence[int], and_if_asked: bool
) -> None:
    async with served(tmp_path) as started:
        stream = Stream(started)
        await stream.send(asking(code, "plain"), asking(code, "asks", **{EMPTY_FINAL: True}))
        answers = await rest(stream)
        last = len(expected) - 1 if not and_if_asked else -1
        outputs = [(number, place == last) for place, number in enumerate(expected)]
        assert [answer[1:] for answer in answers if answer[0] == "plain"] == outputs
        assert [answer[1:] for answer in answers if answer[0] == "asks"] == outputs + [(None, True)] * and_if_asked
        assert counts(await settled(started)) == (2, 0)


async def test_empty_final_answer_names_what_was_asked(tmp_path: Path) -> None:
    async with served(tmp_path) as started:
        for version in ("", "1"):
            request = asking("request.end()", "an id", **{EMPTY_FINAL: True})
            request.model_version = version
            stream = Stream(started)
            await stream.send(request)
            response = (await stream.message()).infer_response
            assert (response.id, response.model_name, response.model_version) == ("an id", "m", version)
            assert not response.outputs


@pytest.mark.usefixtures("frontends")
async def test_errors_are_answers_and_end_only_if_told_to(tmp_path: Path) -> None:
    code = "request.fail('first', end=False)\nsend(1)\nrequest.fail('second')"
    async with served(tmp_path) as started:
        stream = Stream(started)
        await stream.send(asking(code, "a"))
        assert await rest(stream) == [
            ("a", "model 'm': first", False), ("a", 1, False), ("a", "model 'm': second", True),
        ]  # fmt: skip
        statistics = await settled(started)
        assert counts(statistics) == (0, 1)
        assert await started.metric("nv_inference_first_response_histogram_ms_count") == 1
        assert await started.metric("paceline_open_requests") == 0
        answers = statistics.response_stats
        assert {key: (value.success.count, value.fail.count) for key, value in answers.items()} == {
            "0": (0, 1), "1": (1, 0), "2": (0, 1),
        }  # fmt: skip


@pytest.mark.parametrize("last", [False, True])
async def test_answer_that_cannot_be_made_counts_as_failed(tmp_path: Path, last: bool) -> None:
    settings = Settings(paths=(tmp_path,), allow_python_models=True, allow_client_shm=True)
    with shared_object(4096) as memory:
        async with served(tmp_path, settings=settings) as started:
            await register(started, "r", memory.key, 4096)
            request = asking(f"send(1)\nrequest.send({{'y': [[2, 3]]}}, {last})\nmodel.kept.append(request)")
            del request.outputs[:]
            request_shared_output(request, "y", "r", 8)
            stream = Stream(started)
            await stream.send(request)
            assert not (await stream.message()).error_message
            assert "at least 16 bytes" in (await stream.message()).error_message
            statistics = await settled(started)
            assert counts(statistics) == (0, 1)
            stats = statistics.response_stats
            made = {key: (one.success.count, one.fail.count) for key, one in stats.items()}
            assert made == {"0": (1, 0), "1": (0, 1)}


async def test_first_error_ends_a_stream_that_wants_it(tmp_path: Path) -> None:
    async with served(tmp_path) as started:
        stream = Stream(started, metadata=[("triton_grpc_error", "true")])
        await stream.send(asking(KEEP), asking("send(1)\nrequest.fail('no', end=False)\nmodel.kept.append(request)"))
        assert told(await stream.message()) == ("", 1, False)
        assert await stream.status() == (grpc.StatusCode.INTERNAL, "model 'm': no")
        await eventually_awaited(lambda: all_cancelled(started), "the model is told of both")
        assert counts(await settled(started))[1] == 2


async def all_cancelled(started: Served) -> bool:
    """Whether the model knows of all requests that it has kept that they are cancelled."""
    return await one(started, "send(int(all(kept.cancelled for kept in model.kept)), True)") == 1


async def test_bad_request_is_an_error_of_its_own(tmp_path: Path) -> None:
    async with served(tmp_path) as started:
        stream = Stream(started)
        await stream.send(infer("m", {"x": np.zeros((1, 1), np.float32)}), asking("send(1, True)", "good"))
        bad, good = sorted(await rest(stream), key=lambda answer: answer[0])
        assert good == ("good", 1, True)
        assert "expected datatype INT64, got 'FP32'" in str(bad[1])
        assert bad[2]


async def test_answers_of_several_requests_leave_as_they_come(tmp_path: Path) -> None:
    async with served(tmp_path, ONE_BY_ONE) as started:
        stream = Stream(started)
        await stream.send(asking(KEEP, "kept"), asking("send(1, True)", "quick"))
        assert told(await stream.message()) == ("quick", 1, True)
        await stream.send(asking("model.kept.pop().send({'y': [[2]]}, True)\nsend(3, True)", "other"))
        assert {*await rest(stream)} == {("kept", 2, True), ("other", 3, True)}


async def test_decoupled_requests_do_not_hold_others_back(tmp_path: Path) -> None:
    ordinary = tmp_path / "o"
    (ordinary / "1").mkdir(parents=True)
    (ordinary / "1" / "model.py").write_text(
        'class Model:\n    inputs = outputs = {"x": ("INT64", [-1, 1])}\n    def execute(self, inputs): return inputs\n'
    )
    async with served(tmp_path) as started:
        stream = Stream(started)
        request = infer("o", {"x": np.array([[5]], np.int64)})
        await stream.send(asking(KEEP, "kept"), request)
        assert told(await stream.message()) == ("", 5, True)
        stream.call.cancel()
        await settled(started)


async def test_requests_of_one_batch_are_handed_over_together(tmp_path: Path) -> None:
    config = "max_batch_size: 3 dynamic_batching { max_queue_delay_microseconds: 100000000 }"
    async with served(tmp_path, config) as started:
        stream = Stream(started)
        await stream.send(*[asking("send(model.batch, True)", paceline_batch_info=True) for _ in range(3)])
        assert await rest(stream) == [("", 3, True)] * 3
        statistics = started.server.repository.get("m", "").statistics
        # Requests may end before the execution that they are in.
        await eventually_async(lambda: statistics.execution_count, "the execution has ended")
        assert [*statistics.by_rows()] == [3]
        assert statistics.queue.count == 3


@pytest.mark.parametrize("how", ["parameter", "stream", "channel"])
@pytest.mark.usefixtures("frontends")
async def test_cancelling_is_told_to_the_model_while_it_executes(tmp_path: Path, how: str) -> None:
    async with (
        served(tmp_path, ONE_BY_ONE) as started,
        grpc.aio.insecure_channel(started.target) as channel,
    ):
        stream = Stream(Served(started.server, channel, None))
        await stream.send(asking(ENDLESS, "endless"))
        assert told(await stream.message()) == ("endless", 1, False)
        if how == "parameter":
            cancelling = pb.InferParameter(bool_param=True)
            await stream.send(pb.ModelInferRequest(id="endless", parameters={"paceline_cancel": cancelling}))
            answers = await rest(stream)
            assert answers[-1] == ("endless", "the request was cancelled", True)
        elif how == "stream":
            stream.call.cancel()
        else:
            await channel.close(0)
        assert await one(started, "send(2, True)") == 2, "the model goes on with others"
        assert (await settled(started)).inference_stats.fail.count == 1


@pytest.mark.parametrize("code", [KEEP, ENDLESS])
async def test_deadline_ends_a_request_and_is_told(tmp_path: Path, code: str) -> None:
    async with served(tmp_path, ONE_BY_ONE) as started:
        for deadline_us in (200_000, 2_000_000, 15_000_000):  # later if a busy machine takes longer to begin
            stream = Stream(started)
            await stream.send(asking("send(1)\n" + code, "late", paceline_deadline_us=deadline_us))
            *answers, last = await rest(stream)
            if ("late", 1, False) in answers:
                break
        assert ("late", 1, False) in answers
        assert last == ("late", "model 'm': Deadline Exceeded: the model hasn't sent its last answer", True)
        await eventually_awaited(lambda: all_cancelled(started), "the model is told")
        await settled(started)


@pytest.mark.usefixtures("frontends")
async def test_slow_reader_bounds_what_is_held(tmp_path: Path) -> None:
    code = """
numpy = __import__("numpy")
def run(sent=0):
    while not request.cancelled:
        request.send({"y": numpy.zeros((1, 2**14), "int64")})
        model.sent = sent = sent + 1
thread(run)
"""
    async with served(tmp_path) as started:
        stream = Stream(started)
        await stream.send(asking(code))
        await stream.message()
        sent = -1

        async def stands() -> bool:
            nonlocal sent
            before, sent = sent, int(await one(started, "send(model.sent, True)") or 0)
            return sent == before

        await eventually_awaited(stands, "the model waits")
        assert sent < 200, "of 128 KiB: 1 MiB here, and what gRPC and the kernel hold"
        stream.call.cancel()
        await settled(started)


@pytest.mark.usefixtures("frontends")
async def test_process_killed_between_answers_fails_what_is_open(tmp_path: Path) -> None:
    async with served(tmp_path) as started:
        pid = await one(started, "send(os.getpid(), True)")
        assert isinstance(pid, int)
        stream = Stream(started)
        await stream.send(*[asking(f"send(1)\n{KEEP}", str(number)) for number in range(20)])
        assert [told(await stream.message())[1:] for _ in range(20)] == [(1, False)] * 20
        os.kill(pid, signal.SIGKILL)
        answers = await rest(stream)
        # The last ones' execution may not have ended yet.
        killed = "model 'm': the model's process was killed by SIGKILL"
        assert all(str(answer[1]).startswith(killed) and answer[2] for answer in answers)
        assert Counter(answer[0] for answer in answers) == {str(number): 1 for number in range(20)}
        assert await one(started, "send(1, True)") == 1
        assert counts(await settled(started)) == (2, 20)


async def test_hanging_execution_fails_its_requests_and_those_kept(tmp_path: Path) -> None:
    config = 'max_batch_size: 8 parameters { key: "paceline.execution_timeout_ms" value { string_value: "300" } }'
    async with served(tmp_path, config) as started:
        for _ in range(20):  # again if a busy machine takes as long as a hang to get there
            stream = Stream(started)
            await stream.send(asking(KEEP, "kept"), asking("send(1)\nthreading.Event().wait()", "hangs"))
            answers = await rest(stream)
            assert {answer[0] for answer in answers if answer[2]} == {"kept", "hangs"}
            if ("hangs", 1, False) in answers:
                break
        assert ("hangs", 1, False) in answers
        await eventually_awaited(lambda: answers_with_one(started), "another process")
        await settled(started)


async def test_unload_waits_for_open_requests(tmp_path: Path) -> None:
    async with served(tmp_path, settings=explicit(tmp_path, allow_python_models=True)) as started:
        await started.stub.RepositoryModelLoad(pb.RepositoryModelLoadRequest(model_name="m"), timeout=20)
        stream = Stream(started)
        go = tmp_path / "go"
        waiting = f"while not pathlib.Path({str(go)!r}).exists(): pass"
        code = f"def run():\n    {waiting}\n    send(2, True)\nthread(run)\nsend(1)"
        await stream.send(asking(code))
        assert told(await stream.message()) == ("", 1, False)
        model = started.server.repository.get("m", "")
        await unload(started, "m")
        assert (await failure_of(started.stub.ModelMetadata(pb.ModelMetadataRequest(name="m"))))[0]
        go.touch()
        assert told(await stream.message()) == ("", 2, True)
        await eventually_async(lambda: not model.open_requests, "nothing is open")


async def test_stop_ends_what_stays_open(tmp_path: Path) -> None:
    async with served(tmp_path) as started:
        stream = Stream(started)
        await stream.send(asking(f"send(1)\n{KEEP}"))
        assert told(await stream.message()) == ("", 1, False)
        await started.server.stop(0)
        text = "model 'm': the model is being unloaded or the server is stopping"
        assert told(await stream.message()) == ("", text, True)


async def test_hundreds_of_requests_get_all_their_answers(tmp_path: Path) -> None:
    code = "thread(lambda: (send(int(request.id)), request.send({'y': [[1]]}), request.end()))"
    async with served(tmp_path) as started:
        streams = [Stream(started) for _ in range(3)]
        for number, stream in enumerate(streams):
            await stream.send(*[asking(code, str(1000 * number + one)) for one in range(100)])
        for number, stream in enumerate(streams):
            answers = await rest(stream)
            assert len(answers) == 200
            for one in range(100):
                request_id = str(1000 * number + one)
                assert [answer[1] for answer in answers if answer[0] == request_id] == [int(request_id), 1]
        assert counts(await settled(started)) == (300, 0)


async def test_more_open_requests_than_allowed_are_refused(tmp_path: Path) -> None:
    config = 'max_batch_size: 8 parameters { key: "paceline.max_open_requests" value { string_value: "2" } }'
    async with served(tmp_path, config) as started:
        stream = Stream(started)
        await stream.send(*[asking(f"send(1)\n{KEEP}") for _ in range(2)])
        assert [told(await stream.message())[1] for _ in range(2)] == [1, 1]
        await stream.send(asking("request.end()", "third"))
        text = "Exceeds maximum queue size of 2 requests that haven't ended (paceline.max_open_requests)"
        assert told(await stream.message()) == ("third", f"model 'm': {text}", True)
        stream.call.cancel()
        await settled(started)
        assert await one(started, "send(4, True)") == 4


async def test_configuration_says_that_the_model_is_decoupled(tmp_path: Path) -> None:
    async with served(tmp_path) as started:
        config = (await started.stub.ModelConfig(pb.ModelConfigRequest(name="m"), timeout=20)).config
        assert config.model_transaction_policy.decoupled
        assert config.backend == "python"


async def test_unread_answers_keep_no_shared_memory(tmp_path: Path) -> None:
    settings = Settings(paths=(tmp_path,), allow_python_models=True, allow_client_shm=True)
    with shared_object(4096) as memory:
        async with served(tmp_path, settings=settings) as started:
            own, _ = held_by(key=memory.key)
            await register(started, "r", memory.key, 4096)
            # Ids fill what gRPC takes for a client that reads nothing, so that answers wait here.
            request = asking("for n in range(14): send(n)\nrequest.end()", "x" * 500_000)
            del request.outputs[:]
            request_shared_output(request, "y", "r", 8)
            stream = Stream(started)
            await stream.send(request)
            await eventually_awaited(lambda: _ended(started), "the request has ended")
            await started.stub.SystemSharedMemoryUnregister(
                pb.SystemSharedMemoryUnregisterRequest(name="r"), timeout=20
            )
            await eventually_async(lambda: held_by(key=memory.key)[0] == own, "the region is closed", timeout_s=5)
            stream.call.cancel()


async def _ended(started: Served) -> bool:
    return counts(await settled(started)) == (1, 0)
