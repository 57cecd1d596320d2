"""NVIDIA's client requests classes (`InferRequestedOutput(class_count=...)`); checked against ONNX Runtime and
numpy."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
from tritonclient.utils import InferenceServerException

from tests.conformance import zoo
from tests.conformance.triton import Triton, tensors

Array = np.ndarray[Any, np.dtype[Any]]


def asked(count: int, output: str = "OUTPUT0") -> list[tritonclient.grpc.InferRequestedOutput]:
    return [tritonclient.grpc.InferRequestedOutput(output, class_count=count)]


def samples(rows: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal((rows, 16), np.float32)


def expected(sent: Array, count: int) -> list[list[bytes]]:
    scores = zoo.answer("classifier", {"INPUT0": sent})["OUTPUT0"]
    labels = [f":{label}" for label in zoo.LABELS] + [""]
    return [
        [f"{row[index]:f}:{index}{labels[index]}".encode() for index in np.argsort(-row)[:count].tolist()]
        for row in scores
    ]


@pytest.mark.parametrize(("count", "classes"), [(1, 1), (3, 3), (4, 4), (100, 4)])
async def test_infer_class_count_returns_so_many_classes_a_row(triton: Triton, count: int, classes: int) -> None:
    sent = samples(3)
    result = await triton.infer("classifier", tensors({"INPUT0": sent}), outputs=asked(count))
    (output,) = result.get_response().outputs
    assert (output.datatype, list(output.shape)) == ("BYTES", [3, classes])
    assert result.as_numpy("OUTPUT0").tolist() == expected(sent, count)


async def test_infer_requests_with_different_class_counts_share_batches(triton: Triton) -> None:
    """`mlp_six` executes once six rows are queued, and not before."""
    sent = [samples(1, seed) for seed in range(6)]
    counts = [0, 1, 2, 3, 4, 0]
    results = await asyncio.gather(
        *(
            triton.infer("mlp_six", tensors({"INPUT0": array}), outputs=asked(count))
            for array, count in zip(sent, counts, strict=True)
        )
    )
    for array, count, result in zip(sent, counts, results, strict=True):
        (row,) = zoo.answer("mlp_six", {"INPUT0": array})["OUTPUT0"]
        got = result.as_numpy("OUTPUT0")
        if count:
            indices = [int(text.split(b":")[1]) for text in got[0]]
            assert indices == np.argsort(-row)[:count].tolist()
        else:
            np.testing.assert_allclose(got, [row], rtol=1e-5)


async def test_infer_class_count_without_batch_axis_gives_one_dimension(triton: Triton) -> None:
    values = np.arange(16, dtype=np.float32)
    result = await triton.infer("unbatched", tensors({"INPUT0": values, "INPUT1": values}), outputs=asked(2, "OUTPUT0"))
    assert result.as_numpy("OUTPUT0").tolist() == [b"30.000000:15", b"28.000000:14"]


async def test_infer_class_count_of_integers_beside_a_raw_output(triton: Triton) -> None:
    values = np.array([[*range(15), -5]], np.int32)
    outputs = [*asked(2, "OUTPUT0"), tritonclient.grpc.InferRequestedOutput("OUTPUT1")]
    result = await triton.infer("simple", tensors({"INPUT0": values, "INPUT1": values}), outputs=outputs)
    assert result.as_numpy("OUTPUT0").tolist() == [[b"28:14", b"26:13"]]
    assert result.as_numpy("OUTPUT1").tolist() == [[0] * 16]


@pytest.mark.parametrize("datatype", ["FP16", "BF16", "BOOL", "BYTES"])
async def test_infer_class_count_of_a_datatype_without_classes_is_invalid(triton: Triton, datatype: str) -> None:
    sent = tensors({"INPUT0": zoo.samples(datatype)})
    with pytest.raises(InferenceServerException, match=rf"'OUTPUT0': parameter 'classification'.*got {datatype}") as e:
        await triton.infer(zoo.identity_of(datatype), sent, outputs=asked(1))
    assert e.value.status() == "StatusCode.INVALID_ARGUMENT"


async def test_server_metadata_advertises_classification(triton: Triton) -> None:
    assert "classification" in (await triton.get_server_metadata()).extensions
