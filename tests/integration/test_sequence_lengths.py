"""Steps of different sizes share batches, with states of different sizes, and each sequence gets what it gets alone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import grpc
import numpy as np
import onnx
import onnxruntime
import pytest

from paceline.protos import inference_pb2 as pb
from paceline.server.config import Settings
from paceline.server.errors import StartError
from tests import state_models
from tests.integration.regions import register
from tests.integration.scripted import own
from tests.integration.sequence_serving import (
    PATIENT,
    Inputs,
    over_a_stream,
    over_calls,
    result,
    served_with,
    step,
    steps,
)
from tests.integration.serving import failure_of
from tests.shared_objects import add_shared_input, shared_object


def state(name: str, dims: str = "", first: str = "") -> str:
    initial = f'initial_state {{ name: "n" data_type: TYPE_FP32 dims: {first} zero_data: true }}' if first else ""
    return f'state {{ input_name: "{name}" output_name: "{name}_OUT" {f"dims: {dims}" if dims else ""} {initial} }}'


WAITS = "oldest { max_queue_delay_microseconds: 20000 }"
CONFIG_NAMES = {"FP16": "TYPE_FP16", "BF16": "TYPE_BF16", "BYTES": "TYPE_STRING"}
ROWS = "direct { minimum_slot_utilization: 0.5 max_queue_delay_microseconds: 20000 }"
"""Steps that could share a batch have time to meet."""


def config(*states: str, more: str = WAITS, pad: str = "", **parameters: object) -> str:
    axes = f'parameters {{ key: "paceline.pad" value {{ string_value: "{pad}" }} }}' if pad else ""
    return f"max_batch_size: 8 sequence_batching {{ {PATIENT} {' '.join(states)} {more} }} {axes} {own(**parameters)}"


TOLD = " ".join(
    f'control_input {{ name: "{kind}" control {{ kind: CONTROL_SEQUENCE_{kind} fp32_false_true: [0, 1] }} }}'
    for kind in ("START", "READY")
)
KEYS = state("STATE", "[1, -1, 4]", "[1, 0, 4]"), state("SEEN", "-1", "0")
GROWS = state("STATE", "-1", "0")


def chunk(random: np.random.Generator) -> Inputs:
    return {"INPUT0": random.integers(-9, 9, (1, random.integers(1, 20))).astype(np.float32)}


def one_number(random: np.random.Generator) -> Inputs:
    return {"INPUT0": random.integers(-9, 9, (1, 1)).astype(np.float32)}


def text(random: np.random.Generator) -> Inputs:
    size = random.integers(1, 20)
    return {"INPUT0": random.integers(1, 99, (1, size)), "MASK": random.integers(0, 2, (1, size))}


def vectors(random: np.random.Generator, size: int = 0) -> Inputs:
    size = size or random.integers(1, 6)
    vectors = random.standard_normal((1, size, 4)).astype(np.float32)
    return {"INPUT0": vectors, "MASK": np.ones((1, size), np.float32)}


def two_vectors(random: np.random.Generator) -> Inputs:
    return vectors(random, 2)


def alone(
    session: onnxruntime.InferenceSession, inputs: Sequence[Inputs], first: Inputs, told: Sequence[str] = ()
) -> list[np.ndarray]:
    """What the model gives for a sequence of its own, without anything of ours."""
    names = [one.name for one in session.get_outputs()]
    states, answers = first, []
    for number, one in enumerate(inputs):
        controls = {name: np.full((1, 1), name == "READY" or not number, np.float32) for name in told}
        found = dict(zip(names, session.run(None, {**one, **controls, **states}), strict=True))
        answers.append(found["OUTPUT0"])
        states = {name: found[f"{name}_OUT"] for name in states}
    return answers


ONE, EMPTY = np.zeros((1, 1), np.float32), np.zeros((1, 0), np.float32)
CASES = {
    "input alone": (state_models.words(), config(state("STATE"), pad_sizes=32), text, {"STATE": ONE}),
    "own process": (
        state_models.words(),
        config(state("STATE"), pad_sizes=32, own_process=True),
        text,
        {"STATE": ONE},
    ),
    "rows of slots": (
        state_models.words("told"),
        config(state("STATE"), more=f"{ROWS} {TOLD}", pad_sizes=32),
        text,
        {"STATE": ONE},
    ),
    "state of the inputs' size": (
        state_models.last_chunk(),
        config(state("STATE"), pad="INPUT0[1], STATE[1]", pad_sizes=32),
        chunk,
        {"STATE": ONE},
    ),
    "state that grows": (
        state_models.growing(),
        config(GROWS, pad="STATE[1]", pad_sizes=32),
        one_number,
        {"STATE": EMPTY},
    ),
    "state that grows by chunks": (
        state_models.growing("now"),
        config(GROWS, pad="STATE[1], INPUT0[1]", pad_sizes="64,256"),
        chunk,
        {"STATE": EMPTY},
    ),
    "state that waits for its like": (
        state_models.growing("now"),
        config(GROWS, pad="INPUT0[1]", pad_sizes=32),
        chunk,
        {"STATE": EMPTY},
    ),
    "cache of keys": (
        state_models.attentive(),
        config(*KEYS, pad="INPUT0[1], STATE[2], SEEN[1]", pad_sizes="6,64"),
        vectors,
        {"STATE": np.zeros((1, 1, 0, 4), np.float32), "SEEN": EMPTY},
    ),
    "cache found by its mask": (
        state_models.attentive("SEEN_MASK"),
        config(state("STATE", "[1, -1, 4]", "[1, 0, 4]"), state("SEEN_MASK", "-1", "0"), pad_sizes="6,64"),
        two_vectors,
        {"STATE": np.zeros((1, 1, 0, 4), np.float32), "SEEN_MASK": EMPTY},
    ),
    "any common sizes": (
        state_models.attentive(),
        config(*KEYS, pad="INPUT0[1], STATE[2], SEEN[1]", max_batch_elements=2_000),
        vectors,
        {"STATE": np.zeros((1, 1, 0, 4), np.float32), "SEEN": EMPTY},
    ),
}  # fmt: skip
Make = Callable[[np.random.Generator], Inputs]


@pytest.mark.parametrize("send", [over_calls, over_a_stream])
@pytest.mark.parametrize(("model", "settings", "make", "first"), CASES.values(), ids=CASES)
async def test_sequences_of_any_sizes_get_what_they_get_alone(
    tmp_path: Path, model: onnx.ModelProto, settings: str, make: Make, first: Inputs, send: Callable[..., object]
) -> None:
    random = np.random.default_rng(len(settings))
    given = [[make(random) for _ in range(random.integers(1, 10))] for _ in range(12)]
    async with served_with(tmp_path, model, settings) as served:
        requests = [steps(place + 1, inputs) for place, inputs in enumerate(given)]
        answers = await asyncio.gather(*[send(served, one) for one in requests])  # type: ignore[arg-type]
        told = ["START", "READY"] if "READY" in settings else []
        session = onnxruntime.InferenceSession(str(tmp_path / "m" / "1" / "model.onnx"))
        for answer, inputs in zip(answers, given, strict=True):
            expected = alone(session, inputs, first, told)
            for mine, other in zip(answer, expected, strict=True):  # type: ignore[call-overload]
                assert mine.shape == other.shape
                np.testing.assert_allclose(mine, other, atol=1e-5)
        assert await served.metric("nv_inference_exec_count") < sum(map(len, given))
        if "pad_sizes" in settings:
            assert await served.metric("paceline_padding_elements") > 0


async def test_failed_steps_of_any_sizes_leave_states_as_they_were(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    given = [[chunk(random) for _ in range(6)] for _ in range(20)]
    settings = config(GROWS, pad="STATE[1], INPUT0[1]", pad_sizes="64,256")
    async with served_with(tmp_path, state_models.growing("now", "picky"), settings) as served:

        async def play(place: int, inputs: Sequence[Inputs]) -> list[float]:
            answers = []
            for number, request in enumerate(steps(place + 1, inputs)):
                if number and (place + number) % 3 == 0:
                    bad = step(place + 1, {"INPUT0": np.full((1, 1 + place), 1_000, np.float32)})
                    code, why = await failure_of(served.infer(bad))
                    assert code is grpc.StatusCode.INTERNAL
                    assert "the state of its sequence is as it was before" in why
                answers.append(result(await served.infer(request)).item())
            return answers

        answers = await asyncio.gather(*[play(place, inputs) for place, inputs in enumerate(given)])
    for answer, inputs in zip(answers, given, strict=True):
        assert answer == np.cumsum([one["INPUT0"].sum() for one in inputs]).tolist()


@pytest.mark.parametrize("datatype", ["FP16", "BF16", "BYTES"])
async def test_states_of_any_datatype_grow_as_alone(tmp_path: Path, datatype: str) -> None:
    first = f'initial_state {{ name: "n" data_type: {CONFIG_NAMES[datatype]} dims: 0 zero_data: true }}'
    grows = f'state {{ input_name: "STATE" output_name: "STATE_OUT" dims: -1 {first} }}'
    outputs = f'output {{ name: "STATE_OUT" data_type: {CONFIG_NAMES[datatype]} dims: -1 }}'
    settings = config(grows, pad="STATE[1], INPUT0[1]", pad_sizes="8,32") + outputs
    random = np.random.default_rng(0)
    given = []
    for sequence in range(20):
        sizes = random.integers(1, 5, 6)
        words = [np.array([[b"%d" % one for one in random.integers(0, 999, size)]], object) for size in sizes]
        halves = [random.standard_normal((1, size)).astype(np.float16) for size in sizes]
        sent = steps(sequence + 1, [{"INPUT0": one} for one in (words if datatype == "BYTES" else halves)])
        for request in sent:
            request.inputs[0].datatype = datatype  # any 16 bits are a number
        given.append(sent)

    async def play(requests: Sequence[pb.ModelInferRequest]) -> list[bytes]:
        return [(await served.infer(one)).raw_output_contents[0] for one in requests]

    async with served_with(tmp_path, state_models.history(datatype), settings) as served:
        answers = await asyncio.gather(*map(play, given))
        assert await served.metric("paceline_padding_elements") > 0
    for answer, requests in zip(answers, given, strict=True):
        sent_bytes = [one.raw_input_contents[0] for one in requests]
        assert answer == [*accumulate(sent_bytes)]


async def test_state_may_not_grow_beyond_its_bound(tmp_path: Path) -> None:
    settings = config(GROWS, pad="STATE[1], INPUT0[1]", pad_sizes=32, max_state_bytes=4 * 5)
    async with served_with(tmp_path, state_models.growing("now"), settings) as served:

        async def send(sequence: int, size: int, **more: bool) -> float:
            request = step(sequence, {"INPUT0": np.ones((1, size), np.float32)}, **more)
            return float(result(await served.infer(request)).item())

        assert await asyncio.gather(*[send(number, 3, start=True) for number in (1, 2, 3)]) == [3, 3, 3]
        one, other, third = await asyncio.gather(send(1, 3), send(2, 2), send(3, 1), return_exceptions=True)
        assert isinstance(one, grpc.aio.AioRpcError)
        assert one.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert one.details() == (
            "model 'm': expected a step to leave states of at most 20 bytes (paceline.max_state_bytes), got 24; the "
            "state of its sequence is as it was before, or the initial one if it was to start anew: end "
            "the sequence, or begin it anew"
        )
        assert (other, third) == (5, 4)
        assert [await send(1, 2), await send(1, 1, start=True)] == [5, 1]
        assert await send(1, 7, end=True) == 8  # what a last step leaves isn't kept


async def test_two_fronts_hand_on_steps_of_any_sizes(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    given = [[text(random) for _ in range(6)] for _ in range(20)]
    settings = replace(Settings(paths=(tmp_path,)), frontends=2)
    async with served_with(
        tmp_path, state_models.words(), config(state("STATE"), pad_sizes=32), settings=settings
    ) as served:
        requests = [steps(place + 1, inputs) for place, inputs in enumerate(given)]
        answers = await asyncio.gather(*[over_a_stream(served, one) for one in requests])
        session = onnxruntime.InferenceSession(str(tmp_path / "m" / "1" / "model.onnx"))
        for answer, inputs in zip(answers, given, strict=True):
            for mine, other in zip(answer, alone(session, inputs, {"STATE": ONE}), strict=True):
                np.testing.assert_array_equal(mine, other)
        assert await served.metric("paceline_padding_elements") > 0


async def test_steps_of_any_sizes_may_be_in_shared_memory(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    given = [[one_number(random) for _ in range(6)] for _ in range(8)]
    allowed = Settings(paths=(tmp_path,), allow_client_shm=True)
    settings = config(GROWS, pad="STATE[1]", pad_sizes=8)
    with shared_object(4 * 6 * 8) as memory:
        async with served_with(tmp_path, state_models.growing(), settings, allowed) as served:
            await register(served, "r", memory.key, 4 * 6 * 8)
            requests = [steps(place + 1, inputs) for place, inputs in enumerate(given)]
            for place, (sequence, inputs) in enumerate(zip(requests, given, strict=True)):
                for number, (request, one) in enumerate(zip(sequence, inputs, strict=True)):
                    offset = 4 * (6 * place + number)
                    memory.put(one["INPUT0"], offset)
                    del request.inputs[:], request.raw_input_contents[:]
                    add_shared_input(request, "INPUT0", "FP32", [1, 1], "r", 4, offset)
            answers = await asyncio.gather(*[over_a_stream(served, one) for one in requests])
    for answer, inputs in zip(answers, given, strict=True):
        np.testing.assert_array_equal(answer, np.cumsum([one["INPUT0"] for one in inputs], axis=0))


async def test_input_of_another_size_than_the_state_fails_alone(tmp_path: Path) -> None:
    settings = config(state("STATE", "-1", "1"), pad="STATE[1]", pad_sizes=8)
    async with served_with(tmp_path, state_models.marked(), settings) as served:

        def one(size: int, **more: bool) -> pb.ModelInferRequest:
            inputs = {"INPUT0": np.full((1, 1), size, np.float32), "MARKS": np.ones((1, size), np.float32)}
            return step(5, inputs, **more)

        await served.infer(one(1, start=True))
        code, why = await failure_of(served.infer(one(3)))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert "model 'm': expected one size in the axes of length 'past', got MARKS[1]: 3, STATE[1]: 2" in why
        answers = [result(await served.infer(one(size))).item() for size in (2, 3)]
        assert answers == [1, 1 + 2]


@pytest.mark.parametrize(
    ("model", "settings", "text"),
    [
        (
            state_models.words("leaky"),
            config(state("STATE"), pad="INPUT0[1]"),
            "paceline.pad: output 'STATE_OUT' of a request of size 5 differs from alone by",
        ),
        (
            state_models.growing("now", "front"),
            config(GROWS, pad="INPUT0[1], STATE[1]"),
            "and is the state of the step after it",
        ),
        (
            state_models.growing(kind="window"),
            config(state("STATE", "-1", "3"), pad="STATE[1]"),
            "and is the state of the step after it",
        ),
        (
            state_models.two_memories(),
            config(GROWS, state("OTHER", "-1", "0"), pad="STATE[1]"),
            "paceline.pad: the states 'STATE' and 'OTHER' share the length 'past', but a step leaves different sizes",
        ),
        (
            state_models.two_memories(),
            config(GROWS, state("OTHER", "-1", "1"), pad="STATE[1]"),
            "paceline.pad: the states 'STATE' and 'OTHER' share the length 'past', but a sequence begins with "
            "different sizes",
        ),
        (
            state_models.recurrent(),
            config(state("STATE"), pad="INPUT0[1]"),
            "paceline.pad: expected off, as requests can't be filled up with inputs without a batch axis, such as "
            "RATE, got INPUT0[1]",
        ),
        (
            state_models.accumulator(),
            config(state("STATE"), pad="STATE[1]"),
            "paceline.pad: input 'STATE': expected an axis of free size, got axis 1, which is 2",
        ),
        (
            state_models.accumulator(),
            config(state("STATE"), pad_sizes=8),
            "paceline.pad_sizes: expected none, as no axes were found along which requests may be filled up; name them "
            "in paceline.pad, got [8]",
        ),
    ],
)  # fmt: skip
async def test_lengths_that_a_state_cannot_have_are_refused(
    tmp_path: Path, model: onnx.ModelProto, settings: str, text: str
) -> None:
    with pytest.raises(StartError) as caught:
        async with served_with(tmp_path, model, settings):
            pass
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("case", "axes"),
    [("input alone", "INPUT0[1]=0, MASK[1]=0"), ("cache found by its mask", "STATE[2]=0, SEEN_MASK[1]=0")],
)
async def test_padding_that_was_found_is_served_again_as_configured(tmp_path: Path, case: str, axes: str) -> None:
    model, settings, *_ = CASES[case]
    async with served_with(tmp_path, model, settings) as served:
        shown = (await served.stub.ModelConfig(pb.ModelConfigRequest(name="m"))).config
        assert shown.parameters["paceline.pad"].string_value == axes
