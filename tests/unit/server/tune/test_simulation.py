"""What simulated executions are of: the batcher shares batches among requests as it does when it serves."""

from __future__ import annotations

import pytest

from paceline.clients.load.arrivals import Recorded
from paceline.scheduler.policy import BatchPolicy
from paceline.server.tune.costs import Costs
from paceline.server.tune.simulation import Closed, Contents, Open, Served, simulate

MS = 1_000_000
SHORT, LONG = Contents(1, "", (10,)), Contents(1, "", (100,))


def served(executed: list[tuple[int, int]], policy: BatchPolicy, base_ms: int) -> Served:
    def cost(rows: int, size: int, share: float) -> int:
        executed.append((rows, size))
        return base_ms * MS + rows * size * 1_000

    return Served(policy, 1, cost)


async def executions(policy: BatchPolicy, base_ms: int, contents: list[Contents]) -> list[tuple[int, int]]:
    executed = list[tuple[int, int]]()
    await simulate(served(executed, policy, base_ms), Closed(16), requests=2_000, contents=contents)
    return executed


async def test_lengths_share_batches_where_that_saves_time() -> None:
    policy = BatchPolicy(max_batch_rows=16, lengths=(lambda size: -(-size // 20) * 20,))
    dear, cheap = [await executions(policy, base_ms, [SHORT, LONG]) for base_ms in (50, 0)]
    assert {size for _, size in dear + cheap} == {20, 100}
    # Executions that cost much whatever is in them have all that waits; others have equal lengths.
    assert len(dear) < len(cheap)
    assert sum(rows * size for rows, size in cheap) < sum(rows * size for rows, size in dear)


async def test_requests_are_taken_up_one_by_one() -> None:
    # Each takes the event loop 1 ms to arrive, also those that were sent together, and 1 ms to be answered.
    policy = BatchPolicy(max_batch_rows=8, max_queue_delay_ns=3 * MS)
    costs = [Costs(loop_ns=2 * MS)]
    found = await simulate(Served(policy, 1, lambda *_: 1_000, costs), Closed(8), requests=800)
    assert found.throughput == pytest.approx(500, rel=0.01)
    assert found.rows_per_batch > 6  # though the delay is over before there are 4 of them


async def test_costs_are_those_of_usual_batches() -> None:
    # Eight requests, then one of another key: alone, that would cost 40 ms, but batches usually have more.
    at_ns = tuple(turn * 200 * MS + late * MS for turn in range(100) for late in (*[0] * 8, 100))
    load = Open(Recorded(at_ns, (*[0] * 8, 1) * 100))
    policy = BatchPolicy(max_batch_rows=8, max_queue_delay_ns=20 * MS)
    costs = [Costs(loop_ns=40 * MS, requests=1), Costs(loop_ns=MS, requests=2)]
    contents = [Contents(key="a"), Contents(key="b")]
    found = await simulate(Served(policy, 1, lambda *_: 1_000, costs), load, requests=900, contents=contents)
    assert found.rows_per_batch > 2
    assert found.latencies.percentile_ns(90) < 30 * MS


async def test_full_batches_are_prepared_beside_those_that_compute() -> None:
    # 6 of 10 ms compute, of full batches one right after the other; of one batch alone there is nothing beside.
    found = []
    for clients in (12, 4):
        one = Served(BatchPolicy(max_batch_rows=4), 1, lambda *_: 10 * MS, slots=2, prepared=0.4)
        found.append(await simulate(one, Closed(clients), requests=800))
    full, alone = found
    assert full.throughput == pytest.approx(4_000 / 6, rel=0.02)
    assert full.busy == pytest.approx(1, rel=0.02)
    assert full.latencies.percentile_ns(50) == pytest.approx(18 * MS, rel=0.02)
    assert alone.latencies.percentile_ns(50) == pytest.approx(10 * MS, rel=0.02)


async def test_large_batches_are_usual_from_the_first_on() -> None:
    costs = [Costs(loop_ns=400_000, requests=1), Costs(loop_ns=60_000, requests=64)]
    served = Served(BatchPolicy(max_batch_rows=64), 1, lambda rows, *_: MS + rows * 50_000, costs)
    few, many = [await simulate(served, Closed(256), requests=requests) for requests in (10_000, 20_000)]
    assert few.throughput > 0.9 * many.throughput


async def test_requests_of_other_keys_share_no_batch() -> None:
    contents = [Contents(2, "a", (), 10), Contents(2, "b", (), 100)]
    executed = await executions(BatchPolicy(max_batch_rows=16), 50, contents)
    assert {size for _, size in executed} == {10, 100}
    assert sum(rows for rows, size in executed if size == 10) == 2_000


async def test_recorded_requests_have_their_own_contents() -> None:
    executed = list[tuple[int, int]]()
    load = Open(Recorded(tuple(number * 500 * MS for number in range(4)), (1, 1, 0, 1)))
    policy = BatchPolicy(lengths=(lambda size: size,))
    found = await simulate(served(executed, policy, 1), load, requests=4, contents=[SHORT, LONG], warmup=0)
    assert executed == [(1, 100), (1, 100), (1, 10), (1, 100)]
    assert found.latencies.percentile_ns(100) <= 1.11 * MS
