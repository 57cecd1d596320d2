"""What NVIDIA's client shows users whose request is at fault: the right status, and a text that says what to fix."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from tritonclient.grpc import InferInput, InferRequestedOutput
from tritonclient.utils import InferenceServerException

from tests.conformance import zoo
from tests.conformance.triton import Triton, assert_same_bits, outputs_of, tensors, wanted

Inputs = list[InferInput]


def int32(name: str, *shape: int) -> Inputs:
    return tensors({name: np.ones(shape, np.int32)})


def both(*shape: int) -> Inputs:
    return [*int32("INPUT0", *shape), *int32("INPUT1", *shape)]


def in_shared_memory(name: str, *shape: int) -> Inputs:
    made = InferInput(name, list(shape), "INT32")
    made.set_shared_memory("region", 64)
    return [made]


def output_in_shared_memory(name: str) -> list[InferRequestedOutput]:
    made = InferRequestedOutput(name)
    made.set_shared_memory("region", 64)
    return [made]


NOT_UTF8 = tensors({"INPUT0": np.array([[b"ok", b"\xff\xfe"]], object)})
TWICE = [*int32("INPUT0", 1, 16), *int32("INPUT0", 1, 16)]
WRONG_TYPE = [*int32("INPUT0", 1, 16), *tensors({"INPUT1": np.ones((1, 16), np.int64)})]
NO_DATA = [*int32("INPUT0", 1, 16), InferInput("INPUT1", [1, 16], "INT32")]
UNBATCHED = tensors({name: np.ones((1, 16), np.float32) for name in ("INPUT0", "INPUT1")})
MATRIX = tensors({"INPUT0": np.ones((1, 2, 3), np.float32)})

# Model, inputs, further arguments of `infer`; the status; what the text must contain.
REFUSED: dict[str, tuple[str, Inputs, dict[str, Any], str, list[str]]] = {
    "unknown model": ("nosuch", both(1, 16), {}, "NOT_FOUND", ["Request for unknown model: 'nosuch' is not found"]),
    "unknown version": (
        "simple", both(1, 16), {"model_version": "9"}, "NOT_FOUND",
        ["Request for unknown model: 'simple' version 9 is not found", "['1']"],
    ),
    "version no number": ("simple", both(1, 16), {"model_version": "x"}, "INVALID_ARGUMENT", ["'simple'", "'x'"]),
    "datatype": ("simple", WRONG_TYPE, {}, "INVALID_ARGUMENT", ["'simple'", "'INPUT1'", "INT32", "INT64"]),
    "shape": (
        "simple", both(2, 15), {}, "INVALID_ARGUMENT",
        ["unexpected shape for input 'INPUT0' for model 'simple'", "[-1, 16]", "[2, 15]"],
    ),
    "rank too high": ("simple", both(1, 1, 16), {}, "INVALID_ARGUMENT", ["'INPUT0'", "[-1, 16]", "[1, 1, 16]"]),
    "no batch axis": ("simple", both(16), {}, "INVALID_ARGUMENT", ["'INPUT0'", "[-1, 16]", "[16]"]),
    "scalar": ("simple", both(), {}, "INVALID_ARGUMENT", ["'simple'", "'INPUT0'", "batch dimension", "got shape []"]),
    "no rows": ("simple", both(0, 16), {}, "INVALID_ARGUMENT", ["'simple'", "'INPUT0'", "1 to 32", "got 0"]),
    "too many rows": ("simple", both(33, 16), {}, "INVALID_ARGUMENT", ["'simple'", "'INPUT0'", "1 to 32", "got 33"]),
    "rows disagree": (
        "simple", [*int32("INPUT0", 1, 16), *int32("INPUT1", 2, 16)], {}, "INVALID_ARGUMENT",
        ["'simple'", "'INPUT1'", "expected 1 rows as in input 'INPUT0'", "got 2"],
    ),
    "batch axis too much": ("unbatched", UNBATCHED, {}, "INVALID_ARGUMENT", ["'INPUT0'", "[16]", "[1, 16]"]),
    "unknown input": (
        "simple", [*int32("INPUT0", 1, 16), *int32("INPUT2", 1, 16)], {}, "INVALID_ARGUMENT",
        ["'simple'", "'INPUT2'", "'INPUT1'"],
    ),
    "missing input": ("simple", int32("INPUT0", 1, 16), {}, "INVALID_ARGUMENT", ["'simple'", "'INPUT1'"]),
    "input twice": ("simple", TWICE, {}, "INVALID_ARGUMENT", ["'simple'", "'INPUT0'"]),
    "input without data": ("simple", NO_DATA, {}, "INVALID_ARGUMENT", ["'simple'", "expected 2", "got 1"]),
    "unknown output": (
        "simple", both(1, 16), {"outputs": wanted("OUTPUT9")}, "INVALID_ARGUMENT",
        ["unexpected inference output 'OUTPUT9' for model 'simple'", "'OUTPUT0'", "'OUTPUT1'"],
    ),
    "output twice": (
        "simple", both(1, 16), {"outputs": wanted("OUTPUT1", "OUTPUT1")}, "INVALID_ARGUMENT", ["'simple'", "'OUTPUT1'"]
    ),
    "text not UTF-8": ("identity_bytes", NOT_UTF8, {}, "INVALID_ARGUMENT", ["'identity_bytes'", "'INPUT0'", "UTF-8"]),
    "missing matrix": ("product", MATRIX, {}, "INVALID_ARGUMENT", ["'product'", "'INPUT1'"]),
    "input in shared memory": (
        "simple", [*int32("INPUT0", 1, 16), *in_shared_memory("INPUT1", 1, 16)], {}, "UNIMPLEMENTED",
        ["'simple'", "'INPUT1'", "shared_memory_region"],
    ),
    "output in shared memory": (
        "simple", both(1, 16), {"outputs": output_in_shared_memory("OUTPUT0")}, "UNIMPLEMENTED",
        ["'simple'", "'OUTPUT0'", "shared_memory_region"],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("model", "inputs", "options", "status", "phrases"), REFUSED.values(), ids=REFUSED)
async def test_infer_faulty_request_is_refused_with_status_and_reason(
    triton: Triton, model: str, inputs: Inputs, options: dict[str, Any], status: str, phrases: list[str]
) -> None:
    with pytest.raises(InferenceServerException) as raised:
        await triton.infer(model, inputs, **options)
    assert raised.value.status() == f"StatusCode.{status}"
    missing = [phrase for phrase in phrases if phrase not in raised.value.message()]
    assert not missing, f"{missing} not in {raised.value.message()!r}"


@pytest.mark.parametrize(
    ("model", "version", "status"), [("nosuch", "", "NOT_FOUND"), ("simple", "9", "NOT_FOUND"), ("simple", "x", None)]
)
async def test_model_metadata_unknown_model_or_version_is_refused(
    triton: Triton, model: str, version: str, status: str | None
) -> None:
    with pytest.raises(InferenceServerException, match=f"'{model}'") as raised:
        await triton.get_model_metadata(model, version)
    assert raised.value.status() == f"StatusCode.{status or 'INVALID_ARGUMENT'}"


async def test_infer_failing_model_is_internal_with_onnxruntimes_message(triton: Triton) -> None:
    beyond = {"INPUT0": np.array([[99]], np.int64)}
    with pytest.raises(InferenceServerException, match="'gather'") as raised:
        await triton.infer("gather", tensors(beyond))
    assert raised.value.status() == "StatusCode.INTERNAL"
    with pytest.raises(Exception, match="Status Message: ") as own:
        zoo.answer("gather", beyond)
    assert str(own.value).partition("Status Message: ")[2] in raised.value.message()


async def test_infer_good_requests_among_faulty_ones_are_answered(triton: Triton) -> None:
    good = {name: np.arange(16, dtype=np.int32).reshape(1, 16) for name in ("INPUT0", "INPUT1")}
    asked = [case[:3] for case in REFUSED.values() for _ in range(2)]
    calls = [triton.infer(model, inputs, **options) for model, inputs, options in asked]
    calls += [triton.infer("simple", tensors(good)) for _ in range(20)]
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(outcome, InferenceServerException) for outcome in outcomes[: len(asked)])
    for outcome in outcomes[len(asked) :]:
        assert not isinstance(outcome, BaseException), outcome
        assert_same_bits(outputs_of(outcome), zoo.answer("simple", good))
