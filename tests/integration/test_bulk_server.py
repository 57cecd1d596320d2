"""Rows through a running server: in full calls, whatever it refuses, and while it is started anew."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import numpy as np
import pyarrow as pa
import pytest
from onnxruntime import InferenceSession

from paceline.backends.errors import ExecutionError
from paceline.backends.spec import Array, Tensors
from paceline.clients.options import ConnectionOptions
from paceline.protos import inference_pb2 as pb
from paceline.server.bulk.models import ServerModel, server_model
from paceline.server.bulk.settings import Parameters
from paceline.server.bulk.values import BulkError
from paceline.server.config import Settings
from paceline.server.limits import Limits
from tests import decoder_models, models
from tests.generation_truth import Asked, NaiveLoop
from tests.harness import ServerProcess
from tests.integration.computing_rows import Became, rows_became
from tests.integration.serving import Served, echo_model, serving
from tests.polling import eventually_async
from tests.ports import free_port
from tests.unit.clients.peer import Peer
from tests.unit.clients.peer import serving as serving_peer

BATCHED = "max_batch_size: 8 dynamic_batching { }"
NUMBERS = {number: [float(number)] for number in range(20)}


def column(rows: Sequence[Sequence[float]] = tuple(NUMBERS.values())) -> dict[str, pa.Array]:
    return {"a": pa.array(rows, pa.list_(pa.float32(), len(rows[0])))}


@asynccontextmanager
async def asking(served: Served, name: str = "m", parameters: Parameters | None = None) -> AsyncIterator[ServerModel]:
    async with server_model(served.target, name, access=ConnectionOptions(), parameters=parameters or {}) as model:
        yield model


async def test_calls_are_full_and_outputs_in_place(tmp_path: Path) -> None:
    async with serving(tmp_path, {"m": (memory := echo_model())}, config=BATCHED) as served, asking(served) as model:
        assert (model.max_rows, model.at_once) == (8, 2)
        assert await rows_became(model, column()) == Became(NUMBERS)
        assert sorted(sum(rows) for rows in memory.batches) == [4, 8, 8]


async def test_server_that_cannot_be_reached_is_given_up_with_the_reason() -> None:
    target, access = f"127.0.0.1:{free_port()}", ConnectionOptions()
    with pytest.raises(BulkError, match=f"^--server {target}: not ready within 0.05 s: Connection refused$"):
        async with server_model(target, "m", access=access, parameters={}, start_s=0.05):
            pass


async def test_row_that_the_model_refuses_is_found(tmp_path: Path) -> None:
    def has_5(inputs: Tensors) -> bool:
        return bool((inputs[0] == 5).any())

    async with serving(tmp_path, {"m": (memory := echo_model())}, config=BATCHED) as served, asking(served) as model:
        memory.faults.raise_when(has_5, ExecutionError("5 is out of range"))
        became = await rows_became(model, column())
    assert became.outputs == {number: row for number, row in NUMBERS.items() if number != 5}
    assert became.reasons.keys() == {5}
    assert "5 is out of range" in became.reasons[5]


class OtherStreams(Peer):
    """As MLServer: a stream ends with its first answer, which is no ModelStreamInferResponse, but reads as if it were
    an error."""

    def ModelStreamInfer(
        self, requests: Iterator[pb.ModelInferRequest], context: grpc.ServicerContext
    ) -> Iterator[pb.ModelStreamInferResponse]:
        yield pb.ModelStreamInferResponse(error_message=next(requests).model_name)


class FullOnce(Peer):
    """As Triton: a stream's errors don't say their status. `called` counts what didn't come over streams."""

    called = 0

    def ModelInfer(self, request: pb.ModelInferRequest, context: grpc.ServicerContext) -> pb.ModelInferResponse:
        self.called += 1
        return super().ModelInfer(request, context)

    def ModelStreamInfer(
        self, requests: Iterator[pb.ModelInferRequest], context: grpc.ServicerContext
    ) -> Iterator[pb.ModelStreamInferResponse]:
        for number, request in enumerate(requests):
            answer = super().ModelInfer(request, context)
            full = "Exceeds maximum queue size" if number == 2 else ""
            yield pb.ModelStreamInferResponse(error_message=full, infer_response=answer)


async def test_error_without_a_status_leaves_streams_in_use() -> None:
    with serving_peer(full := FullOnce()) as peer:
        for tensors in (peer.model.inputs, peer.model.outputs):
            tensors.add(name="a", datatype="FP32", shape=[-1, 1])
        async with server_model(peer.target, "m", access=ConnectionOptions(), parameters={}, batch_rows=1) as model:
            for _ in range(5):
                await model.infer({"a": np.ones((1, 1), np.float32)}, ["a"])
    assert full.called == 1


@pytest.mark.parametrize("kind", [Peer, OtherStreams])
async def test_server_without_such_streams_is_called(kind: type[Peer]) -> None:
    with serving_peer(kind()) as peer:
        for tensors in (peer.model.inputs, peer.model.outputs):
            tensors.add(name="a", datatype="FP32", shape=[-1, 1])
        async with server_model(peer.target, "m", access=ConnectionOptions(), parameters={}, batch_rows=1) as model:
            assert await rows_became(model, column()) == Became(NUMBERS)


async def test_full_queue_is_waited_for(tmp_path: Path) -> None:
    config = "max_batch_size: 1 dynamic_batching { default_queue_policy { max_queue_size: 1 } } "
    config += "instance_group [ { count: 1 } ]"
    async with serving(tmp_path, {"m": (memory := echo_model())}, config=config) as served, asking(served) as model:
        model.at_once = 8
        memory.gate.close()
        computing = asyncio.ensure_future(rows_became(model, column(), 1))
        await eventually_async(served.failed, "a request that the full queue refuses")
        memory.gate.open()
        assert await computing == Became(NUMBERS)


class Watched:
    """`Computes` that says when it has answered first."""

    def __init__(self, model: ServerModel) -> None:
        self._model = model
        self.description, self.max_rows, self.batch_sizes = model.description, model.max_rows, model.batch_sizes
        self.max_elements, self.at_once, self.lengths = model.max_elements, model.at_once, model.lengths
        self.answered = asyncio.Event()

    async def infer(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> Mapping[str, Array]:
        result = await self._model.infer(inputs, outputs)
        self.answered.set()
        return result


async def test_server_that_is_killed_and_started_anew_loses_no_row(tmp_path: Path) -> None:
    path = models.write(models.mlp(), tmp_path / "m.onnx")
    listen = ("--grpc-address", "127.0.0.1", "--grpc-port", str(port := free_port()))
    x = np.random.default_rng(0).standard_normal((1_000, 16)).astype(np.float32)
    columns = {"INPUT0": pa.FixedSizeListArray.from_arrays(pa.array(x.ravel()), 16)}
    said, access = list[str](), ConnectionOptions()
    (expected,) = InferenceSession(path).run(None, {"INPUT0": x})
    with ServerProcess(path, listen=listen) as first:
        async with server_model(f"127.0.0.1:{port}", "m", access=access, parameters={}, say=said.append) as model:
            watched = Watched(model)
            computing = asyncio.ensure_future(rows_became(watched, columns, 1))
            await watched.answered.wait()
            await asyncio.to_thread(first.kill)
            await eventually_async(lambda: any("refused" in why for why in said), "a word on why it waits")
            assert not computing.done()
            second = ServerProcess(path, listen=listen)
            await asyncio.to_thread(second.__enter__)
            try:
                became = await computing
            finally:
                await asyncio.to_thread(second.__exit__)
    assert not became.reasons
    assert said[-1] == ""
    assert f"server 127.0.0.1:{port}: Connection refused; trying again" in said
    got = [became.outputs[number] for number in range(len(x))]
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


async def test_requests_beyond_the_servers_limits_are_divided(tmp_path: Path) -> None:
    limits = Limits(message_bytes=100_000)
    settings = Settings(paths=(tmp_path,), limits=limits)
    rows = [[float(number)] * 8_000 for number in range(8)]
    async with (
        serving(tmp_path, {"m": (memory := echo_model())}, config=BATCHED, settings=settings) as served,
        asking(served) as model,
    ):
        assert await rows_became(model, column(rows)) == Became(dict(enumerate(rows)))
        assert {sum(rows) for rows in memory.batches} == {1, 2}
        became = await rows_became(model, column([[1.0] * 50_000]))
    assert not became.outputs
    assert "larger than max" in became.reasons[0]


async def test_bits_of_bf16_arrive_as_sent(tmp_path: Path) -> None:
    async with serving(tmp_path, {"m": echo_model("BF16")}, config=BATCHED) as served, asking(served) as model:
        bits = np.array([[0x3F80], [0xC0A0], [0x7F80]], np.uint16)
        assert (await model.infer({"a": bits}, ["x"]))["x"].tolist() == bits.tolist()


async def test_each_row_of_a_servers_decoder_is_a_generation(tmp_path: Path) -> None:
    folder = decoder_models.write(decoder_models.TINY, tmp_path / "m" / "1")
    prompts = [[5, 6, 7], [9], [3, 1, 4, 1, 5]]
    truth = NaiveLoop(folder)
    async with serving(tmp_path) as served, asking(served, parameters={"max_tokens": 4}) as model:
        assert [one.name for one in model.description.outputs] == ["output_ids"]
        became = await rows_became(model, {"input_ids": pa.array(prompts, pa.list_(pa.int64()))})
    expected = [truth.generate(prompt, Asked(max_tokens=4)).tokens for prompt in prompts]
    assert became == Became(dict(enumerate(expected)))


@pytest.mark.parametrize(
    ("name", "config", "why"),
    [
        ("nosuch", BATCHED, "NOT_FOUND"),
        ("m", "max_batch_size: 8 sequence_batching { }", "it remembers earlier requests of a sequence"),
    ],
    ids=["unknown", "sequences"],
)
async def test_model_that_cannot_compute_rows_is_refused(tmp_path: Path, name: str, config: str, why: str) -> None:
    async with serving(tmp_path, {"m": echo_model()}, config=config) as served:
        with pytest.raises(BulkError, match=why):
            async with asking(served, name):
                raise AssertionError
