"""Models with memory, served: what a step gets depends on the steps before it in its sequence, and on nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import grpc
import numpy as np
import pytest

from paceline.protos import inference_pb2 as pb
from paceline.server.config import ControlMode, Settings
from paceline.server.errors import StartError
from tests import models, state_models
from tests.integration.regions import register
from tests.integration.scripted import own
from tests.integration.sequence_serving import (
    KEEPS,
    PATIENT,
    STATE,
    TOLD,
    Inputs,
    numbers,
    over_a_stream,
    over_calls,
    result,
    served_with,
    step,
    steps,
    sums,
)
from tests.integration.serving import Served, failure_of, serving
from tests.shared_objects import add_shared_input, shared_object
from tests.wire import infer


@pytest.mark.parametrize("send", [over_calls, over_a_stream])
@pytest.mark.parametrize(
    "config",
    [
        KEEPS,
        f"{KEEPS} {own(own_process='true')}",
        f"{KEEPS} instance_group {{ count: 2 }}",
        KEEPS.replace("oldest { }", "direct { }"),
        KEEPS.replace("max_batch_size: 8", "max_batch_size: 0").replace(
            "sequence_b",
            'input { name: "INPUT0" data_type: TYPE_FP32 dims: [1, 2] } '
            'output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [1, 2] } sequence_b',
        ).replace(' output_name: "STATE_OUT"', ' output_name: "STATE_OUT" data_type: TYPE_FP32 dims: [1, 2]'),
    ],
    ids=["oldest", "own-process", "instances", "direct", "no-batches"],
)  # fmt: skip
async def test_interleaved_sequences_keep_their_states_apart(tmp_path: Path, config: str, send: object) -> None:
    async with served_with(tmp_path, state_models.accumulator(), config) as served:
        given = [numbers(sequence, 8) for sequence in range(16)]
        requests = [steps(f"s{place}" if place % 2 else place + 1, inputs) for place, inputs in enumerate(given)]
        answers = await asyncio.gather(*[send(served, one) for one in requests])  # type: ignore[operator]
        for answer, inputs in zip(answers, given, strict=True):
            np.testing.assert_array_equal(answer, sums(inputs))
        assert await served.metric("nv_inference_count") == 16 * 8
        assert await served.metric("paceline_sequences", 'model="m",state="live",version="1"') == 0
        assert await served.metric("paceline_ended_sequences", 'model="m",reason="end",version="1"') == 16
        # Callers who wait for each answer may come too late to meet.
        if send is over_a_stream and "instances" not in config and "max_batch_size: 0" not in config:
            assert await served.metric("nv_inference_exec_count") < 16 * 8


async def test_batch_axis_may_be_another_and_a_scalar_is_shared(tmp_path: Path) -> None:
    async with served_with(
        tmp_path, state_models.recurrent(), f"max_batch_size: 8 sequence_batching {{ {STATE} }}"
    ) as served:
        given, expected, requests = [], [], []
        for sequence in range(12):
            inputs = numbers(sequence, 6, 3)
            rate, state = sequence % 2 + 1, np.zeros((2, 1, 3), np.float32)
            outputs = []
            for one in inputs:
                state = state / 2 + one["INPUT0"]
                outputs.append(rate * state.sum(axis=0))
                one["RATE"] = np.array(rate, np.int64)
            given.append(inputs)
            expected.append(outputs)
            requests.append(steps(sequence + 1, inputs))
        answers = await asyncio.gather(*[over_a_stream(served, one) for one in requests])
        np.testing.assert_allclose(answers, expected, rtol=1e-6)
        assert await served.metric("nv_inference_exec_count") < 12 * 6


@pytest.mark.parametrize("frontends", [1, 2])
@pytest.mark.parametrize(
    ("kind", "config"), [("alone", KEEPS), ("alone", f"sequence_batching {{ {STATE} }}"), ("scalar", KEEPS)]
)
async def test_model_may_have_no_rows_but_its_states(tmp_path: Path, kind: str, config: str, frontends: int) -> None:
    inputs: Inputs = {"INPUT0": np.array(1, np.float32)} if kind == "scalar" else {}
    settings = replace(Settings(paths=(tmp_path,)), frontends=frontends)
    async with served_with(tmp_path, state_models.counter(kind), config, settings) as served:
        for _ in range(2):  # the second time, requests are known
            calls = [over_a_stream(served, steps(id_, [inputs] * 10)) for id_ in range(1, 21)]
            np.testing.assert_array_equal(np.squeeze(await asyncio.gather(*calls)), [[*range(10)]] * 20)
        assert await served.metric("nv_inference_exec_count") < 2 * 20 * 10


async def test_state_that_grows_from_nothing_waits_for_its_like(tmp_path: Path) -> None:
    empty = 'dims: -1 initial_state { name: "none" data_type: TYPE_FP32 dims: 0 zero_data: true }'
    config = f"sequence_batching {{ {STATE.replace(' }', f' {empty} }}')} }}"
    async with served_with(tmp_path, state_models.growing(), config) as served:
        given = [numbers(sequence, 4 + sequence, 1) for sequence in range(6)]
        answers = await asyncio.gather(
            *[over_a_stream(served, steps(place + 1, one)) for place, one in enumerate(given)]
        )
        for answer, inputs in zip(answers, given, strict=True):
            np.testing.assert_array_equal(answer, sums(inputs))


async def test_direct_rows_are_those_of_their_slots(tmp_path: Path) -> None:
    async with served_with(tmp_path, state_models.told(), TOLD % "direct { }") as served:
        # The first three take the slots 0 to 2; then one step in the third slot alone.
        for id_ in (11, 12, 13):
            answer = await served.infer(step(id_, {"INPUT0": np.array([[id_]], np.int32)}, start=True))
            assert (result(answer).item(), result(answer, 1).item()) == (id_ + 1, id_)
        answer = await served.infer(step(13, {"INPUT0": np.array([[5]], np.int32)}))
        assert (result(answer).item(), result(answer, 1).item()) == (5, 13)
        assert await served.metric("nv_inference_count") == 4  # rows without a step aren't counted


@pytest.mark.parametrize("strategy", ["direct { }", "oldest { }"])
async def test_model_is_told_of_each_step(tmp_path: Path, strategy: str) -> None:
    async with served_with(tmp_path, state_models.told(), TOLD % strategy) as served:
        given = [[{"INPUT0": np.array([[sequence]], np.int32)}] * 5 for sequence in range(20)]

        async def told(id_: int, inputs: Sequence[Inputs]) -> list[tuple[int, int]]:
            answers = [await served.infer(one) for one in steps(id_, inputs)]
            return [(result(one).item(), result(one, 1).item()) for one in answers]

        answers = await asyncio.gather(*[told(100 + place, one) for place, one in enumerate(given)])
        for place, answer in enumerate(answers):
            assert answer == [(place + (not number), 100 + place) for number in range(5)]


async def test_steps_without_their_sequence_are_refused_with_tritons_words(tmp_path: Path) -> None:
    one = numbers(0, 1)[0]
    async with served_with(tmp_path, state_models.accumulator(), KEEPS) as served:
        await served.infer(step(5, one, start=True, end=True))
        for request, phrase in (
            (infer("m", one), "must specify a non-zero or non-empty correlation ID"),
            (
                step(5, one),
                "inference request for sequence 5 to model 'm' must specify the START flag on the first request of the "
                "sequence",
            ),
            (step("5", one), "must specify the START flag"),
        ):
            code, text = await failure_of(served.infer(request))
            assert code is grpc.StatusCode.INVALID_ARGUMENT
            assert phrase in text
            assert text.count("'m'") == 1
        two = {"INPUT0": np.zeros((2, 2), np.float32)}
        code, text = await failure_of(served.infer(step(7, two, start=True)))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert "must specify batch-size 1 due to requirements of sequence batcher" in text


async def test_bad_step_leaves_its_sequence_alone(tmp_path: Path) -> None:
    async with served_with(tmp_path, state_models.accumulator(), KEEPS) as served:
        first, second = numbers(0, 2)
        await served.infer(step(5, first, start=True))
        code, _ = await failure_of(served.infer(step(5, {"INPUT0": np.zeros((1, 3), np.float32)}, end=True)))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        code, text = await failure_of(served.infer(step(5, {"STATE": np.zeros((1, 2), np.float32)})))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert "STATE" in text
        np.testing.assert_array_equal(result(await served.infer(step(5, second, end=True))), sums([first, second])[1])


async def test_last_step_that_fails_says_that_its_sequence_has_ended(tmp_path: Path) -> None:
    async with served_with(tmp_path, state_models.picky(), KEEPS) as served:
        one = numbers(0, 1)[0]
        await served.infer(step(5, one, start=True))
        _, text = await failure_of(served.infer(step(5, {"INPUT0": np.full((1, 2), 1000, np.float32)}, end=True)))
        assert text.endswith("; its sequence has ended, as this was to be its last step")
        _, text = await failure_of(served.infer(step(5, one)))
        assert text.endswith(
            "must specify the START flag on the first request of the sequence: the last step of it "
            "failed, and ended it all the same"
        )


async def test_idle_sequence_is_gone_with_the_reason(tmp_path: Path) -> None:
    config = KEEPS.replace(PATIENT, "max_sequence_idle_microseconds: 1000")
    async with served_with(tmp_path, state_models.accumulator(), config) as served:
        one = numbers(0, 1)[0]
        await served.infer(step(5, one, start=True))
        while await served.metric("paceline_sequences", 'model="m",state="live",version="1"'):
            pass
        _, text = await failure_of(served.infer(step(5, one)))
        assert "must specify the START flag" in text
        assert "max_sequence_idle_microseconds" in text


async def test_sequence_goes_on_over_a_load_of_the_same_files(tmp_path: Path) -> None:
    explicit = Settings(paths=(tmp_path,), model_control_mode=ControlMode.EXPLICIT, load_models=("m",))
    async with served_with(tmp_path, state_models.accumulator(), KEEPS, explicit) as served:
        first, second = numbers(0, 2)
        await served.infer(step(5, first, start=True))
        await served.stub.RepositoryModelLoad(pb.RepositoryModelLoadRequest(model_name="m"))
        last = result(await served.infer(step(5, second, end=True)))
        assert np.array_equal(last, sums([first, second])[-1])
        told = await served.stub.ModelStatistics(pb.ModelStatisticsRequest(name="m"))
        assert told.model_stats[0].inference_stats.success.count == 2


async def test_reload_tells_callers_that_their_sequences_are_gone(tmp_path: Path) -> None:
    explicit = Settings(paths=(tmp_path,), model_control_mode=ControlMode.EXPLICIT, load_models=("m",))
    async with served_with(tmp_path, state_models.accumulator(), KEEPS, explicit) as served:
        one = numbers(0, 1)[0]
        await served.infer(step(5, one, start=True))
        (tmp_path / "m" / "config.pbtxt").write_text(f"{KEEPS} # changed")
        models.write(state_models.accumulator("FP32", ("batch", 2)), tmp_path / "m" / "1" / "model.onnx")
        await served.stub.RepositoryModelLoad(pb.RepositoryModelLoadRequest(model_name="m"))
        code, text = await failure_of(served.infer(step(5, one)))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert "must specify the START flag" in text
        assert "loaded again" in text
        await served.stub.RepositoryModelUnload(pb.RepositoryModelUnloadRequest(model_name="m"))
        code, _ = await failure_of(served.infer(step(5, one, start=True)))
        assert code is grpc.StatusCode.NOT_FOUND


async def test_steps_may_have_their_inputs_in_shared_memory(tmp_path: Path) -> None:
    given = numbers(0, 5)
    settings = Settings(paths=(tmp_path,), allow_client_shm=True)
    with shared_object(8) as memory:
        async with served_with(tmp_path, state_models.accumulator(), KEEPS, settings) as served:
            await register(served, "r", memory.key, 8)
            answers = []
            for request, one in zip(steps(1, given), given, strict=True):
                memory.put(one["INPUT0"])
                del request.inputs[:], request.raw_input_contents[:]
                add_shared_input(request, "INPUT0", "FP32", [1, 2], "r", 8)
                answers.append(result(await served.infer(request)))
            np.testing.assert_array_equal(answers, sums(given))


async def test_full_backlog_and_limit_of_sequences_are_refused(tmp_path: Path) -> None:
    config = f"{KEEPS} {own(max_sequences='1', sequence_backlog='1')}"
    async with served_with(tmp_path, state_models.accumulator(), config) as served:
        one = numbers(0, 1)[0]
        await served.infer(step(1, one, start=True))
        waiting = asyncio.ensure_future(served.infer(step(2, one, start=True, end=True)))
        while not served.waiting("m"):
            await asyncio.sleep(0)
        code, text = await failure_of(served.infer(step(3, one, start=True)))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "paceline.sequence_backlog" in text
        await served.infer(step(1, one, end=True))
        np.testing.assert_array_equal(result(await waiting), one["INPUT0"])


async def test_two_fronts_keep_the_order_of_a_streams_steps(tmp_path: Path) -> None:
    settings = replace(Settings(paths=(tmp_path,)), frontends=2)
    async with served_with(tmp_path, state_models.accumulator(), KEEPS, settings) as served:
        given = [numbers(sequence, 10) for sequence in range(10)]
        answers = await asyncio.gather(
            *[over_a_stream(served, steps(place + 1, one)) for place, one in enumerate(given)]
        )
        for answer, inputs in zip(answers, given, strict=True):
            np.testing.assert_array_equal(answer, sums(inputs))


REMEMBERS = """
class Model:
    inputs = {"INPUT0": ("FP32", [-1, 2]), "START": ("BOOL", [-1, 1]), "CORRID": ("UINT64", [-1, 1])}
    outputs = {"OUTPUT0": ("FP32", [-1, 2]), "OVER": ("BYTES", [-1, 1])}

    def load(self, context):
        self.sums, self.over = {}, []

    def execute(self, inputs):
        answers = []
        for row, start, (id,) in zip(inputs["INPUT0"], inputs["START"], inputs["CORRID"]):
            self.sums[id] = row + (0 if start else self.sums[id])
            answers.append(self.sums[id])
        return {"OUTPUT0": answers, "OVER": [[",".join(self.over)]] * len(answers)}

    def sequence_over(self, sequence, why):
        del self.sums[sequence]
        self.over.append(f"{sequence}:{why}")
"""
REMEMBERS_CONFIG = """
    backend: "python" max_batch_size: 4 instance_group { count: 2 kind: KIND_CPU }
    sequence_batching {
      max_sequence_idle_microseconds: %d
      oldest { max_candidate_sequences: 8 }
      control_input { name: "START" control { kind: CONTROL_SEQUENCE_START bool_false_true: [false, true] } }
      control_input { name: "CORRID" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 } }
    }
"""


@asynccontextmanager
async def remembering(root: Path, idle_us: int) -> AsyncIterator[Served]:
    (root / "m" / "1").mkdir(parents=True)
    (root / "m" / "1" / "model.py").write_text(REMEMBERS)
    (root / "m" / "config.pbtxt").write_text(REMEMBERS_CONFIG % idle_us)
    async with serving(root, settings=Settings(paths=(root,), allow_python_models=True)) as served:
        yield served


async def test_python_models_sequences_stay_in_their_process(tmp_path: Path) -> None:
    async with remembering(tmp_path, 60_000_000) as served:
        given = [numbers(sequence, 10) for sequence in range(12)]
        answers = await asyncio.gather(
            *[over_a_stream(served, steps(place + 1, one)) for place, one in enumerate(given)]
        )
        for answer, inputs in zip(answers, given, strict=True):
            np.testing.assert_array_equal(answer, sums(inputs))


async def test_python_model_is_told_when_a_sequence_is_over(tmp_path: Path) -> None:
    async with remembering(tmp_path, 1_000) as served:
        one = numbers(0, 1)[0]
        await served.infer(step(1, one, start=True, end=True))
        await served.infer(step(2, one, start=True))
        while await served.metric("paceline_sequences", 'model="m",state="live",version="1"'):
            pass
        # Two instances, of which either has held one of them or both.
        told = set()
        for id_ in range(3, 9):
            answer = await served.infer(step(id_, one, start=True))
            told |= {*answer.raw_output_contents[1][4:].decode().split(",")}
        assert {"1:end", "2:idle"} <= told


@pytest.mark.parametrize(
    ("datatype", "id_", "shown"),
    [("INT64", -5, "-5"), ("UINT64", -5, str(2**64 - 5)), ("UINT32", 2**40 + 7, "7"), ("BYTES", "a", "b'a'")],
)
async def test_model_is_told_the_id_that_it_knows(tmp_path: Path, datatype: str, id_: int | str, shown: str) -> None:
    (tmp_path / "m" / "1").mkdir(parents=True)
    code = REMEMBERS.replace("UINT64", datatype).replace('f"{sequence}:', 'f"{sequence!r}:')
    (tmp_path / "m" / "1" / "model.py").write_text(code)
    config = (
        (REMEMBERS_CONFIG % 0).replace("UINT64", datatype.replace("BYTES", "STRING")).replace("count: 2", "count: 1")
    )
    (tmp_path / "m" / "config.pbtxt").write_text(config)
    async with serving(tmp_path, settings=Settings(paths=(tmp_path,), allow_python_models=True)) as served:
        one = numbers(0, 1)[0]
        other: int | str = "b" if isinstance(id_, str) else 1
        await served.infer(step(id_, one, start=True, end=True))
        answer = await served.infer(step(other, one, start=True))
        warm_up = "b''" if isinstance(id_, str) else "0"
        assert answer.raw_output_contents[1][4:].decode() == f"{warm_up}:end,{shown}:end"


async def test_dims_of_a_state_bind_if_clients_get_it(tmp_path: Path) -> None:
    config = """
        max_batch_size: 8
        output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [1] }
        output { name: "STATE_OUT" data_type: TYPE_FP32 dims: [-1] }
        sequence_batching { state { input_name: "STATE" output_name: "STATE_OUT" dims: [2] } }
    """
    path = models.write(state_models.growing(), tmp_path / "m" / "1" / "model.onnx")
    (path.parents[1] / "config.pbtxt").write_text(config)
    with pytest.raises(StartError, match=r"output 'STATE_OUT': expected shape \[1, 2\], got \[1, 3\]"):
        async with serving(tmp_path):
            pass
