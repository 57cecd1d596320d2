"""Steps of sequences on their way to another server: what goes along, in which order, and over which connection."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import text_format

from paceline.protos import inference_pb2 as pb
from paceline.protos import model_config_pb2 as config_pb
from paceline.server.config import Settings
from tests.integration.scripted import request, send
from tests.integration.serving import Served, failure_of
from tests.integration.streams import Stream
from tests.integration.upstreams import Upstream, behind, fp32, tensors_of
from tests.polling import eventually_async

Code = grpc.StatusCode

SEQUENCES = """
    name: "m" max_batch_size: 8
    sequence_batching { max_sequence_idle_microseconds: 60000000 oldest { max_candidate_sequences: 16 } }
"""


class Stateful(Upstream):
    """An upstream whose `m` wants steps of sequences. `peers` are the connections that each sequence came over."""

    def __init__(self) -> None:
        super().__init__()
        self.config = text_format.Parse(SEQUENCES, config_pb.ModelConfig())
        self.peers = defaultdict[Any, set[str]](set)

    async def ModelInfer(self, request: pb.ModelInferRequest, context: Any) -> pb.ModelInferResponse:
        self.peers[id_of(request)].add(context.peer())
        return await super().ModelInfer(request, context)

    @property
    def order(self) -> dict[Any, list[float]]:
        """The marks of each sequence's steps, in the order in which they came."""
        order = defaultdict[Any, list[float]](list)
        for call, (mark,) in zip(self.calls, self.marks, strict=True):
            order[id_of(call)].append(mark)
        return dict(order)


def value_of(parameter: pb.InferParameter) -> Any:
    return getattr(parameter, str(parameter.WhichOneof("parameter_choice")))


def id_of(request: pb.ModelInferRequest) -> Any:
    return value_of(request.parameters["sequence_id"])


def told(call: pb.ModelInferRequest) -> dict[str, Any]:
    return {key: value_of(one) for key, one in call.parameters.items()}


def step(sequence: int | str, mark: float = 0, *, start: bool = False, end: bool = False) -> pb.ModelInferRequest:
    made = request(mark)
    if isinstance(sequence, str):
        made.parameters["sequence_id"].string_param = sequence
    else:
        made.parameters["sequence_id"].int64_param = sequence
    made.parameters["sequence_start"].bool_param = start
    made.parameters["sequence_end"].bool_param = end
    return made


async def run(served: Served, *steps: pb.ModelInferRequest) -> None:
    """Send the steps one after the other; each gets its own answer."""
    for one in steps:
        answer = await served.infer(one)
        assert tensors_of(answer)["x"].tolist() == (2 * fp32(one)).tolist()


async def test_steps_take_along_where_they_are_in_their_sequence(tmp_path: Path) -> None:
    stub = Stateful()
    async with behind(tmp_path, stub) as served:
        for sequence in (7, -2, 2**62, "seven"):
            stub.calls.clear()
            await run(served, step(sequence, 1, start=True), step(sequence, 2), step(sequence, 3, end=True))
            assert [told(call) for call in stub.calls] == [
                {"sequence_id": sequence, "sequence_start": start, "sequence_end": end}
                for start, end in ((True, False), (False, False), (False, True))
            ]


async def test_sequences_go_side_by_side_and_their_steps_one_by_one(tmp_path: Path) -> None:
    stub = Stateful()
    async with behind(tmp_path, stub) as served:
        stub.gate.clear()
        stream = Stream(served)
        for mark in range(1, 5):
            await stream.send(*(step(sequence, mark, start=mark == 1, end=mark == 4) for sequence in (1, 2, "3")))
        await eventually_async(lambda: stub.under_way == 3 and served.waiting("m") == 9, "the first steps are there")
        stub.gate.set()
        for _ in range(12):
            await stream.message()
        assert stub.order == {sequence: [1, 2, 3, 4] for sequence in (1, 2, "3")}


async def test_order_holds_through_several_fronts(tmp_path: Path) -> None:
    stub, sequences = Stateful(), range(1, 9)
    async with behind(tmp_path, stub, settings=Settings(paths=(), frontends=2)) as served:
        streams = [Stream(served) for _ in sequences]
        for mark in range(1, 21):
            for sequence, stream in zip(sequences, streams, strict=True):
                await stream.send(step(sequence, mark, start=mark == 1))
        for stream in streams:
            for _ in range(20):
                assert not (await stream.message()).error_message
        assert stub.order == {sequence: [*range(1, 21)] for sequence in sequences}


async def test_sequence_keeps_to_one_of_several_connections(tmp_path: Path) -> None:
    stub, sequences = Stateful(), [1, 2, 3, 4, "five", "six", "seven"]
    async with behind(tmp_path, stub, connections=4) as served:
        await asyncio.gather(
            *(run(served, *(step(one, mark, start=mark == 1) for mark in range(1, 6))) for one in sequences)
        )
    assert {one: len(stub.peers[one]) for one in sequences} == dict.fromkeys(sequences, 1)
    assert len(set.union(*stub.peers.values())) == 4


async def test_steps_that_fit_no_sequence_are_refused_without_a_call(tmp_path: Path) -> None:
    stub = Stateful()
    async with behind(tmp_path, stub) as served:
        for bad, phrase in (
            (request(1), "must specify a non-zero or non-empty correlation ID"),
            (step(7), "must specify the START flag on the first request of the sequence"),
        ):
            code, text = await failure_of(served.infer(bad))
            assert (code, phrase in text) == (Code.INVALID_ARGUMENT, True)
        assert not stub.calls


async def test_failed_step_is_sent_once_and_the_sequence_goes_on(tmp_path: Path) -> None:
    stub = Stateful()
    stub.abort = lambda one: (Code.INTERNAL, "no good") if fp32(one)[0, 0] == 2 else None
    async with behind(tmp_path, stub) as served:
        await run(served, step(7, 1, start=True))
        code, text = await failure_of(served.infer(step(7, 2)))
        assert (code, text.endswith("no good")) == (Code.INTERNAL, True)
        await run(served, step(7, 3))
        assert stub.order == {7: [1, 2, 3]}


async def test_step_under_way_goes_on_without_its_caller(tmp_path: Path) -> None:
    """Nobody could tell whether the next one finds what it has left."""
    stub = Stateful()
    stub.gates[1] = asyncio.Event()
    async with behind(tmp_path, stub) as served:
        (first,) = send(served, step(7, 1, start=True))
        await eventually_async(lambda: stub.under_way == 1, "the first step is there")
        (second,) = send(served, step(7, 2))
        await eventually_async(lambda: served.waiting("m") == 1, "the second step waits")
        first.cancel()
        await eventually_async(lambda: served.failed() == 1, "the caller is gone")
        await run(served, step(8, 3, start=True))
        assert (stub.under_way, served.waiting("m")) == (1, 1)
        stub.gates[1].set()
        assert tensors_of(await second)["x"][0, 0] == 4
        assert stub.order == {7: [1, 2], 8: [3]}


@pytest.mark.parametrize("batched", [8, 0])
async def test_configuration_shows_the_upstreams_sequences(tmp_path: Path, batched: int) -> None:
    stub = Stateful()
    assert stub.config is not None
    stub.config.max_batch_size = batched
    async with behind(tmp_path, stub) as served:
        shown = (await served.stub.ModelConfig(pb.ModelConfigRequest(name="m"))).config
        assert shown.sequence_batching == stub.config.sequence_batching
        assert shown.max_batch_size == batched
        assert not shown.HasField("dynamic_batching")
        await run(served, step(7, 1, start=True, end=True))
