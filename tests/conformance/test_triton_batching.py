"""The tables of Triton's tests of its batcher, run with NVIDIA's client: what is grouped, what leaves at once, what
waits.

Where Triton waits for its delay of ten seconds, these tests observe that the request waits, and then flush the queue.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.grpc.aio as triton_aio
from tritonclient.utils import InferenceServerException

from tests.conformance.triton import Callbacks, executed, outputs_of, tensors
from tests.harness import ServerProcess, write_identity
from tests.integration.scripted import BUSY, Call, Script, busy, marked
from tests.integration.serving import Served, serving
from tests.polling import eventually, eventually_async

LONG_US = 100_000_000
STANDARD = f"preferred_batch_size: [ 2, 6 ] max_queue_delay_microseconds: {LONG_US}"
ONLY_PREFERRED = "preferred_batch_size: [ 4, 6 ]"
Sent = tuple[int, int]  # rows and columns


class Asked:
    """NVIDIA's client and the server that it calls, with one model `m`."""

    def __init__(self, served: Served, client: Any, script: Script) -> None:
        self.served = served
        self.script = script
        self._client = client

    @property
    def batches(self) -> list[tuple[int, ...]]:
        """Rows of each request, batch by batch, without those that only kept the model busy."""
        pairs = zip(self.script.model.batches, self.script.seen, strict=False)
        return [rows for rows, marks in pairs if BUSY not in marks]

    @property
    def arrived(self) -> int:
        return self.served.waiting("m") + sum(len(batch) for batch in self.script.model.batches)

    async def infer(self, mark: float, rows: int = 1, columns: int = 16, **options: Any) -> np.ndarray[Any, Any]:
        result = await self._client.infer("m", tensors({"a": marked(mark, rows, columns)}), **options)
        (answer,) = outputs_of(result).values()
        return answer

    async def send(self, *sizes: Sent, **options: Any) -> list[Call]:
        """One after the other, each once the previous one has arrived."""
        calls = []
        for mark, (rows, columns) in enumerate(sizes):
            expected = self.arrived + 1
            calls.append(asyncio.create_task(self.infer(mark, rows, columns, **options)))
            await eventually_async(lambda n=expected: self.arrived == n, f"{expected} requests arrived")
        return calls

    def release(self) -> None:
        """As if the delay were over for all that waits."""
        self.served.server.repository.get("m", "").batcher.flush()

    async def status(self) -> tuple[dict[int, int], int, int, int]:
        """What Triton's own tests query: executions by rows; requests, rows and executions."""
        (one,) = (await self._client.get_inference_statistics("m")).model_stats
        sizes = {batch.batch_size: batch.compute_infer.count for batch in one.batch_stats}
        return sizes, one.inference_stats.success.count, one.inference_count, one.execution_count


def status_after(batches: list[tuple[int, ...]]) -> tuple[dict[int, int], int, int, int]:
    rows = [sum(batch) for batch in batches]
    return dict(Counter(rows)), sum(map(len, batches)), sum(rows), len(batches)


@asynccontextmanager
async def asked(tmp_path: Path, batching: str, rows: int = 8, more: str = "") -> AsyncIterator[Asked]:
    script = Script()
    text = f"max_batch_size: {rows} dynamic_batching {{ {batching} }} {more}"
    async with serving(tmp_path, {"m": script.model}, config=text) as served:
        client = triton_aio.InferenceServerClient(served.target)
        yield Asked(served, client, script)
        await client.close()


def assert_answers(answers: list[np.ndarray[Any, Any]], sizes: list[Sent]) -> None:
    for mark, (answer, size) in enumerate(zip(answers, sizes, strict=True)):
        assert answer.shape == size
        assert (answer == mark).all()


def sized(*rows: int) -> list[Sent]:
    return [(one, 16) for one in rows]


# What is sent; the batches that leave at once; those that leave when the delay is over.
TABLE: dict[str, tuple[list[Sent], list[tuple[int, ...]], list[tuple[int, ...]]]] = {
    "static_batch_preferred": (sized(2, 6), [(2,), (6,)], []),
    "static_batch_lt_any_preferred": (sized(1), [], [(1,)]),
    "static_batch_not_preferred": (sized(3), [], [(3,)]),
    "static_batch_gt_max_preferred": (sized(7), [(7,)], []),
    "multi_batch_not_preferred": (sized(1, 3), [], [(1, 3)]),
    "multi_batch_gt_max_preferred": (sized(3, 7), [(3,), (7,)], []),
    "multi_batch_sum_gt_max_preferred": (sized(3, 4), [(3,)], [(4,)]),
    # With different shapes, Triton sends off what waits when another shape arrives; here each shape is batched
    # separately.
    "multi_batch_different_shape": ([(1, 16), (1, 8)], [], [(1,), (1,)]),
    "multi_batch_not_preferred_different_shape": ([(1, 16), (3, 16), (1, 8)], [], [(1, 3), (1,)]),
    "multi_batch_preferred_different_shape": ([(1, 16), (3, 16), (1, 8), (5, 8)], [(1, 5)], [(1, 3)]),
}


@pytest.mark.parametrize(("sizes", "at_once", "later"), TABLE.values(), ids=TABLE)
async def test_tritons_table_for_requests_sent_one_by_one_gives_the_same_batches(
    tmp_path: Path, sizes: list[Sent], at_once: list[tuple[int, ...]], later: list[tuple[int, ...]]
) -> None:
    async with asked(tmp_path, STANDARD) as subject:
        calls = await subject.send(*sizes)
        waiting = sum(map(len, later))
        await eventually_async(lambda: subject.served.waiting("m") == waiting, f"{waiting} requests waiting")
        # Requests that have left the queue are on their way to the model.
        await eventually_async(lambda: len(subject.batches) >= len(at_once), f"{len(at_once)} batches in the model")
        assert subject.batches == at_once
        subject.release()
        assert_answers(await asyncio.gather(*calls), sizes)
        assert subject.batches == at_once + later
        assert await subject.status() == status_after(at_once + later)


# What is queued behind a busy model; the batches that leave once it is free; those that leave when the delay is over.
DELAYED: dict[str, tuple[str, list[int], list[tuple[int, ...]], list[tuple[int, ...]]]] = {
    "multi_batch_delayed_sum_gt_max_preferred": (STANDARD, [3, 4], [(3,)], [(4,)]),
    "multi_batch_use_biggest_preferred": (STANDARD, [1] * 6, [(1,) * 6], []),
    "multi_batch_use_best_preferred": (STANDARD, [1] * 3, [(1, 1)], [(1,)]),
    "preferred_batch_only_aligned": (ONLY_PREFERRED, [1] * 4, [(1,) * 4], []),
    "preferred_batch_only_unaligned": (ONLY_PREFERRED, [1] * 5, [(1,) * 4, (1,)], []),
    "preferred_batch_only_use_biggest_preferred": (ONLY_PREFERRED, [1] * 7, [(1,) * 6, (1,)], []),
    "preferred_batch_only_use_no_preferred_size": (ONLY_PREFERRED, [1] * 3, [(1,) * 3], []),
}


@pytest.mark.parametrize(("batching", "rows", "at_once", "later"), DELAYED.values(), ids=DELAYED)
async def test_tritons_table_for_requests_behind_a_busy_model_gives_the_same_batches(
    tmp_path: Path, batching: str, rows: list[int], at_once: list[tuple[int, ...]], later: list[tuple[int, ...]]
) -> None:
    async with asked(tmp_path, batching) as subject:
        async with busy(subject.served, subject.script, rows=7):
            calls = await subject.send(*sized(*rows))
        waiting = sum(map(len, later))
        await eventually_async(lambda: len(subject.batches) == len(at_once), f"batches {at_once}")
        assert subject.served.waiting("m") == waiting
        subject.release()
        assert_answers(await asyncio.gather(*calls), sized(*rows))
        assert subject.batches == at_once + later
        assert await subject.status() == status_after([(7,), *at_once, *later])


async def test_delay_exceeded_fills_the_batch_above_the_largest_preferred_size_as_in_triton(tmp_path: Path) -> None:
    """multi_batch_delayed_use_max_batch: 3 and 4 rows have waited too long when 1 arrives; all 8 leave together."""
    async with asked(tmp_path, "preferred_batch_size: [ 2, 6 ] max_queue_delay_microseconds: 1000") as subject:
        async with busy(subject.served, subject.script, rows=7):
            calls = await subject.send(*sized(3, 4))
            until_s = time.monotonic() + 0.002
            await eventually_async(lambda: time.monotonic() > until_s, "the delay to pass")
            calls += [asyncio.create_task(subject.infer(2, 1))]
            await eventually_async(lambda: subject.served.waiting("m") == 3, "three requests waiting")
        assert_answers(await asyncio.gather(*calls), sized(3, 4, 1))
        assert subject.batches == [(3, 4, 1)]


async def test_no_delay_executes_the_first_alone_and_the_rest_together_as_in_triton(tmp_path: Path) -> None:
    """max_queue_delay_only_default: twelve requests, two executions."""
    async with asked(tmp_path, "", rows=100) as subject:
        gate = subject.script.hold(0)
        calls = [asyncio.create_task(subject.infer(0))]
        await asyncio.to_thread(gate.wait_entered, 1)
        calls += [asyncio.create_task(subject.infer(mark)) for mark in range(1, 12)]
        await eventually_async(lambda: subject.served.waiting("m") == 11, "eleven requests waiting")
        gate.open()
        assert_answers(await asyncio.gather(*calls), sized(*[1] * 12))
        assert await subject.status() == ({1: 1, 11: 1}, 12, 12, 2)


@pytest.mark.parametrize(("priority", "first"), [(1, [2, 0]), (0, [0, 1])])
async def test_clients_priority_is_served_first_and_completes_the_preferred_size(
    tmp_path: Path, priority: int, first: list[int]
) -> None:
    """priority_levels: 2 and 1 rows at the default, then 2 at priority 1, which leave with the first 2."""
    batching = "preferred_batch_size: [ 4, 8 ] priority_levels: 2 default_priority_level: 2"
    async with asked(tmp_path, batching, rows=32) as subject:
        async with busy(subject.served, subject.script):
            calls = await subject.send(*sized(2, 1))
            calls.append(asyncio.create_task(subject.infer(2, 2, priority=priority)))
            await eventually_async(lambda: subject.served.waiting("m") == 3, "three requests waiting")
        assert_answers(await asyncio.gather(*calls), sized(2, 1, 2))
        marks = [mark for batch in subject.script.served for mark in batch]
        assert list(dict.fromkeys(marks))[:2] == first


async def test_priority_of_64_bits_arrives_unchanged(tmp_path: Path) -> None:
    top = 2**64 - 1
    async with asked(tmp_path, f"priority_levels: {top} default_priority_level: {top - 1}", rows=1) as subject:
        async with busy(subject.served, subject.script):
            asked_for = [top, top - 1, 2**63, 1]
            calls = []
            for mark, priority in enumerate(asked_for):
                calls.append(asyncio.create_task(subject.infer(mark, priority=priority)))
                await eventually_async(lambda n=mark + 1: subject.served.waiting("m") == n, "the request waiting")
        await asyncio.gather(*calls)
        assert [batch[0] for batch in subject.script.served] == [3, 2, 1, 0]


async def test_clients_timeout_is_in_microseconds_and_rejects(tmp_path: Path) -> None:
    queue = "default_queue_policy { default_timeout_microseconds: 60000000 allow_timeout_override: true }"
    async with asked(tmp_path, queue) as subject:
        async with busy(subject.served, subject.script):
            with pytest.raises(InferenceServerException, match="Request timeout expired") as raised:
                await subject.infer(1, timeout=30_000)
            assert raised.value.status() == "StatusCode.DEADLINE_EXCEEDED"
        assert subject.batches == []


async def test_queue_of_eight_behind_a_busy_model_refuses_two_of_ten(tmp_path: Path) -> None:
    batching = "preferred_batch_size: [ 4, 8 ] default_queue_policy { max_queue_size: 8 }"
    async with asked(tmp_path, batching, rows=32) as subject:
        async with busy(subject.served, subject.script):
            calls = [asyncio.create_task(subject.infer(mark)) for mark in range(10)]
            await eventually_async(lambda: sum(call.done() for call in calls) == 2, "two refused")
            assert subject.served.waiting("m") == 8
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        refused = [one for one in outcomes if isinstance(one, InferenceServerException)]
        assert len(refused) == 2
        for one in refused:
            assert one.status() == "StatusCode.RESOURCE_EXHAUSTED"
            assert "Exceeds maximum queue size" in one.message()


async def test_request_cancelled_by_the_client_in_the_queue_is_never_executed(tmp_path: Path) -> None:
    async with asked(tmp_path, "", rows=4) as subject:
        async with busy(subject.served, subject.script):
            calls = await subject.send(*sized(1, 1, 1))
            calls[1].cancel()
            await eventually_async(lambda: subject.served.waiting("m") == 2, "the cancelled one gone")
        assert (await calls[0] == 0).all()
        assert (await calls[2] == 2).all()
        assert subject.script.served == [[0, 2]]


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A real server process with models that return their input, configured in different ways."""
    repository = tmp_path_factory.mktemp("repository")
    write_identity(repository, "preferring", extra=f"dynamic_batching {{ {STANDARD} }}")
    write_identity(repository, "waiting", extra="dynamic_batching { max_queue_delay_microseconds: 100000 }")
    write_identity(repository, "plain")
    for name, value in (("batch_sizes", "4,8"), ("split_oversized", "true")):
        parameter = f'parameters {{ key: "paceline.{name}" value {{ string_value: "{value}" }} }}'
        write_identity(repository, name, extra=f"dynamic_batching {{ }} {parameter}")
    with ServerProcess(repository) as started:
        yield started


@pytest.fixture
def client(process: ServerProcess) -> Iterator[tritonclient.grpc.InferenceServerClient]:
    with tritonclient.grpc.InferenceServerClient(process.target) as made:
        yield made


def rows_of(mark: int, rows: int = 1) -> dict[str, np.ndarray[Any, Any]]:
    return {"INPUT0": marked(mark, rows, 16)}


def test_process_two_requests_that_add_up_to_a_preferred_size_leave_together(
    process: ServerProcess, client: tritonclient.grpc.InferenceServerClient
) -> None:
    callbacks = [Callbacks(), Callbacks()]
    for mark, callback in enumerate(callbacks):
        client.async_infer("preferring", tensors(rows_of(mark)), callback)
    for mark, callback in enumerate(callbacks):
        result, error = callback.next()
        assert error is None
        assert (result.as_numpy("OUTPUT0") == mark).all()
    assert executed(process, "preferring") == (1, 2)


def test_process_idle_model_keeps_its_queue_delay_and_one_without_does_not_wait(
    process: ServerProcess, client: tritonclient.grpc.InferenceServerClient
) -> None:
    def waited_us(model: str) -> float:
        """How long a request has waited in the queue."""
        name = f'nv_inference_queue_duration_us{{model="{model}",version="1"}}'
        before = process.metrics()[name]
        client.infer(model, tensors(rows_of(1)))
        return process.metrics()[name] - before

    assert waited_us("waiting") >= 100_000
    eventually(lambda: waited_us("plain") < 100_000, "a request that did not wait")  # a busy machine may delay some


def test_process_batch_sizes_pad_and_the_response_reports_it(
    process: ServerProcess, client: tritonclient.grpc.InferenceServerClient
) -> None:
    result = client.infer("batch_sizes", tensors(rows_of(7, rows=3)), parameters={"paceline_batch_info": True})
    assert (result.as_numpy("OUTPUT0") == rows_of(7, rows=3)["INPUT0"]).all()
    told = result.get_response().parameters
    assert told["paceline_batch_rows"].int64_param == 3
    assert told["paceline_batch_padded_rows"].int64_param == 4
    assert process.metrics()['paceline_padding_rows{model="batch_sizes",version="1"}'] == 1


def test_process_oversized_request_is_split_where_configured_and_refused_elsewhere(
    process: ServerProcess, client: tritonclient.grpc.InferenceServerClient
) -> None:
    many = {"INPUT0": np.arange(100 * 16, dtype=np.float32).reshape(100, 16)}
    np.testing.assert_array_equal(client.infer("split_oversized", tensors(many)).as_numpy("OUTPUT0"), many["INPUT0"])
    assert executed(process, "split_oversized") == (13, 100)
    with pytest.raises(InferenceServerException, match="expected a batch of 1 to 8 rows, got 100") as raised:
        client.infer("plain", tensors(many))
    assert raised.value.status() == "StatusCode.INVALID_ARGUMENT"
