"""Answers equal ONNX Runtime's own.

The same inputs go through the server and through an `InferenceSession` of this process. A kernel may choose its
algorithm by the size of the batch, so bits are equal only where the batches are: for a request alone, and for requests
whose batch is forced. Where batches form by chance, elementwise models still have to agree to the bit, others within
rounding.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import permutations
from typing import Any

import numpy as np
import pytest

from tests.conformance import zoo
from tests.conformance.triton import Triton, assert_same_bits, executed, outputs_of, tensors
from tests.harness import ServerProcess

Array = np.ndarray[Any, np.dtype[Any]]


def normal(seed: int, *shape: int) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def pair(datatype: str, rows: int) -> dict[str, Array]:
    """Two inputs of 16 columns, made of the datatype's extreme values, paired in many ways."""
    values = zoo.samples(datatype).ravel()
    columns = np.arange(16 * rows)
    return {
        "INPUT0": values[columns % 8].reshape(rows, 16),
        "INPUT1": values[(columns // 8 + columns) % 8].reshape(rows, 16),
    }


@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered")
@pytest.mark.parametrize("rows", [1, 5, 32])
@pytest.mark.parametrize(("model", "datatype"), zoo.SIMPLE.items())
async def test_add_sub_alone_equals_onnxruntime_to_the_bit(
    triton: Triton, model: str, datatype: str, rows: int
) -> None:
    sent = pair(datatype, rows)
    result = await triton.infer(model, tensors(sent))
    assert_same_bits(outputs_of(result), zoo.answer(model, sent))


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 7, 8, 16, 31, 32])
async def test_mlp_alone_equals_onnxruntime_to_the_bit(triton: Triton, rows: int) -> None:
    sent = {"INPUT0": normal(rows, rows, 16)}
    result = await triton.infer("mlp", tensors(sent))
    assert_same_bits(outputs_of(result), zoo.answer("mlp", sent))


@pytest.mark.parametrize(("n", "k", "m"), [(1, 1, 1), (2, 3, 4), (1, 64, 5), (17, 9, 1), (3, 0, 2)])
async def test_free_dimensions_of_any_shape_equal_onnxruntime_to_the_bit(
    triton: Triton, n: int, k: int, m: int
) -> None:
    sent = {"INPUT0": normal(1, 2, n, k), "INPUT1": normal(2, 2, k, m)}
    result = await triton.infer("product", tensors(sent))
    assert_same_bits(outputs_of(result), zoo.answer("product", sent))


async def test_text_alone_equals_onnxruntime_to_the_byte(triton: Triton) -> None:
    sent = {"INPUT0": zoo.samples("BYTES")}
    result = await triton.infer("identity_bytes", tensors(sent))
    assert_same_bits(outputs_of(result), zoo.answer("identity_bytes", sent))


@pytest.mark.parametrize(("model", "shape", "names"), [("unbatched", (16,), 2), ("scalar", (), 1)])
async def test_model_without_batch_axis_equals_onnxruntime_to_the_bit(
    triton: Triton, model: str, shape: tuple[int, ...], names: int
) -> None:
    sent = {f"INPUT{i}": normal(i, *shape) for i in range(names)}
    results = await asyncio.gather(*(triton.infer(model, tensors(sent)) for _ in range(8)))
    for result in results:
        assert_same_bits(outputs_of(result), zoo.answer(model, sent))


@pytest.mark.parametrize("rows", [(6,), (1, 5), (3, 2, 1), (1, 1, 2, 2), (2, 2, 2)])
async def test_mlp_in_a_forced_batch_equals_onnxruntime_on_that_batch_to_the_bit(
    triton: Triton, server: ServerProcess, rows: tuple[int, ...]
) -> None:
    """`mlp_six` only runs six rows at a time, within the minute that this test would wait."""
    sent = [normal(seed, count, 16) for seed, count in enumerate(rows)]
    batches, executed_rows = executed(server, "mlp_six")
    calls = [triton.infer("mlp_six", tensors({"INPUT0": array}), client_timeout=30) for array in sent]
    results = await asyncio.gather(*calls)
    assert executed(server, "mlp_six") == (batches + 1, executed_rows + 6)
    assert _is_one_batch(sent, [result.as_numpy("OUTPUT0") for result in results])


def _is_one_batch(sent: Sequence[Array], got: Sequence[Array]) -> bool:
    """Whether one run over all that was sent, in some order of arrival, gives what came back."""
    for order in permutations(range(len(sent))):
        whole = zoo.answer("mlp_six", {"INPUT0": np.concatenate([sent[i] for i in order])})["OUTPUT0"]
        if np.concatenate([got[i] for i in order]).tobytes() == whole.tobytes():
            return True
    return False


async def test_add_sub_in_chance_batches_equals_onnxruntime_to_the_bit(triton: Triton) -> None:
    sent = [
        {"INPUT0": normal(seed, 1 + seed % 4, 16), "INPUT1": normal(-seed % 99, 1 + seed % 4, 16)} for seed in range(40)
    ]
    results = await asyncio.gather(*(triton.infer("simple_fp32", tensors(arrays)) for arrays in sent))
    for arrays, result in zip(sent, results, strict=True):
        assert_same_bits(outputs_of(result), zoo.answer("simple_fp32", arrays))


async def test_mlp_in_chance_batches_equals_onnxruntime_within_rounding(triton: Triton) -> None:
    sent = [normal(seed, 1 + seed % 4, 16) for seed in range(40)]
    results = await asyncio.gather(*(triton.infer("mlp", tensors({"INPUT0": array})) for array in sent))
    for array, result in zip(sent, results, strict=True):
        expected = zoo.answer("mlp", {"INPUT0": array})["OUTPUT0"]
        np.testing.assert_allclose(result.as_numpy("OUTPUT0"), expected, rtol=1e-5, atol=1e-6)


async def test_free_dimensions_in_chance_batches_are_never_mixed_up(triton: Triton) -> None:
    shapes = [(1, 1 + seed % 3, 1 + seed % 2, 1 + seed % 5) for seed in range(40)]
    sent = [
        {"INPUT0": normal(seed, rows, n, k), "INPUT1": normal(seed + 1, rows, k, m)}
        for seed, (rows, n, k, m) in enumerate(shapes)
    ]
    results = await asyncio.gather(*(triton.infer("product", tensors(arrays)) for arrays in sent))
    for arrays, result in zip(sent, results, strict=True):
        expected = zoo.answer("product", arrays)["OUTPUT0"]
        np.testing.assert_allclose(result.as_numpy("OUTPUT0"), expected, rtol=1e-5, atol=1e-6)
