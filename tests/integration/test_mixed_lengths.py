"""Requests of different lengths share batches, however they come, and each answer is as alone."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import grpc
import numpy as np
import onnxruntime
import pytest
from onnx import helper

from paceline.backends.spec import Array, Length, ModelSpec, Tensors, TensorSpec
from paceline.backends.trials import LengthAxis, LengthTrial, Supervise, unsupervised
from paceline.protos import inference_pb2 as pb
from paceline.protos.datatypes import by_name
from paceline.protos.tensors import decode_raw
from paceline.server.config import Settings
from tests.integration.front_memory import two
from tests.integration.regions import register
from tests.integration.scripted import own
from tests.integration.serving import Served, failure_of, serving
from tests.integration.streams import Stream
from tests.memory_models import MemoryModel
from tests.models import model, tensor, write
from tests.polling import eventually_async
from tests.shared_objects import add_shared_input, request_shared_output, shared_object
from tests.unit.backends.length_models import WORDS, encoder
from tests.wire import infer, raw_bytes

REQUESTS = 30
PAD = "max_batch_size: 64 dynamic_batching { } " + own(pad="ids[1]=7, mask[1], words[1]", pad_sizes="64,3000")
OWN_PROCESS = own(own_process=True)
SPEC = ModelSpec(
    (
        TensorSpec("ids", "INT64", (-1, -1)),
        TensorSpec("mask", "BOOL", (-1, -1)),
        TensorSpec("words", "BYTES", (-1, -1)),
    ),
    (TensorSpec("sums", "INT64", (-1, -1)), TensorSpec("text", "BYTES", (-1, -1)), TensorSpec("all", "INT64", (-1, 1))),
)


def compute(inputs: Tensors) -> Tensors:
    ids, mask, words = inputs
    masked = ids * mask
    return [masked.cumsum(axis=1), words + words, masked.sum(axis=1, keepdims=True)]


class Texts(MemoryModel):
    """Sums of the ids that a mask leaves, and texts twice. Records the shapes that it sees."""

    def __init__(self) -> None:
        super().__init__(SPEC, self._compute_and_record)
        self.shapes: list[tuple[int, ...]] = []

    def _compute_and_record(self, inputs: Tensors) -> Tensors:
        self.shapes.append(inputs[0].shape)
        return compute(inputs)

    def try_lengths(
        self, spec: ModelSpec, asked: Sequence[LengthAxis] | None, supervise: Supervise = unsupervised
    ) -> LengthTrial:
        assert asked is not None
        filled = tuple(replace(tensor, fill=one.fill) for tensor, one in zip(spec.inputs, asked, strict=True))
        places = tuple((index, one.axis) for index, one in enumerate(asked))
        return LengthTrial(replace(spec, inputs=filled, lengths=(Length("length", places, ((0, 1), (1, 1))),)))


def text(number: int, rows: int = 0, least: int = 1) -> dict[str, Array]:
    """The inputs of request `number`, of another length than its neighbours."""
    random = np.random.default_rng(number)
    rows, size = rows or 1 + number % 2, least + number * 7 % 60
    ids = random.integers(1, 10**6, (rows, size))
    words = np.array([[b"w%d" % one for one in row] for row in ids], object)
    return {"ids": ids, "mask": random.integers(0, 2, (rows, size)).astype(np.bool_), "words": words}


def message(number: int, **more: object) -> pb.ModelInferRequest:
    return infer("m", text(number), id=str(number), parameters=more)


def typed(number: int) -> pb.ModelInferRequest:
    request = pb.ModelInferRequest(model_name="m", id=str(number))
    fields = {
        "ids": ("INT64", "int64_contents"),
        "mask": ("BOOL", "bool_contents"),
        "words": ("BYTES", "bytes_contents"),
    }
    for name, array in text(number).items():
        datatype, field = fields[name]
        tensor = request.inputs.add(name=name, datatype=datatype, shape=array.shape)
        getattr(tensor.contents, field).extend(array.ravel().tolist())
    return request


def outputs_of(answer: pb.ModelInferResponse) -> list[Array]:
    return [
        decode_raw(raw, by_name(output.datatype), tuple(output.shape))
        for output, raw in zip(answer.outputs, answer.raw_output_contents, strict=True)
    ]


def check(answer: pb.ModelInferResponse, inputs: dict[str, Array]) -> None:
    for got, wanted in zip(outputs_of(answer), compute([*inputs.values()]), strict=True):
        assert got.shape == wanted.shape
        assert got.tolist() == wanted.tolist()


async def held(served: Served, model: Texts) -> asyncio.Task[pb.ModelInferResponse]:
    """Keep the model busy until its gate opens."""
    model.gate.close()
    task = asyncio.ensure_future(served.infer(message(0)))
    await asyncio.to_thread(model.gate.wait_entered, model.gate.entered + 1)
    return task


async def together(
    served: Served, model: Texts, requests: Sequence[pb.ModelInferRequest]
) -> list[pb.ModelInferResponse]:
    """The answers to `requests`, all of which wait before any is executed."""
    blocker = await held(served, model)
    calls = [asyncio.ensure_future(served.infer(request)) for request in requests]
    await eventually_async(lambda: served.waiting("m") == len(requests), "all requests in the queue")
    model.gate.open()
    await blocker
    return await asyncio.gather(*calls)


def settings(path: Path, frontends: int) -> Settings:
    return two(path) if frontends == 2 else Settings(paths=(path,))


@pytest.mark.parametrize("frontends", [1, 2])
@pytest.mark.parametrize("made", [message, typed])
async def test_requests_of_different_lengths_share_a_batch(tmp_path: Path, made: object, frontends: int) -> None:
    model = Texts()
    make = typed if made is typed else message
    async with serving(tmp_path, {"m": model}, config=PAD, settings=settings(tmp_path, frontends)) as served:
        for _ in range(2):  # the second time, requests are known
            answers = await together(served, model, [make(number) for number in range(REQUESTS)])
            for number, answer in enumerate(answers):
                check(answer, text(number))
    assert model.shapes[1:] == [(45, 64), (1, 64), (45, 64)]


@pytest.mark.parametrize(
    ("kind", "config"), [("masked", None), ("pooled", own(pad_sizes="64")), ("masked", OWN_PROCESS)]
)
async def test_masked_onnx_model_answers_mixed_lengths_as_alone(tmp_path: Path, kind: str, config: str | None) -> None:
    folder = write(encoder(kind), tmp_path / "m" / "1" / "model.onnx").parents[1]
    if config is not None:
        (folder / "config.pbtxt").write_text(config)
    texts = [
        {name: text(number)[name].astype(np.int64) % WORDS for name in ("ids", "mask")} for number in range(REQUESTS)
    ]
    for one in texts:
        one["mask"][:, 0] = 1
    session = onnxruntime.InferenceSession(str(folder / "1" / "model.onnx"))
    async with serving(tmp_path) as served:
        for _ in range(3):
            answers = await asyncio.gather(*(served.infer(infer("m", one)) for one in texts))
            for answer, one in zip(answers, texts, strict=True):
                (got,), (wanted,) = outputs_of(answer), session.run(None, one)
                assert got.shape == wanted.shape
                np.testing.assert_allclose(got, wanted, atol=1e-5)
        real = await served.metric("paceline_elements")
        shown = (await served.stub.ModelConfig(pb.ModelConfigRequest(name="m"))).config
    assert real == 3 * sum(one["ids"].size for one in texts)
    assert shown.parameters["paceline.pad"].string_value == "ids[1]=0, mask[1]=0"


async def test_halves_of_any_height_and_width_are_as_alone(tmp_path: Path) -> None:
    tensors = [tensor(name, "FP16", ["n", "height", "width"]) for name in ("x", "y")]
    doubled = model([helper.make_node("Add", ["x", "x"], ["y"])], tensors[:1], tensors[1:])
    folder = write(doubled, tmp_path / "m" / "1" / "model.onnx").parents[1]
    (folder / "config.pbtxt").write_text(own(pad="x[1], x[2]"))
    random = np.random.default_rng(0)
    shapes = [(1 + number % 3, 2 + number % 5, 3 + number % 7) for number in range(REQUESTS)]
    images = [random.random(shape).astype(np.float16) for shape in shapes]
    async with serving(tmp_path) as served:
        for _ in range(3):
            answers = await asyncio.gather(*(served.infer(infer("m", {"x": image})) for image in images))
            for answer, image in zip(answers, images, strict=True):
                np.testing.assert_array_equal(outputs_of(answer)[0], image + image, strict=True)
        assert await served.metric("paceline_elements") == 3 * sum(image.size for image in images)


async def test_model_that_looks_at_its_padding_keeps_lengths_apart(tmp_path: Path) -> None:
    write(encoder("leaky"), tmp_path / "m" / "1" / "model.onnx")
    async with serving(tmp_path) as served:
        shown = (await served.stub.ModelConfig(pb.ModelConfigRequest(name="m"))).config
        assert not any(name.startswith("paceline_elements") for name in await served.metrics())
    assert "paceline.pad" not in shown.parameters


async def test_requests_of_different_lengths_on_a_stream_share_a_batch(tmp_path: Path) -> None:
    model = Texts()
    async with serving(tmp_path, {"m": model}, config=PAD) as served:
        blocker, stream = await held(served, model), Stream(served)
        await stream.send(*map(message, range(REQUESTS)))
        await eventually_async(lambda: served.waiting("m") == REQUESTS, "all requests in the queue")
        model.gate.open()
        await blocker
        for number in range(REQUESTS):
            check((await stream.message()).infer_response, text(number))
        await stream.end()
    assert model.shapes[1:] == [(45, 64)]


async def test_large_requests_of_different_lengths_pass_fronts(tmp_path: Path) -> None:
    model = Texts()
    large = [text(number, least=2_900) for number in range(6)]
    async with serving(tmp_path, {"m": model}, config=PAD, settings=two(tmp_path)) as served:
        answers = await together(served, model, [infer("m", one) for one in large])
        for answer, inputs in zip(answers, large, strict=True):
            check(answer, inputs)
    assert model.shapes[1:] == [(9, 3000)]


async def test_lengths_in_shared_memory_are_filled_up_in_a_batch(tmp_path: Path) -> None:
    model = Texts()
    with shared_object(2**20) as memory:
        allowed = Settings(paths=(tmp_path,), allow_client_shm=True)
        async with serving(tmp_path, {"m": model}, config=PAD, settings=allowed) as served:
            await register(served, "r", memory.key, 2**20)
            requests = []
            for number in range(8):
                request, place = pb.ModelInferRequest(model_name="m"), number * 2**16
                for spec, (name, array) in zip(SPEC.inputs, text(number).items(), strict=True):
                    data = raw_bytes(array)
                    memory.put(data, place)
                    add_shared_input(request, name, spec.datatype, array.shape, "r", len(data), place)
                    place += len(data)
                request_shared_output(request, "sums", "r", text(number)["ids"].nbytes, number * 2**16 + 2**15)
                requests.append(request)
            await together(served, model, requests)
        for number in range(8):
            (sums, *_) = compute([*text(number).values()])
            assert memory.get(sums.nbytes, number * 2**16 + 2**15) == sums.tobytes()
    assert model.shapes[1:] == [(12, 64)]


async def test_parts_of_a_long_request_share_batches_with_shorter_ones(tmp_path: Path) -> None:
    model = Texts()
    config = PAD.replace("max_batch_size: 64", "max_batch_size: 8") + own(split_oversized=True)
    oversized = [text(5, rows=20), text(9, rows=4)]
    async with serving(tmp_path, {"m": model}, config=config) as served:
        for answer, inputs in zip(
            await asyncio.gather(*(served.infer(infer("m", inputs)) for inputs in oversized)), oversized, strict=True
        ):
            check(answer, inputs)
    assert {shape[1] for shape in model.shapes} == {64}


async def test_batch_info_tells_the_sizes_that_a_batch_was_filled_up_to(tmp_path: Path) -> None:
    model = Texts()
    async with serving(tmp_path, {"m": model}, config=PAD) as served:
        answers = await together(served, model, [message(3, paceline_batch_info=True), message(4)])
        found = {name: value for name, value in (await served.metrics()).items() if 'model="m"' in name}
    assert answers[0].parameters["paceline_batch_padded_sizes"].string_param == "64"
    assert not answers[1].parameters
    # Lengths are 1 (the one that kept the model busy), 22 in two rows, and 29.
    labels = 'model="m",version="1"'
    assert found[f"paceline_elements{{{labels}}}"] == 1 + 2 * 22 + 29
    assert found[f"paceline_padding_elements{{{labels}}}"] == 4 * 64 - (1 + 2 * 22 + 29)
    assert found[f'paceline_padded_size_bucket{{le="64.0",length="length",{labels}}}'] == 2


async def test_contradicting_sizes_fail_alone(tmp_path: Path) -> None:
    model = Texts()
    bad = text(3)
    bad["mask"] = bad["mask"][:, 1:]
    async with serving(tmp_path, {"m": model}, config=PAD) as served:
        code, why = await failure_of(asyncio.ensure_future(served.infer(infer("m", bad))))
        check(await served.infer(message(3)), text(3))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert why == (
        "model 'm': input 'mask': expected 22 in axis 1, as in axis 1 of input 'ids', got 21 in shape [2, 21]"
    )
