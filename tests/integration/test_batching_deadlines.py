"""Callers' deadlines: a request that can't be answered in time isn't executed, and is refused at once."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from paceline.scheduler.runner import Outcome, ThreadRunner
from tests.integration.scripted import BUSY, Script, busy, mark_of, own, queued, request, send, totals
from tests.integration.serving import Served, failure_of, serving
from tests.polling import eventually_async

BOTH_WAYS = pytest.mark.usefixtures("frontends")

Code = grpc.StatusCode
MERGE = "max_batch_size: 8 dynamic_batching { }"
SLOW_S, SHORT_S = 60.0, 20.0
"""What executions are measured to take, and a shorter deadline, which passes only if the machine stands still."""


@contextmanager
def executions_take(duration_s: float) -> Iterator[None]:
    """Have the server measure `duration_s` for each execution, for which nobody has to wait then."""
    run_one = ThreadRunner._run_one

    def run_slowly(runner: ThreadRunner[Any, Any], payloads: Sequence[Any], padded_rows: int) -> Outcome[Any]:
        outcome = run_one(runner, payloads, padded_rows)
        return replace(outcome, finished_ns=outcome.started_ns + int(duration_s * 1e9))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ThreadRunner, "_run_one", run_slowly)
        yield


async def learn(served: Served, duration_s: float, rows: int = 1, times: int = 3) -> None:
    """Have the server measure `times` batches as `duration_s`; three are enough for it to refuse requests."""
    with executions_take(duration_s):
        for _ in range(times):
            await served.infer(request(BUSY, rows), timeout_s=None)


async def dropped(served: Served, reason: str) -> float:
    return await served.metric("paceline_dropped_requests", f'model="m",reason="{reason}",version="1"')


async def seen_waiting_until_its_deadline(served: Served) -> bool:
    """Send a request that is late behind the one that waits. Its deadline may pass before it arrives, if the machine is
    busy with something else: only then it may not be seen in the queue."""
    (call,) = send(served, request(2), timeout_s=0.5)
    await eventually_async(lambda: call.done() or served.waiting("m") == 2, "the request in the queue")
    seen = served.waiting("m") == 2
    assert (await failure_of(call))[0] is Code.DEADLINE_EXCEEDED
    await eventually_async(lambda: served.waiting("m") == 1, "the late one gone")
    return seen


@BOTH_WAYS
async def test_request_whose_deadline_passes_in_the_queue_is_never_executed(tmp_path: Path) -> None:
    script = Script()
    async with serving(tmp_path, {"m": script.model}, config=MERGE) as served:
        async with busy(served, script):
            (patient,) = await queued(served, [request(1)])
            tries = 1
            while not await seen_waiting_until_its_deadline(served):
                tries += 1
                assert tries < 50
        assert mark_of(await patient) == 1
        counted = totals(await served.metrics())
        assert counted["success"] == 2
        assert 1 <= counted["REJECTED"] + counted["CANCELED"] <= tries
    assert script.served == [[1]]


async def test_deadline_shorter_than_a_measured_execution_is_refused_before_it_passes(tmp_path: Path) -> None:
    script = Script()
    async with serving(tmp_path, {"m": script.model}, config=MERGE) as served:
        await learn(served, SLOW_S)
        code, text = await failure_of(served.infer(request(1), timeout_s=SHORT_S))
        assert code is Code.DEADLINE_EXCEEDED
        # After the deadline, gRPC's client would have said something else.
        assert text.startswith("model 'm': Deadline Exceeded: the deadline can't be met: ")
        assert await dropped(served, "unreachable") == 1
        assert await served.metric("nv_inference_pending_request_count") == 0
    assert script.served == []


async def test_deadline_shorter_than_a_measured_execution_is_tried_without_awareness(tmp_path: Path) -> None:
    script = Script()
    async with serving(tmp_path, {"m": script.model}, config=MERGE + own(deadline_aware=False)) as served:
        await learn(served, SLOW_S)
        assert mark_of(await served.infer(request(1), timeout_s=SHORT_S)) == 1
        assert await dropped(served, "unreachable") == 0


async def test_deadline_shorter_than_the_backlog_is_refused_at_once(tmp_path: Path) -> None:
    script = Script()
    text = f"max_batch_size: 1 dynamic_batching {{ }} {own(deadline_aware=True)}"
    async with serving(tmp_path, {"m": script.model}, config=text) as served:
        await learn(served, SLOW_S)
        async with busy(served, script):
            calls = await queued(served, (request(mark) for mark in range(5)), timeout_s=None)
            code, text = await failure_of(served.infer(request(9), timeout_s=4 * SLOW_S))
            assert code is Code.DEADLINE_EXCEEDED
            assert "can't be met" in text
            assert served.waiting("m") == 5
        await asyncio.gather(*calls)
        assert await dropped(served, "unreachable") == 1
    assert [9] not in script.served


async def test_request_whose_deadline_becomes_unreachable_in_the_queue_is_not_executed(tmp_path: Path) -> None:
    """It is accepted as two executions of one row prove nothing. The one that it waits for is the third."""
    script = Script()
    async with serving(tmp_path, {"m": script.model}, config=MERGE) as served:
        await learn(served, SLOW_S, rows=8)
        await learn(served, SLOW_S, times=2)
        with executions_take(SLOW_S):
            async with busy(served, script) as gate:
                (doomed,) = await queued(served, [request(1)], timeout_s=SHORT_S)
                calls = await queued(served, [request(2)], timeout_s=None)
                gate.open()
                assert (await failure_of(doomed))[0] is Code.DEADLINE_EXCEEDED
        assert mark_of(await calls[0]) == 2
        assert await dropped(served, "unreachable") == 1
    assert script.served == [[2]]


@BOTH_WAYS
@pytest.mark.parametrize("instances", [1, 2])
async def test_many_requests_with_deadlines_are_answered_or_refused_and_never_both(
    tmp_path: Path, instances: int
) -> None:
    script = Script()
    text = f"{MERGE} instance_group {{ count: {instances} }}"
    async with serving(tmp_path, {"m": script.model}, config=text) as served:
        await learn(served, 0.02, rows=8)
        calls = [call for mark in range(60) for call in send(served, request(mark), timeout_s=0.01 + (mark % 6) * 0.03)]
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        codes = [one.code() if isinstance(one, grpc.aio.AioRpcError) else Code.OK for one in outcomes]
        assert set(codes) <= {Code.OK, Code.DEADLINE_EXCEEDED}
        assert [mark_of(one) for one, code in zip(outcomes, codes, strict=True) if code is Code.OK] == [
            mark for mark, code in enumerate(codes) if code is Code.OK
        ]
        await eventually_async(lambda: served.waiting("m") == 0, "nothing left in the queue")
        served_marks = [mark for batch in script.served for mark in batch]
        assert len(served_marks) == len(set(served_marks)) >= codes.count(Code.OK)
