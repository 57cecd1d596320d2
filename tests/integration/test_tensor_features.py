"""ONNX models whose configuration reshapes, joins and splits tensors, over gRPC: which requests share a batch, and what
each gets.

Batches form regardless of the clock: the preferred size leaves at once, anything else only after longer than a test
lasts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import grpc
import numpy as np
import onnx
import pytest

from paceline.backends.spec import BatchInputKind
from paceline.protos import inference_pb2 as pb
from tests import models
from tests.integration.serving import Served, failure_of, serving
from tests.polling import eventually_async
from tests.wire import Array, infer


def write(repository: Path, model: onnx.ModelProto, config: str) -> None:
    """Write `model` as `m`, with `config`."""
    models.write(model, repository / "m" / "1" / "model.onnx")
    (repository / "m" / "config.pbtxt").write_text(config)


def together(rows_per_batch: int, rows: int = 16) -> str:
    """Configuration: a batch leaves when it has `requests` rows."""
    return (
        f"max_batch_size: {rows} "
        f"dynamic_batching {{ preferred_batch_size: {rows_per_batch} max_queue_delay_microseconds: 100000000 }} "
    )


def tensor(kind: str, name: str, dims: str, more: str = "", data_type: str = "FP32") -> str:
    return f'{kind} {{ name: "{name}" data_type: TYPE_{data_type} dims: [ {dims} ] {more} }} '


def floats(*shape: int, first: float = 1) -> Array:
    return np.arange(first, first + np.prod(shape), dtype=np.float32).reshape(shape)


def outputs(response: pb.ModelInferResponse) -> dict[str, Array]:
    """The FP32 outputs by name."""
    return {
        one.name: np.frombuffer(data, np.float32).reshape(tuple(one.shape))
        for one, data in zip(response.outputs, response.raw_output_contents, strict=True)
    }


async def answers(served: Served, requests: Sequence[pb.ModelInferRequest]) -> list[dict[str, Array]]:
    """The outputs of each of `requests`, all in flight at once."""
    return [outputs(response) for response in await asyncio.gather(*map(served.infer, requests))]


async def executions(served: Served) -> tuple[float, float]:
    """Rows inferred and batches executed."""
    return await served.metric("nv_inference_count"), await served.metric("nv_inference_exec_count")


async def shapes(served: Served) -> dict[str, list[int]]:
    metadata = await served.stub.ModelMetadata(pb.ModelMetadataRequest(name="m"), timeout=10)
    return {one.name: list(one.shape) for one in (*metadata.inputs, *metadata.outputs)}


RAGGED_IO = tensor("input", "INPUT0", "-1", "allow_ragged_batch: true") + tensor("output", "OUTPUT0", "-1")
SCATTER = 'batch_output { target_name: "OUTPUT0" kind: BATCH_SCATTER_WITH_INPUT_SHAPE source_input: "INPUT0" }'


async def test_ragged_requests_of_different_lengths_share_a_batch_and_get_their_answers(tmp_path: Path) -> None:
    write(tmp_path, models.ragged(), together(8) + RAGGED_IO + SCATTER)
    given = [floats(1, size, first=100 * size) for size in (16, 8, 1, 0, 5, 3)] + [floats(2, 3)]
    async with serving(tmp_path) as served:
        got = await answers(served, [infer("m", {"INPUT0": array}) for array in given])
        assert await executions(served) == (8, 1)
        assert await served.metric("paceline_lanes") == 0
        assert await shapes(served) == {"INPUT0": [-1, -1], "OUTPUT0": [-1, -1]}
    for answer, array in zip(got, given, strict=True):
        np.testing.assert_array_equal(answer["OUTPUT0"], array + 1, strict=True)


async def test_ragged_requests_under_load_are_all_answered_exactly(tmp_path: Path) -> None:
    write(tmp_path, models.ragged(), "max_batch_size: 8 dynamic_batching { } " + RAGGED_IO + SCATTER)
    async with serving(tmp_path) as served:

        async def client(number: int) -> bool:
            random = np.random.default_rng(number)
            given = [
                random.random((int(random.integers(1, 4)), int(random.integers(0, 40))), np.float32) for _ in range(10)
            ]
            got = [outputs(await served.infer(infer("m", {"INPUT0": array})))["OUTPUT0"] for array in given]
            return all(np.array_equal(one, array + np.float32(1)) for one, array in zip(got, given, strict=True))

        assert all(await asyncio.gather(*(client(number) for number in range(24))))


async def test_identity_backend_serves_ragged_batches_too(tmp_path: Path) -> None:
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "config.pbtxt").write_text('backend: "identity" ' + together(3) + RAGGED_IO + SCATTER)
    given = [floats(1, size) for size in (4, 2, 7)]
    async with serving(tmp_path) as served:
        got = await answers(served, [infer("m", {"INPUT0": array}) for array in given])
        assert await executions(served) == (3, 1)
    assert [answer["OUTPUT0"].tolist() for answer in got] == [array.tolist() for array in given]


# What the model gets for each of the three rows of two requests: two rows of 3 x 1 elements, and one row of 2 x 2.
MADE = {
    BatchInputKind.ELEMENT_COUNT: [[6, 4]] * 3,
    BatchInputKind.ACCUMULATED_ELEMENT_COUNT: [[6, 10]] * 3,
    BatchInputKind.ACCUMULATED_ELEMENT_COUNT_WITH_ZERO: [[0, 6, 10]] * 3,
    BatchInputKind.MAX_ELEMENT_COUNT_AS_SHAPE: [[0] * 6] * 3,
    BatchInputKind.ITEM_SHAPE: [[3, 1], [3, 1], [2, 2]],
    BatchInputKind.ITEM_SHAPE_FLATTEN: [[3, 1, 3, 1, 2, 2]] * 3,
}


@pytest.mark.parametrize("datatype", ["INT32", "FP32"])
@pytest.mark.parametrize("kind", BatchInputKind)
async def test_batch_input_of_each_kind_reaches_the_model(tmp_path: Path, kind: BatchInputKind, datatype: str) -> None:
    config = (
        together(3)
        + tensor("input", "RAGGED", "-1, -1", "allow_ragged_batch: true")
        + tensor("input", "ROWS", "1")
        + tensor("output", "OUTPUT0", "-1")
        + f'batch_input {{ kind: {kind.value} target_name: "MADE" data_type: TYPE_{datatype} source_input: "RAGGED" }}'
    )
    write(tmp_path, models.batch_input_echo(datatype, rank=2 if kind is BatchInputKind.ITEM_SHAPE else 1), config)
    earlier = infer("m", {"RAGGED": floats(2, 3, 1), "ROWS": floats(2, 1)})
    later = infer("m", {"RAGGED": floats(1, 2, 2), "ROWS": floats(1, 1)})
    async with serving(tmp_path) as served:
        call = asyncio.create_task(served.infer(earlier))
        await eventually_async(lambda: served.waiting("m") == 1, "the first request waiting")
        second = outputs(await served.infer(later))
        first = outputs(await call)
        assert await executions(served) == (3, 1)
        assert await shapes(served) == {"RAGGED": [-1, -1, -1], "ROWS": [-1, 1], "OUTPUT0": [-1, -1]}
        code, text = await failure_of(served.infer(infer("m", {"MADE": floats(1, 1)})))
    assert first["OUTPUT0"].tolist() == MADE[kind][:2]
    assert second["OUTPUT0"].tolist() == MADE[kind][2:]
    assert (code, text) == (
        grpc.StatusCode.INVALID_ARGUMENT,
        "model 'm': unexpected input 'MADE', expected ['RAGGED', 'ROWS']",
    )


async def test_reshape_gives_clients_and_model_their_own_shapes(tmp_path: Path) -> None:
    config = (
        together(3)
        + tensor("input", "INPUT0", "4", "reshape { shape: [ 2, 2 ] }")
        + tensor("output", "OUTPUT0", "4, 1", "reshape { shape: [ 2, 2 ] }")
    )
    write(tmp_path, models.transpose(), config)
    given = [floats(1, 4), floats(2, 4, first=5)]
    async with serving(tmp_path) as served:
        got = await answers(served, [infer("m", {"INPUT0": array}) for array in given])
        assert await executions(served) == (3, 1)
        assert await shapes(served) == {"INPUT0": [-1, 4], "OUTPUT0": [-1, 4, 1]}
        code, text = await failure_of(served.infer(infer("m", {"INPUT0": floats(1, 2, 2)})))
    for answer, array in zip(got, given, strict=True):
        transposed = array.reshape(-1, 2, 2).transpose(0, 2, 1).reshape(-1, 4, 1)
        np.testing.assert_array_equal(answer["OUTPUT0"], transposed, strict=True)
    assert (code, text) == (
        grpc.StatusCode.INVALID_ARGUMENT,
        "unexpected shape for input 'INPUT0' for model 'm': expected [-1, 4], got [1, 2, 2]",
    )


async def test_reshape_of_a_model_without_batch_axis_applies_to_the_whole_tensor(tmp_path: Path) -> None:
    config = tensor("input", "INPUT0", "1", "reshape { }") + tensor("output", "OUTPUT0", "1", "reshape { }")
    write(tmp_path, models.scalar(), config)
    async with serving(tmp_path) as served:
        assert outputs(await served.infer(infer("m", {"INPUT0": floats(1)})))["OUTPUT0"].tolist() == [2]


async def test_rows_of_rank_zero_without_configuration_are_one_element_vectors_to_clients(tmp_path: Path) -> None:
    models.write(models.identity("FP32", ["batch"]), tmp_path / "m" / "1" / "model.onnx")
    async with serving(tmp_path) as served:
        answer = outputs(await served.infer(infer("m", {"INPUT0": floats(3, 1)})))
        assert await shapes(served) == {"INPUT0": [-1, 1], "OUTPUT0": [-1, 1]}
    np.testing.assert_array_equal(answer["OUTPUT0"], floats(3, 1), strict=True)


async def test_omitted_optional_input_is_the_graphs_default(tmp_path: Path) -> None:
    config = (
        tensor("input", "INPUT0", "-1")
        + tensor("input", "BIAS", "-1", "optional: true")
        + tensor("output", "OUTPUT0", "-1")
        + tensor("output", "OUTPUT1", "-1")
    )
    write(tmp_path, models.with_default(default=(10, 20)), config)
    x = floats(2)
    async with serving(tmp_path) as served:
        without, given, again = await answers(
            served, [infer("m", {"INPUT0": x}), infer("m", {"INPUT0": x, "BIAS": floats(3)}), infer("m", {"INPUT0": x})]
        )
        code, text = await failure_of(served.infer(infer("m", {"BIAS": floats(3)})))
    assert [one["OUTPUT1"].tolist() for one in (without, given, again)] == [[10, 20], [1, 2, 3], [10, 20]]
    assert (code, text) == (
        grpc.StatusCode.INVALID_ARGUMENT,
        "model 'm': missing inputs ['INPUT0']: expected ['INPUT0'], got ['BIAS']",
    )


async def test_identity_backend_batches_only_equal_sets_of_optional_inputs(tmp_path: Path) -> None:
    config = "".join(
        tensor("input", f"INPUT{i}", "2", "optional: true" if i else "") + tensor("output", f"OUTPUT{i}", "2")
        for i in range(2)
    )
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "config.pbtxt").write_text('backend: "identity" ' + together(2) + config)
    one, both = {"INPUT0": floats(1, 2)}, {"INPUT0": floats(1, 2), "INPUT1": floats(1, 2, first=7)}
    async with serving(tmp_path) as served:
        got = await answers(served, [infer("m", given) for given in (one, both, one, both)])
        assert await executions(served) == (4, 2)
    assert [sorted(answer) for answer in got] == [["OUTPUT0"], ["OUTPUT0", "OUTPUT1"]] * 2
    assert got[1]["OUTPUT1"].tolist() == both["INPUT1"].tolist()


async def test_shape_tensor_requests_batch_only_with_equal_contents(tmp_path: Path) -> None:
    config = (
        together(2)
        + tensor("input", "INPUT0", "6")
        + tensor("input", "SHAPE", "3", "is_shape_tensor: true", "INT64")
        + tensor("output", "OUTPUT0", "-1, -1")
    )
    write(tmp_path, models.reshape(), config)
    contents = [[0, 2, 3], [0, 3, 2], [0, 2, 3], [0, 3, 2]]
    requests = [infer("m", {"INPUT0": floats(1, 6, first=i), "SHAPE": np.array(one)}) for i, one in enumerate(contents)]
    async with serving(tmp_path) as served:
        got = await answers(served, requests)
        assert await executions(served) == (4, 2)
        assert await shapes(served) == {"INPUT0": [-1, 6], "SHAPE": [3], "OUTPUT0": [-1, -1, -1]}
        waiting = asyncio.create_task(served.infer(requests[0]))
        await eventually_async(lambda: served.waiting("m") == 1, "a request waiting")
        other = asyncio.create_task(served.infer(requests[1]))
        await eventually_async(lambda: served.waiting("m") == 2, "one that it can't share a batch with")
        waiting.cancel()
        other.cancel()
    for i, (answer, (_, *dims)) in enumerate(zip(got, contents, strict=True)):
        np.testing.assert_array_equal(answer["OUTPUT0"], floats(1, 6, first=i).reshape(1, *dims), strict=True)
