"""Requests given up between their arrival and the moment when the batcher starts them: counted once, and never
executed. Without gRPC in front, since only one iteration of the event loop is between the two."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from grpc.aio import EOF  # type: ignore[attr-defined]

from paceline.backends.batching import Packed
from paceline.protos import inference_pb2 as pb
from paceline.server.codec.wire_request import RequestReader
from paceline.server.errors import ModelNotFound
from paceline.server.requests.in_flight import Call
from tests.integration.scripted import Script, mark_of, request, totals
from tests.integration.serving import serving
from tests.integration.without_grpc import Context, called
from tests.polling import eventually_async

TEXT = "max_batch_size: 32 dynamic_batching { }"


@pytest.fixture
def script() -> Script:
    return Script()


class Endless(Context):
    """A stream that stays open after its last request."""

    async def read(self) -> Any:
        request = await super().read()
        if request is EOF:
            await asyncio.Event().wait()
        return request


def _alive(kind: type) -> int:
    return sum(isinstance(one, kind) for one in gc.get_objects())


async def test_call_cancelled_before_it_is_started_is_counted_once_and_not_executed(
    tmp_path: Path, script: Script
) -> None:
    async with serving(tmp_path, {"m": script.model}, config=TEXT) as served:
        call = asyncio.create_task(called(served.server.inference, request(1)))
        await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert mark_of(await served.infer(request(2))) == 2
        assert script.seen == [[2.0]]
        assert totals(await served.metrics()) == {"success": 1, "CANCELED": 1, "REJECTED": 0, "BACKEND": 0, "OTHER": 0}
        assert await served.metric("nv_inference_pending_request_count") == 0


async def test_call_cancelled_in_the_queue_leaves_it_at_once(tmp_path: Path, script: Script) -> None:
    async with serving(tmp_path, {"m": script.model}, config=TEXT) as served:
        gate = script.hold(1)
        first = asyncio.create_task(served.infer(request(1)))
        await asyncio.to_thread(gate.wait_entered, 1)
        call = asyncio.create_task(called(served.server.inference, request(2)))
        await asyncio.sleep(0)
        assert served.waiting("m") == 1
        call.cancel()
        assert served.waiting("m") == 0
        gate.open()
        assert mark_of(await first) == 1
        assert script.seen == [[1.0]]
        counted = totals(await served.metrics())
        assert (counted["success"], counted["CANCELED"], sum(counted.values())) == (1, 1, 2)


async def test_call_refused_when_it_is_started_leaves_nothing_behind(tmp_path: Path, script: Script) -> None:
    async with serving(tmp_path, {"m": script.model}, config=TEXT) as served:
        gc.disable()
        try:
            refused = request(1, 100)
            with pytest.raises(Exception, match="expected a batch of 1 to 32 rows") as raised:
                await called(served.server.inference, refused)
            left = weakref.ref(raised.value)
            del raised
            assert left() is None
        finally:
            gc.enable()
        with pytest.raises(ModelNotFound):
            await called(served.server.inference, request(1, model="nosuch"))


async def test_stream_request_withdrawn_before_it_is_started_is_answered_cancelled(
    tmp_path: Path, script: Script
) -> None:
    async with serving(tmp_path, {"m": script.model}, config=TEXT) as served:
        first, second = request(1), request(2)
        first.id, second.id = "one", "two"
        taken_back = pb.ModelInferRequest(id="one")
        taken_back.parameters["paceline_cancel"].bool_param = True
        context = Context([first, second, taken_back])
        await served.server._streaming.ModelStreamInfer(None, context)
        statuses = [one.infer_response.parameters["paceline_status"].string_param for one in context.written]
        assert statuses == ["CANCELLED", ""]
        assert [one.infer_response.id for one in context.written] == ["one", "two"]
        assert script.seen == [[2.0]]
        counted = totals(await served.metrics())
        assert (counted["success"], counted["CANCELED"], sum(counted.values())) == (1, 1, 2)


async def test_ended_streams_unstarted_requests_are_counted_and_not_executed(
    tmp_path: Path, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.scheduler.turns._FORGOTTEN_NS", 100 * 10**9)
    async with serving(tmp_path, {"m": script.model}, config=TEXT) as served:
        # So that the batcher waits for more requests.
        await served.server._streaming.ModelStreamInfer(None, Context(map(request, range(8))))
        context = Context(map(request, range(3)))
        stream = asyncio.create_task(served.server._streaming.ModelStreamInfer(None, context))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        stream.cancel()
        with pytest.raises(asyncio.CancelledError):
            await stream
        assert mark_of(await served.infer(request(9))) == 9
        counted = totals(await served.metrics())
        assert (counted["success"], counted["CANCELED"], sum(counted.values())) == (9, 3, 12)
        assert script.seen == [[float(mark) for mark in range(8)], [9.0]]
        assert context.written == []


@pytest.mark.parametrize("end", ["unload", "stop"])
async def test_requests_that_arrived_before_an_unload_or_a_stop_are_answered(
    tmp_path: Path, script: Script, end: str
) -> None:
    async with serving(tmp_path, {"m": script.model}, config=TEXT) as served:
        # So that the batcher waits for more requests.
        await served.server._streaming.ModelStreamInfer(None, Context(map(request, range(8))))
        calls = [asyncio.create_task(called(served.server.inference, request(mark))) for mark in range(3)]
        await asyncio.sleep(0)
        if end == "unload":
            await served.server.repository.unload("m")
        else:
            assert await served.server.stop(5)
        for mark, call in enumerate(calls):
            answer = await call
            assert mark_of(answer) == mark


async def test_refused_request_whose_caller_has_gone_keeps_no_other_call_alive(tmp_path: Path, script: Script) -> None:
    async with serving(tmp_path, {"m": script.model}, config=TEXT) as served:
        # So that the batcher waits for more requests.
        await served.server._streaming.ModelStreamInfer(None, Context(map(request, range(8))))
        gc.collect()
        gc.disable()
        others = _alive(Call)
        try:
            calls = [asyncio.create_task(called(served.server.inference, request(mark))) for mark in range(3)]
            refused = asyncio.create_task(called(served.server.inference, request(9, 100)))
            await asyncio.sleep(0)
            refused.cancel()
            await asyncio.wait([*calls, refused])
            assert refused.cancelled()
            assert [mark_of(call.result()) for call in calls] == [0, 1, 2]
            del calls, refused
            assert _alive(Call) == others
        finally:
            gc.enable()
        assert totals(await served.metrics())["success"] == 11


async def test_stream_cancelled_while_answers_wait_their_turn_counts_all_requests_as_cancelled(
    tmp_path: Path, script: Script
) -> None:
    text = "max_batch_size: 1 dynamic_batching { preserve_ordering: true } instance_group [ { count: 2 } ]"
    async with serving(tmp_path, {"m": script.model}, config=text) as served:
        gate = script.hold(0)
        requests = [request(mark) for mark in range(6)]
        for one in requests:
            one.parameters["paceline_unordered"].bool_param = True
        context = Endless(requests)
        stream = asyncio.create_task(served.server._streaming.ModelStreamInfer(None, context))
        await eventually_async(lambda: len(script.seen) == 6, "all but the first are executed")
        waiting = served.server.repository.get("m", "").batcher._answers._waiting
        await eventually_async(lambda: sum(map(bool, waiting.values())) == 5, "and wait for it")
        stream.cancel()
        with pytest.raises(asyncio.CancelledError):
            await stream
        gate.open()
        assert mark_of(await served.infer(request(7))) == 7
        counted = totals(await served.metrics())
        assert (counted["success"], counted["CANCELED"], sum(counted.values())) == (1, 6, 7)
        assert context.written == []


async def test_tensors_are_released_though_nobody_reads_the_answers(tmp_path: Path, script: Script) -> None:
    class Deaf(Endless):
        async def write(self, message: Any) -> None:
            await asyncio.Event().wait()

    gc.collect()
    others = _alive(Packed)
    async with serving(tmp_path, {"m": script.model}, config=TEXT) as served:
        stream = asyncio.create_task(served.server._streaming.ModelStreamInfer(None, Deaf(map(request, range(8)))))
        await eventually_async(lambda: sum(map(len, script.seen)) == 8, "all are executed")
        await eventually_async(lambda: _alive(Packed) == others, "answers are made")
        stream.cancel()
        with pytest.raises(asyncio.CancelledError):
            await stream


async def test_answer_counts_as_success_though_its_stream_ends_before_it_is_written(
    tmp_path: Path, script: Script
) -> None:
    class Slow(Context):
        """A stream whose reader takes one answer and no more."""

        def __init__(self, requests: Iterable[Any]) -> None:
            super().__init__(requests)
            self.full = asyncio.Event()

        async def write(self, message: Any) -> None:
            await super().write(message)
            self.full.set()
            await asyncio.Event().wait()

    async with serving(tmp_path, {"m": script.model}, config=TEXT) as served:
        read = RequestReader()
        for _ in range(2):
            read(request(0).SerializeToString())
        context = Slow([read(request(mark).SerializeToString()) for mark in range(5)])
        stream = asyncio.create_task(served.server._streaming.ModelStreamInfer(None, context))
        await context.full.wait()
        stream.cancel()
        with pytest.raises(asyncio.CancelledError):
            await stream
        assert len(context.written) == 1
        counted = totals(await served.metrics())
        assert (counted["success"], sum(counted.values())) == (5, 5)


async def test_cancelled_stream_leaves_nothing_to_the_garbage_collector(tmp_path: Path, script: Script) -> None:
    gate = script.hold(1)
    async with serving(tmp_path, {"m": script.model}, config=TEXT) as served:
        context = Endless([request(1), request(2)])
        gone = weakref.ref(context)
        gc.disable()
        try:
            call = asyncio.create_task(served.server._streaming.ModelStreamInfer(None, context))
            del context
            await asyncio.to_thread(gate.wait_entered, 1)
            call.cancel()
            await asyncio.wait([call])
            del call
            gate.open()
            await eventually_async(lambda: gone() is None, "all that a stream has gone")
        finally:
            gc.enable()
