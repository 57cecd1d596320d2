"""What the shapes of ONNX models leave open: how many axes a tensor has, and what dimension names mean."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import onnx
import onnxruntime as ort  # type: ignore[import-untyped,unused-ignore]
import pytest

from paceline.protos import inference_pb2 as pb
from paceline.server.config import Settings
from tests import models, odd_models
from tests.integration.regions import register, settings
from tests.integration.serving import Served, failure_of, serving
from tests.integration.upstreams import proxying
from tests.shared_objects import add_shared_input, request_shared_output, shared_object
from tests.wire import Array, infer

SHAPES = [(), (0,), (3,), (2, 3), (2, 0, 3), (1,) * 8]


def write(folder: Path, model: onnx.ModelProto, config: str | None = None) -> None:
    path = models.write(model, folder / "m" / "1" / "model.onnx")
    if config is not None:
        (path.parents[1] / "config.pbtxt").write_text(config)


def floats(*shape: int) -> Array:
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(np.float32)


async def answer(served: Served, array: Array) -> Array:
    response = await served.infer(infer("m", {"INPUT0": array}))
    return np.frombuffer(response.raw_output_contents[0], np.float32).reshape(response.outputs[0].shape)


async def check(served: Served, model: onnx.ModelProto, inputs: list[Array]) -> None:
    """Assert that each answer, alone and among other requests, is ONNX Runtime's, in the same shape."""
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    alone = [await answer(served, one) for one in inputs]
    company = await asyncio.gather(*(answer(served, one) for one in inputs * 4))
    for got, one in zip([*alone, *company], inputs * 5, strict=True):
        (expected,) = session.run(None, {"INPUT0": one})
        assert got.shape == expected.shape
        np.testing.assert_array_equal(got, expected)


async def told(served: Served) -> Any:
    return (await served.stub.ModelConfig(pb.ModelConfigRequest(name="m"))).config


async def shapes_of(served: Served) -> list[list[int]]:
    metadata = await served.stub.ModelMetadata(pb.ModelMetadataRequest(name="m"))
    return [list(one.shape) for one in (*metadata.inputs, *metadata.outputs)]


@pytest.mark.parametrize("frontends", [1, 2])
async def test_input_of_unknown_rank_accepts_any_rank_and_is_not_batched(tmp_path: Path, frontends: int) -> None:
    model = odd_models.shapeless()
    write(tmp_path, model)
    async with serving(tmp_path, settings=Settings(paths=(tmp_path,), frontends=frontends)) as served:
        await check(served, model, [floats(*shape) for shape in SHAPES])
        assert await shapes_of(served) == [[], []]
        config = await told(served)
        assert (config.max_batch_size, list(config.input[0].dims), list(config.output[0].dims)) == (0, [], [])


@pytest.mark.parametrize(
    ("dims", "words"),
    [
        ((2, -3), "unexpected shape for input 'INPUT0' for model 'm': expected [-1, -1], got [2, -3]"),
        ((1,) * 65, "input 'INPUT0': shape: expected at most 64 dimensions, got 65"),
        ((7,), "input 'INPUT0': expected 28 bytes for FP32 of shape [7], got 24"),
    ],
)
async def test_invalid_shape_for_an_input_of_unknown_rank_is_refused(
    tmp_path: Path, dims: tuple[int, ...], words: str
) -> None:
    write(tmp_path, odd_models.shapeless())
    request = infer("m", {"INPUT0": floats(2, 3)})
    request.inputs[0].shape[:] = dims
    async with serving(tmp_path) as served:
        code, text = await failure_of(served.infer(request))
        assert (code, words in text) == (grpc.StatusCode.INVALID_ARGUMENT, True), text
        assert (await answer(served, floats(2, 3))).shape == (2, 3)


async def test_scalar_input_accepts_only_scalars(tmp_path: Path) -> None:
    write(tmp_path, models.scalar())
    async with serving(tmp_path) as served:
        code, text = await failure_of(served.infer(infer("m", {"INPUT0": floats(1)})))
        assert (code, "expected [], got [1]" in text) == (grpc.StatusCode.INVALID_ARGUMENT, True)
        assert (await answer(served, floats())).shape == ()


@pytest.mark.parametrize("frontends", [1, 2])
async def test_scalar_is_a_one_element_vector_to_clients_if_configured(tmp_path: Path, frontends: int) -> None:
    text = '{ name: "%s" data_type: TYPE_FP32 dims: [ 1 ] }'
    write(tmp_path, models.scalar(), f"input {text % 'INPUT0'} output {text % 'OUTPUT0'}")
    async with serving(tmp_path, settings=Settings(paths=(tmp_path,), frontends=frontends)) as served:
        np.testing.assert_array_equal(await answer(served, floats(1)), 2 * floats(1))
        assert await shapes_of(served) == [[1], [1]]
        code, text = await failure_of(served.infer(infer("m", {"INPUT0": floats()})))
        assert (code, "expected [1], got []" in text) == (grpc.StatusCode.INVALID_ARGUMENT, True)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
async def test_output_declared_as_a_scalar_may_be_a_one_element_vector_already(
    tmp_path: Path, shape: tuple[int, ...]
) -> None:
    write(
        tmp_path,
        odd_models.misdeclared_scalar(shape),
        'output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ 1 ] }',
    )
    async with serving(tmp_path) as served:
        np.testing.assert_array_equal(await answer(served, floats(1)), floats(1))


@pytest.mark.parametrize("dims", ["2", "-1"])
async def test_output_declared_as_a_scalar_has_the_configured_dims(tmp_path: Path, dims: str) -> None:
    write(
        tmp_path,
        odd_models.misdeclared_scalar((2,)),
        f'output {{ name: "OUTPUT0" data_type: TYPE_FP32 dims: [ {dims} ] }}',
    )
    async with serving(tmp_path) as served:
        np.testing.assert_array_equal(await answer(served, floats(2)), floats(2))


def one(kind: str, dims: str) -> str:
    return f'{kind} {{ name: "{kind.upper()}0" data_type: TYPE_FP32 dims: [ {dims} ] }} '


@pytest.mark.parametrize(
    ("model", "config", "text"),
    [
        (models.row_sums(4), "max_batch_size: 4 " + one("input", "4") + one("output", "-1"), "[], got [-1]"),
        (models.row_sums(), "max_batch_size: 4 " + one("input", "-1") + one("output", "1, 1, 2"), "[], got [1, 1, 2]"),
        (models.row_sums(), one("output", "-1"), "[], got [-1]"),
        (models.scalar(), one("input", "1") + one("output", "2"), "[], got [2]"),
    ],
    ids=["a number a row", "of free inputs", "batched by default", "a scalar"],
)
async def test_configured_dims_that_the_model_never_computes_fail_the_load(
    tmp_path: Path, model: onnx.ModelProto, config: str, text: str
) -> None:
    write(tmp_path, models.identity())
    (tmp_path / "m").rename(tmp_path / "good")
    write(tmp_path, model, config)
    async with serving(tmp_path) as served:
        _, failed = (await served.stub.RepositoryIndex(pb.RepositoryIndexRequest())).models
        assert (failed.state, f"output 'OUTPUT0': expected dims of the model, {text}" in failed.reason) == (
            "UNAVAILABLE",
            True,
        ), failed.reason


async def test_configured_dims_that_contradict_only_the_declaration_are_served(tmp_path: Path) -> None:
    write(tmp_path, odd_models.hidden_rank(["batch"]), "max_batch_size: 4 " + one("input", "3") + one("output", "3"))
    async with serving(tmp_path) as served:
        np.testing.assert_array_equal(await answer(served, floats(2, 3)), floats(2, 3))


async def test_input_of_unknown_rank_has_the_configured_dims(tmp_path: Path) -> None:
    write(tmp_path, odd_models.shapeless(), 'input { name: "INPUT0" data_type: TYPE_FP32 dims: [ 2, -1 ] }')
    async with serving(tmp_path) as served:
        assert (await answer(served, floats(2, 5))).shape == (2, 5)
        for shape in [(), (2,), (3, 5)]:
            code, text = await failure_of(served.infer(infer("m", {"INPUT0": floats(*shape)})))
            assert code == grpc.StatusCode.INVALID_ARGUMENT
            assert f"expected [2, -1], got {list(shape)}" in text


@pytest.mark.parametrize(
    ("config", "shapes", "inputs"),
    [
        (
            'max_batch_size: 8 dynamic_batching { } input { name: "INPUT0" data_type: TYPE_FP32 dims: [ 3 ] }',
            [[-1, 3], [-1]],
            [(1, 3), (2, 3)],
        ),
        ("max_batch_size: 8", [[-1], [-1]], [(1,), (2, 3), (3, 3), (1, 0, 2), (2, 2)]),
    ],
    ids=["with dims", "without"],
)
async def test_input_of_unknown_rank_has_rows_if_configured(
    tmp_path: Path, config: str, shapes: list[list[int]], inputs: list[tuple[int, ...]]
) -> None:
    model = odd_models.shapeless()
    write(tmp_path, model, config)
    async with serving(tmp_path) as served:
        await check(served, model, [floats(*shape) for shape in inputs])
        assert await shapes_of(served) == shapes
        asked = await told(served)
        assert (asked.max_batch_size, asked.HasField("dynamic_batching")) == (8, True)
        code, text = await failure_of(served.infer(infer("m", {"INPUT0": floats()})))
        assert (code, "expected a leading batch dimension" in text) == (grpc.StatusCode.INVALID_ARGUMENT, True)


async def test_output_of_unknown_rank_is_returned_unchanged(tmp_path: Path) -> None:
    model = odd_models.shapeless("Squeeze", ["n", "m"])
    write(tmp_path, model)
    async with serving(tmp_path) as served:
        await check(served, model, [floats(*shape) for shape in [(1, 1), (2, 3), (2, 1), (1, 3), (0, 3)]])
        assert (await told(served)).max_batch_size == 0


async def test_output_of_unknown_rank_is_split_by_rows_and_must_have_them(tmp_path: Path) -> None:
    write(tmp_path, odd_models.shapeless("Squeeze", ["n", "m", "k"]), "max_batch_size: 8")
    async with serving(tmp_path) as served:
        assert (await answer(served, floats(2, 3, 1))).shape == (2, 3)
        assert (await answer(served, floats(2, 1, 1))).shape == (2,)
        for shape, got in [((1, 1, 1), []), ((1, 3, 4), [3, 4])]:
            code, text = await failure_of(served.infer(infer("m", {"INPUT0": floats(*shape)})))
            assert code == grpc.StatusCode.INTERNAL
            assert f"got {got}; the first dimension of every output must be the 1 rows of the batch" in text
        assert (await answer(served, floats(2, 3, 4))).shape == (2, 3, 4)


async def test_output_of_unknown_rank_is_batched_if_a_trial_shows_its_rows(tmp_path: Path) -> None:
    model = odd_models.hidden_rank()
    write(tmp_path, model)
    async with serving(tmp_path) as served:
        await check(served, model, [floats(rows, 3) for rows in (1, 2, 3)])
        assert (await told(served)).max_batch_size == 32
        assert await shapes_of(served) == [[-1, 3], [-1]]


async def test_output_of_unknown_rank_has_the_configured_dims(tmp_path: Path) -> None:
    config = 'output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ -1, 3 ] }'
    write(tmp_path, odd_models.shapeless(), config)
    async with serving(tmp_path) as served:
        assert (await answer(served, floats(2, 3))).shape == (2, 3)
        code, text = await failure_of(served.infer(infer("m", {"INPUT0": floats(3)})))
        assert (code, "expected shape [-1, 3], got [3]" in text) == (grpc.StatusCode.INTERNAL, True)


async def test_tensors_of_unknown_rank_may_be_in_shared_memory(tmp_path: Path) -> None:
    write(tmp_path, odd_models.shapeless())
    one = floats(2, 3)
    with shared_object(64) as region:
        region.put(one)
        async with serving(tmp_path, settings=settings(tmp_path)) as served:
            await register(served, "r", region.key, 64)
            request = pb.ModelInferRequest(model_name="m")
            add_shared_input(request, "INPUT0", "FP32", [2, 3], "r", one.nbytes, 0)
            request_shared_output(request, "OUTPUT0", "r", 32, 32)
            response = await served.infer(request)
            assert list(response.outputs[0].shape) == [2, 3]
            np.testing.assert_array_equal(np.frombuffer(region.get(24, 32), np.float32), -one.ravel())


async def test_reported_configuration_serves_any_rank_again(tmp_path: Path) -> None:
    model = odd_models.shapeless()
    write(tmp_path / "one", model)
    async with serving(tmp_path / "one") as served:
        config = str(await told(served))
    write(tmp_path / "two", model, config)
    async with serving(tmp_path / "two") as served:
        await check(served, model, [floats(*shape) for shape in SHAPES])


@pytest.mark.parametrize(
    ("config", "shapes"), [(None, SHAPES), ("max_batch_size: 4", [(1,), (2, 3), (3, 1, 2)])], ids=["alone", "rows"]
)
async def test_proxy_passes_any_rank_on(tmp_path: Path, config: str | None, shapes: list[tuple[int, ...]]) -> None:
    model = odd_models.shapeless()
    write(tmp_path / "models", model, config)
    async with (
        serving(tmp_path / "models", settings=Settings(paths=(tmp_path / "models",), frontends=1)) as behind,
        proxying(tmp_path / "none", behind.target, models=("m",)) as served,
    ):
        await check(served, model, [floats(*shape) for shape in shapes])


async def test_unequal_sizes_of_a_named_dimension_fail_in_the_model_without_affecting_others(tmp_path: Path) -> None:
    dims = ["batch", "length"]
    node = onnx.helper.make_node("Mul", ["INPUT0", "INPUT1"], ["OUTPUT0"])
    inputs = [models.tensor(f"INPUT{number}", "FP32", dims) for number in range(2)]
    write(tmp_path, models.model([node], inputs, [models.tensor("OUTPUT0", "FP32", dims)]))
    good = {"INPUT0": floats(1, 3), "INPUT1": floats(1, 3)}
    async with serving(tmp_path) as served:
        bad = failure_of(served.infer(infer("m", {"INPUT0": floats(1, 3), "INPUT1": floats(1, 4)})))
        failure, *answers = await asyncio.gather(bad, *(served.infer(infer("m", good)) for _ in range(8)))
        assert failure[0] == grpc.StatusCode.INTERNAL
        for one in answers:
            assert one.raw_output_contents[0] == (good["INPUT0"] * good["INPUT1"]).tobytes()
