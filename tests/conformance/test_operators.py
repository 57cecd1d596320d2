"""ONNX's own operator tests, as models that nobody here has made: answers equal ONNX Runtime's, whoever shares a batch.

Lives here: for each operator, one of its tests with a free first dimension. Whether such a model is batched is up to
its trial; if rows depend on each other and it is, answers are wrong.
"""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import numpy as np
import onnx
import onnxruntime as ort  # type: ignore[import-untyped,unused-ignore]
import pytest

from clients import AsyncInferenceClient
from protos import inference_pb2 as pb
from protos.inference_pb2_grpc import GRPCInferenceServiceStub
from tests import models
from tests.harness import ServerProcess
from tests.wire import Array

_VARIANTS = 6
_MAX_ROWS = 8

_UNSEEN = {"StringNormalizer"}
"""Drops rows that have certain words, which no trial can know."""

Feed = dict[str, Array]


class Case(NamedTuple):
    """`expected`: what ONNX Runtime gives for each of `feeds`, by output."""

    name: str
    model: onnx.ModelProto
    feeds: list[Feed]
    expected: list[Feed]


def _cases() -> Iterator[Case]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of numpy, for the infinities among the tests
        from onnx.backend.test.case.node import collect_testcases

        tests = sorted(collect_testcases(), key=lambda one: one.name)
    seen: set[str] = set()
    for test in tests:
        nodes = test.model.graph.node
        if (
            len(nodes) == 1
            and nodes[0].op_type not in seen | _UNSEEN
            and (case := _case(nodes[0].op_type, test)) is not None
        ):
            seen.add(nodes[0].op_type)
            yield case


def _case(name: str, test: Any) -> Case | None:
    """`test` with a free first dimension, and its inputs with their elements in other orders; None if ONNX Runtime or
    the protocol lacks something, or if the tensors of a request have different first dimensions, or large ones."""
    freed = _freed(test.model)
    given = test.data_sets[0][0]
    arrays = [np.asarray(one) for one in given if isinstance(one, np.ndarray | np.generic)]
    names = [one.name for one in freed.graph.input]
    rows = {one.shape[:1] for one in arrays}
    if len(names) != len(arrays) or len(rows) != 1 or not all(one.size for one in arrays) or max(rows) > (_MAX_ROWS,):
        return None
    try:
        session = ort.InferenceSession(freed.SerializeToString(), _quiet(), providers=["CPUExecutionProvider"])
        outputs = [one.name for one in session.get_outputs()]
        feeds = [dict(zip(names, _shuffled(arrays, seed), strict=True)) for seed in range(_VARIANTS)]
        expected = [dict(zip(outputs, session.run(None, feed), strict=True)) for feed in feeds]
    except Exception:  # noqa: BLE001 - ONNX Runtime has a dozen kinds of its own
        return None
    carried = {one.type for one in (*session.get_inputs(), *session.get_outputs())} <= _CARRIED
    return Case(name, freed, feeds, expected) if carried else None


_CARRIED = {f"tensor({name})" for name in ("float", "double", "float16", "bool", "string")}
_CARRIED |= {f"tensor({sign}int{bits})" for sign in ("", "u") for bits in (8, 16, 32, 64)}


def _freed(model: onnx.ModelProto) -> onnx.ModelProto:
    made = onnx.ModelProto()
    made.CopyFrom(model)
    for one in (*made.graph.input, *made.graph.output):
        for dim in one.type.tensor_type.shape.dim[:1]:
            dim.Clear()
            dim.dim_param = "rows"
    del made.graph.value_info[:]
    return made


def _quiet() -> ort.SessionOptions:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    return options


def _shuffled(arrays: Sequence[Array], seed: int) -> list[Array]:
    random = np.random.default_rng(seed)
    return [random.permutation(array.reshape(-1)).reshape(array.shape) if seed else array for array in arrays]


@pytest.fixture(scope="module")
def cases() -> Sequence[Case]:
    return tuple(_cases())


@pytest.fixture(scope="module")
def target(cases: Sequence[Case], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    root: Path = tmp_path_factory.mktemp("operators")
    for case in cases:
        models.write(case.model, root / case.name / "1" / "model.onnx")
    with ServerProcess(root, args=["--max-queue-delay-microseconds", "20000"]) as server:
        yield server.target


async def test_operators_answer_as_onnxruntime_does_alone_whoever_shares_a_batch(
    cases: Sequence[Case], target: str
) -> None:
    async with grpc.aio.insecure_channel(target) as channel, AsyncInferenceClient(target) as client:
        stub = GRPCInferenceServiceStub(channel)  # type: ignore[no-untyped-call]
        told = [(await stub.ModelConfig(pb.ModelConfigRequest(name=case.name))).config for case in cases]
        batched = {config.name for config in told if config.max_batch_size}
        wrong = [text for case in cases for text in await _wrong(client, case, batched=case.name in batched)]
    assert wrong == []
    assert {"Relu", "Add", "Where", "MaxPool", "StringConcat"} <= batched
    dependent = {
        "Softmax",
        "LayerNormalization",
        "GatherND",
        "NonZero",
        "MatMul",
    }  # over the first axis, in these tests
    assert dependent <= {case.name for case in cases} - batched


async def _wrong(client: AsyncInferenceClient, case: Case, *, batched: bool) -> list[str]:
    """What is wrong with the answers to all requests at once, three times each."""

    async def one(feed: Feed, expected: Feed) -> Iterator[str]:
        result = await client.infer(case.name, {name: _vectors(array, batched) for name, array in feed.items()})
        return (
            f"{case.name}: {name} is {result[name].tolist()} instead of {array.tolist()}"
            for name, array in expected.items()
            if not _alike(result[name], _vectors(array, batched))
        )

    found = await asyncio.gather(*map(one, case.feeds * 3, case.expected * 3))
    return [text for texts in found for text in texts]


def _vectors(array: Array, batched: bool) -> Array:
    """`array` as clients see it: with a batch axis, single numbers are vectors of one."""
    return array[:, None] if batched and array.ndim == 1 else array


def _alike(one: Array, two: Array) -> bool:
    if two.dtype == object:
        return one.shape == two.shape and [*map(_text, one.flat)] == [*map(_text, two.flat)]
    if two.dtype.kind != "f":
        return one.dtype == two.dtype and np.array_equal(one, two)
    return one.shape == two.shape and np.allclose(one, two, rtol=1e-3, atol=1e-4, equal_nan=True)


def _text(element: str | bytes) -> bytes:
    return element.encode() if isinstance(element, str) else element
