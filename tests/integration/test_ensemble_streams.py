"""Ensembles over streams: steps that answer more than once, and steps with memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import numpy as np
import pytest

from paceline.backends.errors import ExecutionError, InstanceError
from paceline.protos import inference_pb2 as pb
from paceline.server.config import Settings
from tests import open_puppet
from tests.ensembles import Step, ensemble_config, write_ensemble
from tests.harness import touch
from tests.integration.controlling import explicit, load
from tests.integration.sequence_serving import STATE
from tests.integration.serving import Served, echo_model, failure_of, serving
from tests.integration.streams import Stream
from tests.memory_models import MemoryModel
from tests.models import write
from tests.polling import eventually_async
from tests.state_models import accumulator
from tests.wire import infer

FINAL = "triton_final_response"
EMPTY_FINAL = "triton_enable_empty_final_response"
TENSORS = {"in": "INT64 1"}, {"out": "INT64 -1"}
THEN: Sequence[Step] = [("m", {"x": "in"}, {"y": "mid"}), ("after", {"a": "mid"}, {"x": "out"})]
COUNT = "for n in range(3): send(n)\n"
ENDLESS = "while not request.cancelled: send(1)\n"
Told = tuple[int | str | None, bool]
"""The output, the error or nothing, and whether it is the last answer."""


@asynccontextmanager
async def served(
    root: Path,
    after: MemoryModel | None = None,
    steps: Sequence[Step] = THEN,
    outputs: Mapping[str, str] = TENSORS[1],
) -> AsyncIterator[Served]:
    """Ensemble `e`, whose step `m` runs what requests say."""
    open_puppet.write(root)
    write_ensemble(root, "e", ensemble_config(steps, TENSORS[0], outputs))
    settings = Settings(paths=(root,), allow_python_models=True)
    models = {"after": after or echo_model("INT64", -1)}
    batched = "max_batch_size: 8 dynamic_batching { }"
    async with serving(root, models, config=batched, settings=settings) as started:
        yield started


def asking(code: str, **parameters: bool) -> pb.ModelInferRequest:
    return infer("e", {"in": np.array([[1]], np.int64)}, parameters={"run": code, **parameters})


async def rest(stream: Stream) -> list[Told]:
    """All answers until the stream ends; no more is sent."""
    await stream.end()
    answers: list[Told] = []
    while isinstance(message := await asyncio.wait_for(stream.call.read(), 20), pb.ModelStreamInferResponse):
        response = message.infer_response
        output = int(np.frombuffer(response.raw_output_contents[0], np.int64)[0]) if response.outputs else None
        answers.append((message.error_message or output, response.parameters[FINAL].bool_param))
    return answers


async def answers(started: Served, request: pb.ModelInferRequest) -> list[Told]:
    stream = Stream(started)
    await stream.send(request)
    return await rest(stream)


async def until_quiet(started: Served) -> None:
    opened = [started.server.repository.get(name, "").open_requests for name in ("e", "m")]
    await eventually_async(lambda: not any(map(len, filter(None, opened))), "no request is open")


async def test_each_answer_of_a_decoupled_step_goes_on_to_the_steps_behind_it(tmp_path: Path) -> None:
    async with served(tmp_path) as started:
        config = (await started.stub.ModelConfig(pb.ModelConfigRequest(name="e"))).config
        assert config.model_transaction_policy.decoupled
        told = await answers(started, asking(f"{COUNT}request.end()", **{EMPTY_FINAL: True}))
        assert [one for one, _ in told[:3]] == [0, 1, 2]
        assert [last for _, last in told] in ([False, False, False, True], [False, False, True])
        await until_quiet(started)
        statistics = started.server.repository.get("e", "").statistics
        assert (statistics.requests.count, statistics.failed) == (1, 0)


async def test_step_without_answers_ends_the_request_without_any(tmp_path: Path) -> None:
    async with served(tmp_path) as started:
        assert await answers(started, asking("request.end()", **{EMPTY_FINAL: True})) == [(None, True)]
        assert await answers(started, asking("request.end()")) == []


async def test_only_answer_is_the_last_one(tmp_path: Path) -> None:
    async with served(tmp_path) as started:
        assert await answers(started, asking("send(5, True)")) == [(5, True)]


async def test_decoupled_ensemble_is_for_streams_alone(tmp_path: Path) -> None:
    async with served(tmp_path) as started:
        status, text = await failure_of(started.infer(asking("send(5, True)")))
        assert status is grpc.StatusCode.UNIMPLEMENTED
        assert text == "ModelInfer RPC doesn't support models with decoupled transaction policy"


async def test_answers_wait_for_what_a_slower_step_beside_them_makes(tmp_path: Path) -> None:
    slow = echo_model("INT64", -1)
    steps: Sequence[Step] = [("m", {"x": "in"}, {"y": "out"}), ("after", {"a": "in"}, {"x": "beside"})]
    async with served(tmp_path, slow, steps, {"out": "INT64 -1", "beside": "INT64 -1"}) as started:
        slow.gate.close()
        stream = Stream(started)
        await stream.send(asking(f"{COUNT}request.end()"))
        m = started.server.repository.get("m", "")
        await eventually_async(lambda: m.statistics.requests.count == 1, "the decoupled step has ended")
        slow.gate.open()
        assert await rest(stream) == [(0, False), (1, False), (2, True)]
        await until_quiet(started)


async def test_request_ends_when_its_step_does_long_after_its_answers(tmp_path: Path) -> None:
    async with served(tmp_path) as started:
        stream = Stream(started)
        await stream.send(asking(f"{COUNT}model.kept.append(request)", **{EMPTY_FINAL: True}))
        for _ in range(3):
            await stream.message()
        assert await answers(started, asking("model.kept.pop().end()\nrequest.end()")) == []
        assert await rest(stream) == [(None, True)]
        await until_quiet(started)


async def test_error_of_a_decoupled_step_behind_another_leaves_the_answers_before_it(tmp_path: Path) -> None:
    open_puppet.write(tmp_path)
    (tmp_path / "m").rename(tmp_path / "n")
    steps: Sequence[Step] = [("m", {"x": "in"}, {"y": "mid"}), ("n", {"x": "mid"}, {"y": "out"})]
    first = "if request.inputs['x'][0][0] == 1: send(10); send(20); request.end()\n"
    code = f"{first}else:\n    for n in range(10): send(n)\n    request.fail('no more')\n"
    async with served(tmp_path, None, steps) as started:
        told = [one for one, _ in await answers(started, asking(code))]
        assert sorted(told, key=str) == sorted([*range(10), "in ensemble 'e', step 1 ('n'): no more"] * 2, key=str)
        await until_quiet(started)


async def test_error_behind_one_answer_leaves_the_others(tmp_path: Path) -> None:
    after = echo_model("INT64", -1)
    after.faults.raise_when(lambda inputs: bool((inputs[0] == 1).any()), ExecutionError("not one"))
    async with served(tmp_path, after) as started:
        told = await answers(started, asking(f"{COUNT}request.end()"))
        assert [one for one, _ in told if one is not None] == [0, "in ensemble 'e', step 1 ('after'): not one", 2]
        await until_quiet(started)


async def test_steps_that_fail_together_give_one_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    after = echo_model("INT64", -1)
    after.faults.raise_next(InstanceError("no"))
    both: Sequence[Step] = [THEN[0], THEN[1], ("after", {"a": "mid"}, {"x": "too"})]  # they share a batch
    async with served(tmp_path, after, both, {**TENSORS[1], "too": "INT64 -1"}) as started:
        stream = Stream(started)
        await stream.send(asking("send(1)\nmodel.kept.append(request)"))
        assert (await stream.message()).error_message == "in ensemble 'e', step 1 ('after'): no"
        assert await answers(started, asking("model.kept.pop().end()\nrequest.end()")) == []
        assert await rest(stream) == []
        await until_quiet(started)
        assert started.failed("after") == 2
    assert "a bug" not in caplog.text


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (
            "send(7)\nrequest.fail('half of it', end=False)\nsend(8, True)",
            [7, "in ensemble 'e', step 0 ('m'): half of it", 8],
        ),
        ("request.fail('all of it')", ["in ensemble 'e', step 0 ('m'): all of it"]),
        ("raise ValueError('in execute')", ["in ensemble 'e', step 0 ('m'): ValueError: in execute"]),
    ],
)
async def test_errors_of_a_decoupled_step_are_answers(tmp_path: Path, code: str, expected: list[object]) -> None:
    async with served(tmp_path) as started:
        assert [one for one, _ in await answers(started, asking(code))] == expected
        await until_quiet(started)


async def test_answers_before_a_final_error_arrive_before_it(tmp_path: Path) -> None:
    after = echo_model("INT64", -1)
    async with served(tmp_path, after) as started:
        after.gate.close()
        told = asyncio.ensure_future(answers(started, asking("send(7)\nrequest.fail('and no more')")))
        await eventually_async(lambda: after.gate.entered == 1, "an execution that is held")
        opened = started.server.repository.get("m", "").open_requests
        assert opened is not None
        await eventually_async(lambda: not len(opened), "the end of the decoupled step")
        after.gate.open()
        assert await told == [(7, False), ("in ensemble 'e', step 0 ('m'): and no more", True)]
        await until_quiet(started)
        assert started.failed("e") == 1
        # As of any ensemble's request that fails: it executed nothing itself.
        (counted,) = (await started.stub.ModelStatistics(pb.ModelStatisticsRequest(name="e"))).model_stats
        assert (counted.inference_count, counted.execution_count, counted.inference_stats.queue.count) == (0, 0, 0)


async def test_caller_that_leaves_ends_the_decoupled_step(tmp_path: Path) -> None:
    async with served(tmp_path) as started:
        stream = Stream(started)
        await stream.send(asking(ENDLESS))
        for _ in range(40):
            await stream.message()
        stream.call.cancel()
        await until_quiet(started)
        assert await answers(started, asking("send(5, True)")) == [(5, True)]


async def test_slow_reader_holds_up_the_decoupled_step(tmp_path: Path) -> None:
    async with served(tmp_path) as started:
        stream = Stream(started)
        await stream.send(asking("for n in range(2000): send(n)\nrequest.end()"))
        read = [(await stream.message()).infer_response for _ in range(2000)]
        numbers = [int(np.frombuffer(one.raw_output_contents[0], np.int64)[0]) for one in read]
        assert numbers == list(range(2000))
        assert await rest(stream) == []
        await until_quiet(started)


async def test_step_of_two_decoupled_models_is_refused(tmp_path: Path) -> None:
    open_puppet.write(tmp_path)
    (tmp_path / "m").rename(tmp_path / "n")
    steps: Sequence[Step] = [
        ("m", {"x": "in"}, {"y": "one"}),
        ("n", {"x": "in"}, {"y": "two"}),
        ("both", {"a": "one", "b": "two"}, {"x": "out"}),
    ]
    spec = echo_model("INT64", -1).spec
    both = MemoryModel(type(spec)((spec.inputs[0], type(spec.inputs[0])("b", "INT64", (-1, -1))), spec.outputs))
    open_puppet.write(tmp_path)
    write_ensemble(tmp_path, "e", ensemble_config(steps, *TENSORS))
    settings = Settings(paths=(tmp_path,), allow_python_models=True)
    config = "max_batch_size: 8 dynamic_batching { }"
    async with serving(tmp_path, {"both": both}, config=config, settings=settings) as started:
        why = started.server.repository.failures["e"]
        text = "in ensemble e, step of model 'both' receives inputs originated from different decoupled models (step 2)"
        assert why == text


async def test_steps_with_memory_see_each_sequence_in_order(tmp_path: Path) -> None:
    write(accumulator(), tmp_path / "sums" / "1" / "model.onnx")
    (tmp_path / "sums" / "config.pbtxt").write_text(f"max_batch_size: 8 sequence_batching {{ {STATE} }}")
    steps: Sequence[Step] = [("before", {"a": "in"}, {"x": "mid"}), ("sums", {"INPUT0": "mid"}, {"OUTPUT0": "out"})]
    write_ensemble(tmp_path, "e", ensemble_config(steps, {"in": "FP32 2"}, {"out": "FP32 2"}, rows=1))
    before = echo_model("FP32", 2)
    config = "max_batch_size: 1 instance_group { count: 4 }"  # steps may overtake each other in front of `sums`
    async with serving(tmp_path, {"before": before}, config=config) as started:

        def step(place: int, number: int) -> pb.ModelInferRequest:
            request = infer("e", {"in": np.full((1, 2), number, np.float32)})
            request.parameters["sequence_id"].int64_param = number
            request.parameters["sequence_start"].bool_param = place == 0
            request.parameters["sequence_end"].bool_param = place == 4
            return request

        warm = before.gate.entered
        before.gate.close()
        streams = {number: Stream(started) for number in (1, 2)}
        for number, stream in streams.items():
            await stream.send(*[step(place, number) for place in range(5)])
        batcher = started.server.repository.get("e", "").batcher
        await eventually_async(lambda: len(batcher._running) == 10, "all to be under way")
        await eventually_async(lambda: before.gate.entered == warm + 2, "the first of each sequence")
        assert started.waiting("before") == 0
        before.gate.open()
        for number, stream in streams.items():
            sums = [(await stream.message()).infer_response.raw_output_contents[0] for _ in range(5)]
            assert [float(np.frombuffer(one, np.float32)[0]) for one in sums] == [number * n for n in range(1, 6)]
        status, text = await failure_of(started.infer(infer("e", {"in": np.zeros((1, 2), np.float32)})))
        assert status is grpc.StatusCode.INVALID_ARGUMENT
        assert "in ensemble 'e', step 1 ('sums'): inference request to model 'sums' must specify" in text


async def test_sequence_stays_in_order_while_its_ensemble_is_replaced(tmp_path: Path) -> None:
    write(accumulator(), tmp_path / "sums" / "1" / "model.onnx")
    (tmp_path / "sums" / "config.pbtxt").write_text(f"max_batch_size: 8 sequence_batching {{ {STATE} }}")
    steps: Sequence[Step] = [("before", {"a": "in"}, {"x": "mid"}), ("sums", {"INPUT0": "mid"}, {"OUTPUT0": "out"})]
    write_ensemble(tmp_path, "e", ensemble_config(steps, {"in": "FP32 2"}, {"out": "FP32 2"}, rows=1))
    before, config = echo_model(), "max_batch_size: 1"
    settings = explicit(tmp_path, load=("e",))
    async with serving(tmp_path, {"before": before}, config=config, settings=settings) as started:
        stream = Stream(started)
        before.gate.close()
        for place in range(2):
            request = infer("e", {"in": np.ones((1, 2), np.float32)}, parameters={"sequence_id": 5})
            request.parameters["sequence_start"].bool_param = place == 0
            await stream.send(request)
            batcher = started.server.repository.get("e", "").batcher
            await eventually_async(lambda batcher=batcher: len(batcher._running) == 1, "the step is under way")
            touch(tmp_path / "before")
            await load(started, "before")
        await eventually_async(lambda: before.gate.entered == 1, "the first is held")
        before.gate.open()
        sums = [(await stream.message()).infer_response.raw_output_contents[0] for _ in range(2)]
        assert [float(np.frombuffer(one, np.float32)[0]) for one in sums] == [1, 2]
