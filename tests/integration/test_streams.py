"""`ModelStreamInfer`: answers in order, errors among them, and how a stream ends."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import grpc
import pytest
from google.protobuf.message import DecodeError

from paceline.protos import inference_pb2 as pb
from tests.integration.scripted import Script, busy, mark_of, marked, own, request, totals
from tests.integration.serving import Served, serving, write_model
from tests.integration.streams import Stream, outcome_of
from tests.polling import eventually_async
from tests.wire import infer

Code = grpc.StatusCode
MERGE = "max_batch_size: 4 dynamic_batching { }"
ONE_BY_ONE = "max_batch_size: 1 dynamic_batching { } instance_group { count: 8 }"
BAD = infer("m", {"a": marked(7)}, id="bad", outputs=["nope"])
BAD_TEXT = "unexpected inference output 'nope' for model 'm': expected some of ['x']"
ENDED = (grpc.aio.AioRpcError, asyncio.InvalidStateError)
"""What gRPC raises on sending to a stream whose deadline has passed, or reading from it."""
try:
    pb.ModelInferRequest.FromString(b"\xff")
except DecodeError as error:
    NO_MESSAGE = str(error)


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
async def served(tmp_path: Path, script: Script) -> AsyncIterator[Served]:
    async with serving(tmp_path, {"m": script.model}, config=MERGE) as served:
        yield served
        assert mark_of(await served.infer(request(999))) == 999
        assert await served.metric("nv_inference_pending_request_count") == 0


@pytest.fixture
async def overtaking(tmp_path: Path, script: Script) -> AsyncIterator[Served]:
    """Eight instances that execute one request each."""
    async with serving(tmp_path, {"m": script.model}, config=ONE_BY_ONE) as served:
        yield served


# ---- Answers ---------------------------------------------------------------------------------------------------------


async def test_stream_answers_each_request_like_a_unary_call(served: Served) -> None:
    one = infer("m", {"a": marked(3, 2)}, id="grün/7", outputs=["x"], parameters={"binary_data_output": False})
    alone = await served.infer(one)
    stream = Stream(served)
    await stream.send(one)
    message = await stream.message()
    assert not message.error_message
    assert message.infer_response.parameters.pop("triton_final_response") == pb.InferParameter(bool_param=True)
    assert message.infer_response == alone
    await stream.end()
    assert (await stream.rest(), await stream.status()) == ([], (Code.OK, ""))


async def test_stream_requests_share_batches_with_other_streams_and_unary_calls(served: Served, script: Script) -> None:
    streams = [Stream(served), Stream(served)]
    async with busy(served, script):
        for number, stream in enumerate(streams):
            await stream.send(request(number))
            await eventually_async(lambda n=number: served.waiting("m") == n + 1, "the request in the queue")
        alone = asyncio.create_task(served.infer(request(2)))
        await eventually_async(lambda: served.waiting("m") == 3, "three requests waiting")
        await streams[0].send(request(3))
        await eventually_async(lambda: served.waiting("m") == 4, "four requests waiting")
    assert [await streams[0].many(2), await streams[1].many(1), mark_of(await alone)] == [[0, 3], [1], 2]
    assert script.served == [[0, 1, 2, 3]]


@pytest.mark.parametrize("seed", range(10))
async def test_stream_answers_in_the_order_of_its_requests_whichever_is_done_first(
    overtaking: Served, script: Script, seed: int
) -> None:
    dice = random.Random(seed)
    gates = {mark: script.hold(mark) for mark in range(8)}
    stream = Stream(overtaking)
    await stream.send(*(request(mark) for mark in gates))
    await eventually_async(lambda: len(script.seen) == 8, "all of them executing")
    order = dice.sample(sorted(gates), 8)
    read: list[float | tuple[str, str]] = []
    for number, mark in enumerate(order):
        gates[mark].open()
        done = set(order[: number + 1])
        # All answers before the first request still executing may leave now.
        free = next((mark for mark in range(8) if mark not in done), 8)
        read += await stream.many(free - len(read))
        assert read == list(range(free))
    await stream.end()
    assert await stream.rest() == []


async def test_stream_sends_unordered_answers_at_once(overtaking: Served, script: Script) -> None:
    gates = {mark: script.hold(mark) for mark in range(4)}
    stream = Stream(overtaking)
    await stream.send(*(request(mark, paceline_unordered=mark % 2 == 1) for mark in gates))
    await eventually_async(lambda: len(script.seen) == 4, "all of them executing")
    for opened, answers in ((3, [3]), (2, []), (1, [1]), (0, [0, 2])):
        gates[opened].open()
        assert await stream.many(len(answers)) == answers
    await stream.end()
    assert await stream.rest() == []


async def test_stream_sends_unordered_errors_at_once(overtaking: Served, script: Script) -> None:
    gate = script.hold(0)
    stream = Stream(overtaking)
    await stream.send(request(0), request(1, model="nope", paceline_unordered=True))
    assert await stream.next() == ("NOT_FOUND", "Request for unknown model: 'nope' is not found; this server has ['m']")
    gate.open()
    assert await stream.next() == 0


async def test_split_stream_request_keeps_its_place(tmp_path: Path, script: Script) -> None:
    async with serving(tmp_path, {"m": script.model}, config=MERGE + own(split_oversized=True)) as served:
        stream = Stream(served)
        await stream.send(request(1), request(2, rows=11), request(3))
        messages = [await stream.message() for _ in range(3)]
    assert [mark_of(one.infer_response) for one in messages] == [1, 2, 3]
    assert [list(one.infer_response.outputs[0].shape) for one in messages] == [[1, 2], [11, 2], [1, 2]]


async def test_stream_answers_include_batch_info_if_requested(served: Served) -> None:
    stream = Stream(served)
    await stream.send(request(1, paceline_batch_info=True))
    assert (await stream.message()).infer_response.parameters["paceline_batch_rows"].int64_param == 1


# ---- Errors ----------------------------------------------------------------------------------------------------------


async def test_stream_errors_keep_their_place_and_leave_the_stream_open(served: Served, script: Script) -> None:
    script.errors[5] = RuntimeError("no fives")
    stream = Stream(served)
    await stream.send(request(1), BAD, request(2), b"\xff", request(5), request(1, model="nope"), request(3))
    assert await stream.many(7) == [
        1,
        ("INVALID_ARGUMENT", BAD_TEXT),
        2,
        ("INVALID_ARGUMENT", NO_MESSAGE),
        ("INTERNAL", "model 'm': no fives"),
        ("NOT_FOUND", "Request for unknown model: 'nope' is not found; this server has ['m']"),
        3,
    ]
    await stream.end()
    assert (await stream.rest(), await stream.status()) == ([], (Code.OK, ""))


async def test_stream_error_names_its_request(served: Served) -> None:
    stream = Stream(served)
    await stream.send(BAD, infer("m", {"a": marked(7)}, id="worse", version="9"), b"\xff")
    errors = [await stream.message() for _ in range(3)]
    named = [(one.id, one.model_name, one.model_version) for one in (error.infer_response for error in errors)]
    assert named == [("bad", "m", ""), ("worse", "m", "9"), ("", "", "")]
    assert [outcome_of(errors[0]), outcome_of(errors[2])] == [
        ("INVALID_ARGUMENT", BAD_TEXT),
        ("INVALID_ARGUMENT", NO_MESSAGE),
    ]
    assert errors[1].error_message


@pytest.mark.parametrize(
    ("bad", "code", "text"),
    [(BAD, Code.INVALID_ARGUMENT, BAD_TEXT), (b"\xff", Code.INVALID_ARGUMENT, NO_MESSAGE)],
    ids=["request", "bytes"],
)
async def test_stream_with_triton_grpc_error_ends_at_the_first_error_with_its_status(
    served: Served, script: Script, bad: pb.ModelInferRequest | bytes, code: Code, text: str
) -> None:
    stream = Stream(served, metadata=[("triton_grpc_error", "true")])
    gate = script.hold(2)
    await stream.send(request(1), bad, request(2))
    assert await stream.rest() == [1]
    assert await stream.status() == (code, text)
    gate.open()


async def test_stream_that_ends_at_an_error_cancels_its_queued_requests(served: Served, script: Script) -> None:
    stream = Stream(served, metadata=[("triton_grpc_error", "true")])
    async with busy(served, script):
        await stream.send(request(1, paceline_unordered=True), request(2, model="nope", paceline_unordered=True))
        assert await stream.rest() == []
        assert (await stream.status())[0] is Code.NOT_FOUND
        await eventually_async(lambda: served.waiting("m") == 0, "an empty queue")
    assert script.served == []


@pytest.mark.parametrize("value", ["false", "", "1"])
async def test_stream_with_another_value_of_triton_grpc_error_stays_open(served: Served, value: str) -> None:
    stream = Stream(served, metadata=[("triton_grpc_error", value)])
    await stream.send(BAD, request(1))
    assert await stream.many(2) == [("INVALID_ARGUMENT", BAD_TEXT), 1]


async def test_stream_request_refused_by_a_full_queue_fails_alone(tmp_path: Path, script: Script) -> None:
    text = "max_batch_size: 4 dynamic_batching { default_queue_policy { max_queue_size: 1 } }"
    async with serving(tmp_path, {"m": script.model}, config=text) as served:
        stream = Stream(served)
        async with busy(served, script):
            await stream.send(request(1), request(2, paceline_unordered=True))
            assert await stream.next() == ("RESOURCE_EXHAUSTED", "model 'm': Exceeds maximum queue size of 1 requests")
        assert await stream.next() == 1


# ---- Ends ------------------------------------------------------------------------------------------------------------


async def test_half_closed_stream_is_answered_completely_and_then_ends_with_ok(served: Served, script: Script) -> None:
    stream = Stream(served)
    async with busy(served, script):
        await stream.send(*(request(mark) for mark in range(6)))
        await stream.end()
        await eventually_async(lambda: served.waiting("m") == 6, "six requests waiting")
    assert await stream.rest() == list(range(6))
    assert await stream.status() == (Code.OK, "")


async def test_stream_without_requests_ends_with_ok(served: Served) -> None:
    stream = Stream(served)
    await stream.end()
    assert (await stream.rest(), await stream.status()) == ([], (Code.OK, ""))


async def test_cancelled_stream_cancels_all_its_requests_and_no_others(served: Served, script: Script) -> None:
    mine, other = Stream(served), Stream(served)
    async with busy(served, script):
        await other.send(request(100))
        await mine.send(*(request(mark, paceline_unordered=mark % 2 == 0) for mark in range(10)))
        await eventually_async(lambda: served.waiting("m") == 11, "eleven requests waiting")
        mine.call.cancel()
        await eventually_async(lambda: served.waiting("m") == 1, "one request waiting")
    assert await other.next() == 100
    assert script.served == [[100]]
    counted = totals(await served.metrics())
    assert (counted["success"], counted["CANCELED"]) == (2, 10)


async def test_cancelled_stream_request_leaves_the_queue_and_is_reported_in_its_place(
    served: Served, script: Script
) -> None:
    def named(mark: float, name: str, **parameters: object) -> pb.ModelInferRequest:
        return infer("m", {"a": marked(mark)}, id=name, parameters=parameters)

    cancelled = ("CANCELLED", "the request was cancelled")
    stream = Stream(served)
    async with busy(served, script):
        await stream.send(named(1, "a"), named(2, "b"), named(3, "c", paceline_unordered=True), named(4, "d"))
        await eventually_async(lambda: served.waiting("m") == 4, "four requests waiting")
        for name in ("b", "c", "nope"):
            await stream.send(infer(id=name, parameters={"paceline_cancel": True}))
        assert await stream.next() == cancelled
        await eventually_async(lambda: served.waiting("m") == 2, "two requests waiting")
        await stream.end()
    assert await stream.rest() == [1, cancelled, 4]
    assert await stream.status() == (Code.OK, "")
    assert script.served == [[1, 4]]
    assert totals(await served.metrics())["CANCELED"] == 2


async def test_cancelled_stream_cancels_all_parts_of_a_split_request(tmp_path: Path, script: Script) -> None:
    async with serving(tmp_path, {"m": script.model}, config=MERGE + own(split_oversized=True)) as served:
        stream = Stream(served)
        async with busy(served, script):
            await stream.send(request(1, rows=40))
            await eventually_async(lambda: served.waiting("m") == 10, "ten parts waiting")
            stream.call.cancel()
            await eventually_async(lambda: served.waiting("m") == 0, "an empty queue")
    assert script.served == []


async def test_stream_deadline_applies_to_each_of_its_requests(served: Served, script: Script) -> None:
    script.model.latency = lambda rows: 0.4
    for _ in range(2):
        await served.infer(request(0))
    answers: list[float | tuple[str, str]] = []
    while not answers:  # again if a busy machine doesn't answer before the stream's own end
        await served.infer(request(0))  # only what was measured lately counts
        stream = Stream(served, timeout_s=0.3)
        with suppress(*ENDED):
            await stream.send(request(1), request(2))
            answers = await stream.many(2)
    for answer in answers:
        assert isinstance(answer, tuple)
        assert answer[0] == "DEADLINE_EXCEEDED"
        assert answer[1].startswith("model 'm': Deadline Exceeded: the deadline can't be met: ")
    script.model.latency = None
    assert all(batch == [0] for batch in script.seen)


async def test_stream_request_may_have_its_own_deadline(served: Served, script: Script) -> None:
    stream = Stream(served)
    async with busy(served, script):
        await stream.send(request(1, paceline_deadline_us=50_000, paceline_unordered=True), request(2))
        answer = await stream.next()
        assert isinstance(answer, tuple)
        assert (answer[0], "Request timeout expired" in answer[1]) == ("DEADLINE_EXCEEDED", True)
    assert await stream.next() == 2
    assert script.served == [[2]]


async def test_stream_whose_deadline_passes_cancels_its_requests(served: Served, script: Script) -> None:
    async with busy(served, script):
        sent = False
        while not sent:  # again if a busy machine takes longer to send them
            stream = Stream(served, timeout_s=0.3)
            with suppress(*ENDED):
                await stream.send(request(1), request(2))
                sent = True
        await stream.rest()
        assert (await stream.status())[0] is Code.DEADLINE_EXCEEDED
        await eventually_async(lambda: served.waiting("m") == 0, "an empty queue")
    assert script.served == []


async def test_streams_cancelled_amid_traffic_lose_no_answers_of_other_streams(served: Served, script: Script) -> None:
    script.model.latency = lambda rows: 0.001
    streams = [Stream(served) for _ in range(8)]
    for stretch in range(10):
        for number, stream in enumerate(streams):
            if stretch == 5 and number % 2:
                stream.call.cancel()
            elif stretch < 5 or number % 2 == 0:
                await stream.send(*(request(number * 1000 + stretch * 10 + each) for each in range(10)))
    for number, stream in enumerate(streams):
        if number % 2 == 0:
            await stream.end()
            assert await stream.rest() == [number * 1000 + each for each in range(100)]
    await eventually_async(lambda: served.waiting("m") == 0, "an empty queue")


async def test_stream_of_requests_for_several_models_serves_each(tmp_path: Path) -> None:
    scripts = {name: Script() for name in ("m", "n")}
    write_model(tmp_path, "n", MERGE)
    async with serving(tmp_path, {name: each.model for name, each in scripts.items()}, config=MERGE) as served:
        stream = Stream(served)
        await stream.send(request(1), request(2, model="n"), request(3))
        assert await stream.many(3) == [1, 2, 3]
    assert sorted(mark for batch in scripts["m"].served for mark in batch) == [1, 3]
    assert scripts["n"].served == [[2]]
