"""Decoupled models: any number of answers over a stream."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import grpc
import numpy as np
import pytest

from paceline.protos import inference_pb2 as pb
from paceline.server.config import Settings
from tests.integration.decoupled_serving import (
    COUNT,
    EMPTY_FINAL,
    KEEP,
    ONE_BY_ONE,
    asking,
    counts,
    one,
    rest,
    served,
    settled,
    told,
)
from tests.integration.regions import register
from tests.integration.serving import failure_of
from tests.integration.streams import Stream
from tests.polling import eventually_async, eventually_awaited
from tests.shared_objects import request_shared_output, shared_object
from tests.wire import infer


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
