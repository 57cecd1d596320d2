"""Models that fail, return wrong outputs or raise any exception: their batch gets an error, the next one is served."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import grpc
import numpy as np
import pytest

from paceline.backends.errors import ExecutionError
from paceline.backends.spec import ModelSpec, Tensors, TensorSpec
from tests import models
from tests.integration.serving import Served, echo_model, failure_of, serving
from tests.memory_models import MemoryModel, change_datatype, lose_output, lose_row
from tests.polling import eventually_async
from tests.wire import Array, infer, rows_of_floats

INTERNAL = grpc.StatusCode.INTERNAL
ONE = infer("m", {"a": rows_of_floats(1)})


@pytest.fixture
def model() -> MemoryModel:
    return echo_model()


@pytest.fixture
async def served(tmp_path: Path, model: MemoryModel) -> AsyncIterator[Served]:
    whole = 'parameters { key: "paceline.isolate_failures" value { string_value: "false" } }'
    config = f"max_batch_size: 4 dynamic_batching {{ }} {whole}"
    async with serving(tmp_path, {"m": model, "other": echo_model()}, config=config) as served:
        yield served
        model.faults.clear()
        assert (await served.infer(ONE)).raw_output_contents[0] == ONE.raw_input_contents[0]
        assert await served.metric("nv_inference_pending_request_count") == 0


async def test_failure_reaches_every_request_of_its_batch_and_no_other(served: Served, model: MemoryModel) -> None:
    model.gate.close()
    before = asyncio.create_task(served.infer(ONE))
    await asyncio.to_thread(model.gate.wait_entered, 1)
    batch = [asyncio.create_task(failure_of(served.infer(ONE))) for _ in range(4)]
    await eventually_async(lambda: served.waiting("m") == 4, "a full batch waiting")
    after = asyncio.create_task(served.infer(ONE))
    await eventually_async(lambda: served.waiting("m") == 5, "one more waiting")
    model.gate.release()
    await before
    model.faults.raise_next(ExecutionError("out of magic"))
    model.gate.open()
    assert await asyncio.gather(*batch) == [(INTERNAL, "model 'm': out of magic")] * 4
    assert (await after).raw_output_contents[0] == ONE.raw_input_contents[0]
    failed = await served.metric("nv_inference_request_failure", 'model="m",reason="BACKEND",version="1"')
    assert failed == 4
    assert await served.metric("nv_inference_count") == 2


async def test_failure_of_one_model_does_not_affect_the_others(served: Served, model: MemoryModel) -> None:
    model.faults.raise_when(lambda inputs: True, ExecutionError("always"))
    bad = [asyncio.create_task(failure_of(served.infer(ONE))) for _ in range(8)]
    good = [asyncio.create_task(served.infer(infer("other", {"a": rows_of_floats(2)}))) for _ in range(8)]
    assert await asyncio.gather(*bad) == [(INTERNAL, "model 'm': always")] * 8
    assert all(len(response.outputs) == 1 for response in await asyncio.gather(*good))


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("operands could not be broadcast"), "operands could not be broadcast"),
        (KeyError("missing"), "'missing'"),
        (ExecutionError("two\nlines, \u00fcml\u00e4uts and 50%"), "two\nlines, \u00fcml\u00e4uts and 50%"),
        (ExecutionError("not \udcff sendable"), "not \\udcff sendable"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
async def test_failure_of_any_kind_is_internal_with_the_models_own_text(
    served: Served, model: MemoryModel, error: Exception, text: str
) -> None:
    model.faults.raise_next(error)
    assert await failure_of(served.infer(ONE)) == (INTERNAL, f"model 'm': {text}")


async def test_failure_with_a_text_of_a_megabyte_is_shortened_in_the_middle(served: Served, model: MemoryModel) -> None:
    model.faults.raise_next(ExecutionError("start" + "x" * 1_000_000 + "end"))
    code, text = await failure_of(served.infer(ONE))
    assert code is INTERNAL
    assert text.startswith("model 'm': startxxx")
    assert text.endswith("xxxend")
    assert len(text) < 3_100


@pytest.mark.parametrize(
    ("distortion", "text"),
    [
        (
            lose_row,
            "output 'x': expected shape [1, -1], got [0, 2]; the first dimension of every output must be the 1 "
            "rows of the batch",
        ),
        (lose_output, "expected 1 outputs, got 0"),
        (
            lambda outputs: [one[..., np.newaxis] for one in outputs],
            "output 'x': expected shape [1, -1], got [1, 2, 1]",
        ),
        (change_datatype, "output 'x': expected FP32, got numpy's complex64"),
    ],
)
async def test_outputs_that_differ_from_the_models_spec_are_internal(
    served: Served, model: MemoryModel, distortion: Callable[[Tensors], Tensors], text: str
) -> None:
    model.faults.distort_next(distortion)
    assert await failure_of(served.infer(ONE)) == (INTERNAL, f"model 'm': {text}")


@pytest.mark.parametrize("typed", [False, True], ids=["raw", "typed"])
async def test_outputs_that_cannot_be_encoded_are_internal(tmp_path: Path, typed: bool) -> None:
    spec = ModelSpec((TensorSpec("a", "FP32", (-1, -1)),), (TensorSpec("x", "BYTES", (-1,)),))
    model = MemoryModel(spec, lambda inputs: [np.array([7] * len(inputs[0]), object)])
    request = infer("m", {"a": rows_of_floats(1)}, parameters={"binary_data_output": not typed})
    async with serving(tmp_path, {"m": model}) as served:
        assert await failure_of(served.infer(request)) == (
            INTERNAL,
            "model 'm': output 'x': expected bytes or str in element 0 of BYTES, got int",
        )


async def test_failure_of_onnx_runtime_carries_its_message_and_the_session_keeps_serving(tmp_path: Path) -> None:
    models.write(models.gather(), tmp_path / "g" / "1" / "model.onnx")

    def index(value: int) -> Array:
        return rows_of_floats(1, 1, first=value).astype("<i8")

    async with serving(tmp_path) as served:
        code, text = await failure_of(served.infer(infer("g", {"INPUT0": index(99)})))
        assert code is INTERNAL
        assert text.startswith("model 'g': onnx runtime error 2: ")
        assert "indices element out of data bounds" in text
        good = await served.infer(infer("g", {"INPUT0": index(2)}))
        assert good.raw_output_contents[0] == rows_of_floats(1, 1, first=20).tobytes()
