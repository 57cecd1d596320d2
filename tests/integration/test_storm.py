"""Good, bad, cancelled and expiring requests of several shapes all at once, while the model fails now and then."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import grpc
import pytest

from paceline.backends.errors import ExecutionError
from paceline.backends.spec import Tensors
from paceline.server.telemetry.model_statistics import FailureReason
from tests.integration.scripted import own, totals
from tests.integration.serving import Served, echo_model, serving
from tests.memory_models import linear_latency
from tests.polling import eventually_async
from tests.wire import infer, rows_of_floats

Code = grpc.StatusCode
CONFIG = """
    max_batch_size: 8
    dynamic_batching { max_queue_delay_microseconds: 500 default_queue_policy { max_queue_size: 60 } }
    instance_group { count: 2 }
"""
POISON = 1e6


def poisoned(inputs: Tensors) -> bool:
    return bool((inputs[0] == POISON).any())


async def one(served: Served, kind: str, number: int) -> str:
    """Send one request of `kind`. Its outcome, "wrong" for an answer that differs from the request."""
    columns = 1 + number % 3
    first = POISON if kind == "poisoned" else float(number)
    request = infer("m", {"a": rows_of_floats(1 + number % 4, columns, first=first)})
    if kind == "bad":
        request.inputs[0].datatype = "INT32"
    call = asyncio.create_task(served.infer(request, timeout_s=0.002 if kind == "hasty" else 20))
    if kind == "cancelled":
        await asyncio.sleep(0.001 * (number % 5))
        call.cancel()
    try:
        response = await call
    except asyncio.CancelledError:
        return "cancelled"
    except grpc.aio.AioRpcError as error:
        return error.code().name
    return "OK" if response.raw_output_contents[0] == request.raw_input_contents[0] else "wrong"


POSSIBLE = {
    "good": {"OK", "INTERNAL", "RESOURCE_EXHAUSTED"},  # INTERNAL in a batch with a poisoned one
    "bad": {"INVALID_ARGUMENT"},
    "cancelled": {"cancelled", "OK", "INTERNAL", "RESOURCE_EXHAUSTED"},
    "hasty": {"DEADLINE_EXCEEDED", "OK", "INTERNAL", "RESOURCE_EXHAUSTED"},
    "poisoned": {"INTERNAL", "RESOURCE_EXHAUSTED"},
}


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("isolates", [True, False], ids=["isolating", "failing whole"])
async def test_storm_gives_each_request_a_possible_outcome_and_leaves_the_server_clean(
    tmp_path: Path, seed: int, isolates: bool
) -> None:
    dice = random.Random(seed)
    model = echo_model()
    model.latency = linear_latency(0.002, 0.0001)
    model.faults.raise_when(poisoned, ExecutionError("poisoned"))
    async with serving(tmp_path, {"m": model}, config=CONFIG + own(isolate_failures=isolates)) as served:
        kinds = dice.choices(list(POSSIBLE), weights=[10, 2, 3, 3, 1], k=400)
        ends = await asyncio.gather(*(one(served, kind, number) for number, kind in enumerate(kinds)))
        for kind, end in zip(kinds, ends, strict=True):
            assert end in POSSIBLE[kind], (kind, end)
        assert ends.count("OK") > 20
        await eventually_async(lambda: served.waiting("m") == 0, "an empty queue")
        request = infer("m", {"a": rows_of_floats(8)})
        assert (await served.infer(request)).raw_output_contents[0] == request.raw_input_contents[0]
        statistics = served.server.repository.get("m", "").statistics

        def ended_in_execution() -> int:
            """All requests but those refused before the queue or dropped from it, for whatever reason."""
            refused = statistics.failures[FailureReason.OTHER] + sum(statistics.drops.values())
            return statistics.requests.count + statistics.failed - refused

        # Each executed request was counted once, however often it was executed.
        if isolates:
            assert ended_in_execution() <= sum(map(len, model.batches))
        else:
            await eventually_async(lambda: ended_in_execution() == sum(map(len, model.batches)), "each counted once")
        metrics = await served.metrics()
        assert metrics['nv_inference_pending_request_count{model="m",version="1"}'] == 0
        assert metrics['paceline_lanes{model="m",version="1"}'] == 0
        counted = totals(metrics)
        assert ends.count("OK") + 1 <= counted["success"]
        assert counted["OTHER"] == ends.count("INVALID_ARGUMENT")
        assert counted["BACKEND"] >= ends.count("INTERNAL")
        told = [end for end in ends if end not in ("cancelled", "DEADLINE_EXCEEDED")]
        assert len(told) + 1 <= sum(counted.values()) <= len(ends) + 1
