"""Python models written for Triton: sequences, and requests that come back to the model."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest

from paceline.protos import inference_pb2 as pb
from paceline.scheduler.errors import NotStarted
from paceline.server.call_facts import NO_PASSED_HEADERS
from paceline.server.requests.in_flight import Call
from tests.integration.serving import Served, failure_of
from tests.integration.streams import Stream
from tests.integration.triton_serving import asking, number, served, text
from tests.polling import eventually_awaited
from tests.triton_puppet import TENSORS

CONTROLS = """
control_input { name: "start" control { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } }
control_input { name: "ready" control { kind: CONTROL_SEQUENCE_READY bool_false_true: [ false, true ] } }
control_input { name: "id" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 } }
"""
SEQUENCES = f"max_batch_size: 4 {TENSORS} sequence_batching {{ max_sequence_idle_microseconds: 60000000 %s }}"
SEEN = """response = text(json.dumps([
    request.correlation_id(), request.flags(),
    {one.name(): one.as_numpy().ravel().tolist() for one in request.inputs() if one.name() != "x"},
]))"""
AGAIN = "request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)"
ITERATES = SEQUENCES % "iterative_sequence: true oldest { }"
STEPS = f"""
count = model.steps = getattr(model, "steps", {{}})
key = request.correlation_id()
count[key] = count.get(key, 0) + 1
if count[key] < 5: {AGAIN}
else: response = answer(count[key])
"""
"""Answered in the fifth step."""


def step(code: str, id_: int | str, start: bool = False, end: bool = False) -> pb.ModelInferRequest:
    request = asking(code)
    kind = "string_param" if isinstance(id_, str) else "int64_param"
    setattr(request.parameters["sequence_id"], kind, id_)
    request.parameters["sequence_start"].bool_param = start
    request.parameters["sequence_end"].bool_param = end
    return request


async def counts(served: Served) -> tuple[int, int, int, int]:
    """Successes, failures, inferences and executions."""
    model = (await served.stub.ModelStatistics(pb.ModelStatisticsRequest(name="m"), timeout=20)).model_stats[0]
    inference = model.inference_stats
    return inference.success.count, inference.fail.count, model.inference_count, model.execution_count


@pytest.mark.parametrize("ids", [(7, 2**40), ("a", "some id")])
async def test_steps_tell_their_sequence(tmp_path: Path, ids: Sequence[int | str]) -> None:
    async with served(tmp_path, SEQUENCES % "oldest { }") as started:
        for id_ in ids:
            seen = [await text(started, step(SEEN, id_, start, end)) for start, end in ((1, 0), (0, 0), (0, 1))]
            assert seen == [[id_, 1, {}], [id_, 0, {}], [id_, 2, {}]]
        assert (await failure_of(started.infer(step(SEEN, ids[0]))))[0] is grpc.StatusCode.INVALID_ARGUMENT


async def test_refused_step_is_not_withdrawn_any_more(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with served(tmp_path, SEQUENCES % "oldest { }") as started:
        call = Call(started.server.inference, step("", 7), None, None, NO_PASSED_HEADERS)
        with pytest.raises(NotStarted):
            await call.response()
        call.give_up()  # as where its RPC is cancelled before it is told
        assert await counts(started) == (0, 1, 0, 0)
    assert [record for record in caplog.records if record.exc_info] == []


async def test_controls_are_inputs(tmp_path: Path) -> None:
    async with served(tmp_path, SEQUENCES % f"oldest {{ }} {CONTROLS}") as started:
        for start in (1, 0):
            seen = await text(started, step(SEEN, 9, bool(start)))
            assert seen == [9, start, {"start": [start], "ready": [True], "id": [9]}]


async def test_rows_of_places_without_a_step_are_not_ready(tmp_path: Path) -> None:
    batch = "response = text(json.dumps([one.inputs()[2].as_numpy().tolist() for one in model.requests]))"
    async with served(tmp_path, SEQUENCES % f"direct {{ }} {CONTROLS}") as started:
        await started.infer(step("response = answer()", 1, True))
        await started.infer(step("response = answer()", 2, True))
        # The first place has nothing to do.
        assert await text(started, step(batch, 2)) == [[[False]], [[True]]]


async def test_failed_step_leaves_its_sequence(tmp_path: Path) -> None:
    async with served(tmp_path, SEQUENCES % "oldest { }") as started:
        await started.infer(step("response = answer()", 5, True))
        assert (await failure_of(started.infer(step("response = error('no')", 5))))[1] == "no"
        assert number(await started.infer(step("response = answer(8)", 5))) == 8


async def test_states_are_refused_by_name(tmp_path: Path) -> None:
    state = 'state { input_name: "s" output_name: "t" data_type: TYPE_FP32 dims: [ 1 ] }'
    with pytest.raises(Exception, match=r"sequence_batching.state: expected none, as the model is written for Triton"):
        async with served(tmp_path, SEQUENCES % state):
            pass


async def test_rescheduled_requests_come_back_and_count_once(tmp_path: Path) -> None:
    async with served(tmp_path, ITERATES) as started:
        answers = await asyncio.gather(*(started.infer(asking(STEPS)) for _ in range(6)))
        assert [number(one) for one in answers] == [5] * 6
        success, fail, inferences, executions = await counts(started)
        assert (success, fail, inferences) == (6, 0, 6)
        assert executions >= 5


async def test_rescheduled_request_tells_its_first_step(tmp_path: Path) -> None:
    seen = f"""
model.kept.append([request.flags(), request.correlation_id()])
if len(model.kept) < 3: {AGAIN}
else: response = text(json.dumps(model.kept))"""
    async with served(tmp_path, ITERATES) as started:
        assert await text(started, step(seen, 77, True)) == [[1, 77], [0, 77], [0, 77]]


async def test_places_are_free_after_the_last_step(tmp_path: Path) -> None:
    async with served(tmp_path, ITERATES.replace("max_batch_size: 4", "max_batch_size: 1")) as started:
        for _ in range(3):
            assert number(await started.infer(asking(STEPS))) == 5
        cancelled = asyncio.create_task(started.infer(asking(AGAIN)))
        await eventually_awaited(lambda: _executions_beyond(started, 20), "it comes back again and again")
        cancelled.cancel()
        assert number(await started.infer(asking(STEPS))) == 5


async def _executions_beyond(served: Served, least: int) -> bool:
    return (await counts(served))[3] > least


async def test_decoupled_model_answers_between_its_steps(tmp_path: Path) -> None:
    code = f"""
count = model.steps = getattr(model, "steps", {{}})
key = request.correlation_id()
count[key] = count.get(key, 0) + 1
sender = request.get_response_sender()
sender.send(answer(count[key]), final if count[key] == 40 else 0)
if count[key] < 40: {AGAIN}"""
    config = ITERATES + " model_transaction_policy { decoupled: true }"
    async with served(tmp_path, config) as started:
        streams = [Stream(started) for _ in range(3)]
        for stream in streams:
            await stream.send(asking(code))
        for stream in streams:
            told = [(await stream.message()).infer_response for _ in range(40)]
            assert [number(one) for one in told] == [*range(1, 41)]
            assert [one.parameters["triton_final_response"].bool_param for one in told] == [False] * 39 + [True]
            await stream.end()

        async def are_counted() -> bool:  # which comes after the last answer
            return (await counts(started))[:3] == (3, 0, 3)

        await eventually_awaited(are_counted, "three sequences, each counted once")


async def test_response_to_a_rescheduled_request_is_an_error(tmp_path: Path) -> None:
    async with served(tmp_path, ITERATES) as started:
        said: Any = await failure_of(started.infer(asking(f"response = answer(1); {AGAIN}")))
        assert "Expected a None object in the execute function return list" in said[1]
        assert number(await started.infer(asking())) == 1


async def test_own_class_cannot_iterate(tmp_path: Path) -> None:
    ours = "class Model:\n    def execute(self, inputs): return inputs"
    with pytest.raises(Exception, match=r"iterative_sequence is not supported .* except of Python models written for"):
        async with served(tmp_path, ITERATES, ours):
            pass
