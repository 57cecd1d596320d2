"""Any requests that may share a batch, joined into a message and cut out of its echo again, are unchanged. An answer
with other rows is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from paceline.backends.errors import ExecutionError
from paceline.backends.remote_messages import RemoteRequest, decode_response, decode_undeclared, encode_request
from paceline.backends.spec import ModelSpec, TensorSpec
from paceline.protos.datatypes import DATATYPES
from paceline.protos.inference_pb2 import ModelInferRequest, ModelInferResponse

SIZED = sorted(name for name, datatype in DATATYPES.items() if datatype.item_bytes)


@st.composite
def batches(draw: Any) -> tuple[ModelSpec, list[RemoteRequest]]:
    rows = draw(st.lists(st.integers(1, 4), min_size=1, max_size=5))
    inputs, columns = [], []
    for number in range(draw(st.integers(1, 3))):
        name = draw(st.sampled_from([*SIZED, "BYTES"]))
        dims = tuple(draw(st.lists(st.integers(0, 3), max_size=2)))
        inputs.append(TensorSpec(f"t{number}", name, dims))
        columns.append([_array(draw, name, (count, *dims)) for count in rows])
    spec = ModelSpec(tuple(inputs), tuple(inputs), batched=True)
    every = tuple(range(len(inputs)))
    return spec, [RemoteRequest(tuple(one), every, 1) for one in zip(*columns, strict=True)]


def _array(draw: Any, name: str, shape: tuple[int, ...]) -> Any:
    if name == "BYTES":
        flat = draw(st.lists(st.binary(max_size=5), min_size=int(np.prod(shape)), max_size=int(np.prod(shape))))
        return np.fromiter(flat, object, len(flat)).reshape(shape)
    array = draw(arrays.arrays(DATATYPES[name].dtype, shape))
    return np.asfortranarray(array) if draw(st.booleans()) else array


def echoed(data: bytes) -> bytes:
    request = ModelInferRequest.FromString(data)
    answer = ModelInferResponse(raw_output_contents=request.raw_input_contents)
    for one in request.inputs:
        answer.outputs.add(name=one.name, datatype=one.datatype, shape=one.shape)
    return answer.SerializeToString()


@given(batches())
def test_echoed_batch_gives_each_request_its_own_tensors(made: tuple[ModelSpec, list[RemoteRequest]]) -> None:
    spec, requests = made
    wanted = range(len(spec.outputs))
    answer = echoed(encode_request("m", "", spec, requests, wanted))
    for one, result, opened in zip(
        requests, decode_response(answer, spec, requests, wanted), decode_undeclared(answer, requests), strict=True
    ):
        for sent, got, (name, _, array) in zip(one.inputs, result, opened, strict=True):
            assert name.startswith("t")
            assert (sent.dtype, sent.shape) == (got.dtype, got.shape)
            for answered in (got, array):
                assert (
                    sent.tolist() == answered.tolist() if sent.dtype == object else sent.tobytes() == answered.tobytes()
                )


@pytest.mark.parametrize("shape", [(2, 1), (4, 1), ()], ids=["fewer", "more", "none"])
def test_answer_without_the_batchs_rows_is_refused(shape: tuple[int, ...]) -> None:
    spec = ModelSpec((TensorSpec("x", "FP32", (1,)),), (TensorSpec("y", "FP32", (1,)),), batched=True)
    requests = [RemoteRequest((np.zeros((rows, 1), np.float32),), (0,), 1) for rows in (1, 2)]
    answer = ModelInferResponse(raw_output_contents=[np.zeros(shape, np.float32).tobytes()])
    answer.outputs.add(name="y", datatype="FP32", shape=shape)
    with pytest.raises(ExecutionError, match=r"'y': expected .*3.*, got"):
        decode_response(answer.SerializeToString(), spec, requests, [0])
    with pytest.raises(ExecutionError, match=r"'y': expected .*3.*, got"):
        decode_undeclared(answer.SerializeToString(), requests)
