"""Which inferences share a request, without a server."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import grpc
import numpy as np

from paceline.clients import coalescing
from paceline.clients.coalescing import Coalescer
from paceline.clients.errors import DeadlineExceeded
from paceline.clients.messages import InferResult, infer_request, infer_result
from paceline.protos import inference_pb2 as pb
from tests.unit.clients.peer import echo

TraceFunction = Callable[[FrameType, str, Any], Any]


async def test_coalesced_requests_are_no_larger_than_a_message_may_be() -> None:
    sizes_bytes = []

    async def send(request: pb.ModelInferRequest, timeout_s: float | None) -> InferResult:
        sizes_bytes.append(sum(map(len, request.raw_input_contents)))
        context: Any = None
        return infer_result(echo(request, context))

    coalescer = Coalescer(send, 32, most_bytes=100)
    rows = [np.full((1, 10), number, np.float32) for number in range(7)]
    results = await asyncio.gather(*(coalescer.infer(infer_request("m", {"x": row}), 30.0) for row in rows))
    assert [result["x"].tolist() for result in results] == [row.tolist() for row in rows]
    assert sizes_bytes == [80, 80, 80, 40]
    larger = np.zeros((1, 40), np.float32)
    assert (await coalescer.infer(infer_request("m", {"x": larger}), 30.0))["x"].shape == larger.shape


async def lines_run(callers: int) -> int:
    """How many lines of the module run for so many callers at a time, in requests of two."""
    lines = 0

    async def send(request: pb.ModelInferRequest, timeout_s: float | None) -> InferResult:
        context: Any = None
        return infer_result(echo(request, context))

    def count(frame: FrameType, event: str, argument: object) -> TraceFunction | None:
        nonlocal lines
        lines += event == "line"
        return count if frame.f_code.co_filename == coalescing.__file__ else None

    coalescer, before = Coalescer(send, 2), sys.gettrace()
    sys.settrace(count)
    try:
        await asyncio.gather(*(coalescer.infer(one_row(number), None) for number in range(callers)))
    finally:
        sys.settrace(before)
    return lines


async def test_each_caller_costs_the_same_however_many_there_are() -> None:
    assert await lines_run(1000) < 1.1 * 10 * await lines_run(100)


def rows_of(request: pb.ModelInferRequest) -> int:
    return int(request.inputs[0].shape[0])


def one_row(number: int) -> pb.ModelInferRequest:
    return infer_request("m", {"x": np.full((1, 10), number, np.float32)})


async def test_rows_that_are_too_late_together_are_sent_in_smaller_requests() -> None:
    sent: list[int] = []

    async def send(request: pb.ModelInferRequest, timeout_s: float | None) -> InferResult:
        sent.append(rows_of(request))
        if rows_of(request) > 2:
            raise DeadlineExceeded(grpc.StatusCode.DEADLINE_EXCEEDED, "the deadline can't be met")
        context: Any = None
        return infer_result(echo(request, context))

    coalescer = Coalescer(send, 32)
    results = await asyncio.gather(*(coalescer.infer(one_row(number), 30.0) for number in range(8)))
    assert [result["x"][0, 0] for result in results] == list(range(8))
    assert sent[:3] == [8, 4, 2]
    assert len(sent) < 2 * 8
    assert sum(rows for rows in sent if rows <= 2) == 8, "nobody was asked for twice"


async def test_rows_that_expired_in_the_servers_queue_are_not_sent_again() -> None:
    sent: list[int] = []

    async def send(request: pb.ModelInferRequest, timeout_s: float | None) -> InferResult:
        sent.append(rows_of(request))
        text = "model 'm': Request timeout expired after 100000 us in the queue"
        raise DeadlineExceeded(grpc.StatusCode.DEADLINE_EXCEEDED, text)

    coalescer = Coalescer(send, 32)
    asking = [coalescer.infer(one_row(number), 30.0) for number in range(8)]
    outcomes = await asyncio.gather(*asking, return_exceptions=True)
    assert {type(outcome) for outcome in outcomes} == {DeadlineExceeded}
    assert len({id(outcome) for outcome in outcomes}) == 8
    assert sent == [8]


async def test_row_that_is_too_late_by_itself_fails_alone() -> None:
    async def send(request: pb.ModelInferRequest, timeout_s: float | None) -> InferResult:
        if 3 in np.frombuffer(request.raw_input_contents[0], np.float32):
            raise DeadlineExceeded(grpc.StatusCode.DEADLINE_EXCEEDED, "the deadline can't be met")
        context: Any = None
        return infer_result(echo(request, context))

    coalescer = Coalescer(send, 32)
    asking = [coalescer.infer(one_row(number), 30.0) for number in range(8)]
    outcomes = await asyncio.gather(*asking, return_exceptions=True)
    assert [isinstance(outcome, DeadlineExceeded) for outcome in outcomes] == [number == 3 for number in range(8)]


async def test_next_requests_are_smaller_after_all_callers_of_one_timed_out() -> None:
    sent: list[int] = []

    async def send(request: pb.ModelInferRequest, timeout_s: float | None) -> InferResult:
        sent.append(rows_of(request))
        if rows_of(request) > 4:
            await asyncio.Event().wait()
        context: Any = None
        return infer_result(echo(request, context))

    coalescer = Coalescer(send, 32)
    asking = [coalescer.infer(one_row(number), 0.05) for number in range(8)]
    assert {type(one) for one in await asyncio.gather(*asking, return_exceptions=True)} == {DeadlineExceeded}
    results = await asyncio.gather(*(coalescer.infer(one_row(number), 30.0) for number in range(8)))
    assert [result["x"][0, 0] for result in results] == list(range(8))
    assert sent == [8, 4, 4]
