"""Priorities and queue policies: which requests go first, which are delayed, which are refused."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import grpc
import pytest

from paceline.protos.inference_pb2 import InferParameter
from tests.integration.scripted import Script, busy, mark_of, queued, request, send, sent, totals
from tests.integration.serving import failure_of, serving
from tests.polling import eventually_async

Code = grpc.StatusCode
U64_MAX = 2**64 - 1
LONG_US = 100_000_000


def config(batching: str, rows: int = 1) -> str:
    return f"max_batch_size: {rows} dynamic_batching {{ {batching} }}"


def uint(value: int) -> InferParameter:
    return InferParameter(uint64_param=value)


async def passed_ms(milliseconds: float) -> None:
    """Return once `milliseconds` have passed: here, time itself is the condition."""
    until_s = time.monotonic() + milliseconds / 1_000
    await eventually_async(lambda: time.monotonic() > until_s, "time to pass")


async def test_higher_priorities_go_first_and_equal_ones_in_order_of_arrival(tmp_path: Path) -> None:
    script = Script()
    text = config("priority_levels: 3 default_priority_level: 2")
    async with serving(tmp_path, {"m": script.model}, config=text) as served:
        async with busy(served, script):
            asked = [3, 1, 2, 3, 1, 2, 0, 9]  # 0 and 9 aren't levels: they mean the default, 2
            calls = await queued(served, (request(mark, priority=level) for mark, level in enumerate(asked)))
        assert [mark_of(answer) for answer in await asyncio.gather(*calls)] == list(range(8))
    assert [batch[0] for batch in script.served] == [1, 4, 2, 5, 6, 7, 0, 3]


async def test_priorities_of_64_bits_are_distinguished(tmp_path: Path) -> None:
    script = Script()
    text = config(f"priority_levels: {U64_MAX} default_priority_level: {U64_MAX - 1}")
    async with serving(tmp_path, {"m": script.model}, config=text) as served:
        async with busy(served, script):
            asked = [uint(U64_MAX), uint(0), uint(U64_MAX - 2), 2**63 - 1, uint(2**63), 1]
            calls = await queued(served, (request(mark, priority=level) for mark, level in enumerate(asked)))
        await asyncio.gather(*calls)
    assert [batch[0] for batch in script.served] == [5, 3, 4, 2, 1, 0]


async def test_higher_priority_overtakes_into_the_batch_being_formed(tmp_path: Path) -> None:
    """2 + 1 rows wait at the default level, then 2 arrive at level 1: with the oldest 2 they make the preferred 4."""
    script = Script()
    text = config(
        "priority_levels: 2 default_priority_level: 2 preferred_batch_size: [ 4, 8 ] "
        f"max_queue_delay_microseconds: {LONG_US}",
        rows=32,
    )
    async with serving(tmp_path, {"m": script.model}, config=text) as served:
        calls = await sent(served, script, request(1, rows=2), request(2), request(3, rows=2, priority=1))
        await asyncio.gather(calls[0], calls[2])
        assert script.seen == [[3, 3, 1, 1]]
        assert served.waiting("m") == 1
        await asyncio.gather(calls[1], *send(served, request(4, rows=3)))
    assert script.seen[1:] == [[2, 4, 4, 4]]


async def test_priorities_without_levels_change_nothing(tmp_path: Path) -> None:
    script = Script()
    async with serving(tmp_path, {"m": script.model}, config=config("")) as served:
        async with busy(served, script):
            calls = await queued(served, (request(mark, priority=level) for mark, level in enumerate([9, 1, 5])))
        await asyncio.gather(*calls)
    assert script.served == [[0], [1], [2]]


async def test_queue_policy_of_a_level_bounds_that_level_alone(tmp_path: Path) -> None:
    script = Script()
    policy = "priority_queue_policy { key: 1 value { max_queue_size: 2 } } default_queue_policy { max_queue_size: 3 }"
    text = config(f"priority_levels: 2 default_priority_level: 2 {policy}")
    async with serving(tmp_path, {"m": script.model}, config=text) as served:
        async with busy(served, script):
            calls = await queued(served, (request(mark, priority=level) for mark, level in enumerate([2, 2, 2, 1, 1])))
            for level, limit in ((1, 2), (2, 3), (0, 3)):
                assert await failure_of(served.infer(request(9, priority=level))) == (
                    Code.RESOURCE_EXHAUSTED,
                    f"model 'm': Exceeds maximum queue size of {limit} requests",
                )
        await asyncio.gather(*calls)
        assert totals(await served.metrics())["REJECTED"] == 3


PREFERRED = f"preferred_batch_size: [ 4, 8 ] max_queue_delay_microseconds: {LONG_US}"


async def test_timeout_action_delay_serves_the_late_request_after_all_others(tmp_path: Path) -> None:
    script = Script()
    policy = "default_queue_policy { timeout_action: DELAY allow_timeout_override: true }"
    async with serving(tmp_path, {"m": script.model}, config=config(f"{PREFERRED} {policy}", 32)) as served:
        late = await sent(served, script, request(1, timeout=1_000))
        await passed_ms(2)
        punctual = send(served, request(2, rows=2), request(3, rows=2))
        await asyncio.gather(*punctual)
        assert sorted(script.seen[0]) == [2, 2, 3, 3]
        assert served.waiting("m") == 1
        await asyncio.gather(*late, *send(served, request(4, rows=3)))
        assert totals(await served.metrics()) == {"success": 4, "REJECTED": 0, "CANCELED": 0, "BACKEND": 0, "OTHER": 0}
    assert script.seen[1:] == [[4, 4, 4, 1]]


async def test_timeout_action_reject_refuses_the_late_request_and_serves_the_others(tmp_path: Path) -> None:
    script = Script()
    timeouts = f"default_timeout_microseconds: {LONG_US} allow_timeout_override: true"
    policy = f"default_queue_policy {{ timeout_action: REJECT {timeouts} }}"
    async with serving(tmp_path, {"m": script.model}, config=config(f"{PREFERRED} {policy}", 32)) as served:
        code, text = await failure_of(served.infer(request(1, timeout=20_000)))
        assert code is Code.DEADLINE_EXCEEDED
        assert "Request timeout expired" in text
        await asyncio.gather(*send(served, request(2, rows=2), request(3, rows=2)))
        assert totals(await served.metrics())["REJECTED"] == 1
    assert [sorted(batch) for batch in script.seen] == [[2, 2, 3, 3]]


async def test_timeout_actions_of_two_levels_each_apply_to_their_level(tmp_path: Path) -> None:
    script = Script()
    timeout = "default_timeout_microseconds: 1000"
    policies = "".join(
        f"priority_queue_policy {{ key: {level} value {{ timeout_action: {action} {timeout} }} }}"
        for level, action in ((1, "DELAY"), (2, "REJECT"))
    )
    # A third level, which has no timeout, for what keeps the instance busy.
    text = config(f"priority_levels: 3 default_priority_level: 3 {policies}")
    async with serving(tmp_path, {"m": script.model}, config=text) as served:
        async with busy(served, script):
            (first,) = await queued(served, [request(1, priority=1)])
            code, _ = await failure_of(served.infer(request(2, priority=2)))
            assert code is Code.DEADLINE_EXCEEDED
            assert served.waiting("m") == 1
            await passed_ms(2)
        assert mark_of(await first) == 1
    assert script.served == [[1]]


@pytest.mark.parametrize(("asked_us", "allowed_us"), [(20_000, LONG_US), (LONG_US, 20_000)])
async def test_timeout_of_a_request_can_shorten_the_configured_one_but_not_lengthen_it(
    tmp_path: Path, asked_us: int, allowed_us: int
) -> None:
    script = Script()
    policy = f"default_queue_policy {{ default_timeout_microseconds: {allowed_us} allow_timeout_override: true }}"
    async with serving(tmp_path, {"m": script.model}, config=config(f"{PREFERRED} {policy}", 32)) as served:
        code, text = await failure_of(served.infer(request(1, timeout=asked_us)))
    assert code is Code.DEADLINE_EXCEEDED
    waited_us = int(text.rpartition(" after ")[2].split()[0])
    assert min(asked_us, allowed_us) <= waited_us < max(asked_us, allowed_us)
    assert script.seen == []


async def test_timeout_of_a_request_applies_without_a_configured_one_if_overriding_is_allowed(tmp_path: Path) -> None:
    script = Script()
    policy = "default_queue_policy { allow_timeout_override: true }"
    async with serving(tmp_path, {"m": script.model}, config=config(f"{PREFERRED} {policy}", 32)) as served:
        assert (await failure_of(served.infer(request(1, timeout=10_000))))[0] is Code.DEADLINE_EXCEEDED
        patient = await sent(served, script, request(2))
        await asyncio.gather(*patient, *send(served, request(3, rows=3)))
    assert script.seen == [[2, 3, 3, 3]]


@pytest.mark.parametrize("microseconds", [2**63 - 1, U64_MAX])
async def test_timeout_can_be_the_largest_possible_number(tmp_path: Path, microseconds: int) -> None:
    script = Script()
    policy = f"default_queue_policy {{ default_timeout_microseconds: {microseconds} allow_timeout_override: true }}"
    async with serving(tmp_path, {"m": script.model}, config=config(f"{PREFERRED} {policy}", 32)) as served:
        calls = await sent(served, script, request(1, timeout=2**63 - 1))
        await asyncio.gather(*calls, *send(served, request(2, rows=3)))
