"""Properties of the path from a request's message to an answer: valid requests are answered with their own tensors, and
those that are wrong in any way are refused."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.protos import inference_pb2 as pb
from paceline.protos.datatypes import DATATYPES
from paceline.server.memory.regions import Regions
from paceline.server.rpc.handlers import serialized
from tests.codecs import encoded
from tests.fuzz.judging import judged
from tests.fuzz.models import MAX_ROWS, SPECS, open_model
from tests.fuzz.targets import target
from tests.lengths import LONG
from tests.wire import raw_bytes

NAMES = st.sampled_from(["a", "b", "c", "x", "y", "FP32", "BYTES", "BOOL", "", "nobody"])
DIMS = st.one_of(st.integers(-1, 6), st.sampled_from([2**31, 2**62, 2**63 - 1, -(2**63)]))
KEYS = st.sampled_from(
    ["priority", "timeout", "binary_data_output", "classification", "shared_memory_region", "shared_memory_byte_size",
     "shared_memory_offset", "paceline_batch_info", "paceline_deadline_us", "sequence_id", "sequence_end", "triton_x",
     "mine", ""]
)  # fmt: skip


@st.composite
def parameters(draw: st.DrawFn) -> pb.InferParameter:
    kind = draw(st.sampled_from(["bool", "int64", "uint64", "double", "string", None]))
    values: dict[Any, st.SearchStrategy[Any]] = {
        "bool": st.booleans(),
        "int64": st.sampled_from([-(2**63), -1, 0, 1, 8, 64, 256, 2**63 - 1]),
        "uint64": st.sampled_from([0, 1, 2**64 - 1]),
        "double": st.floats(),
        "string": st.sampled_from(["r", "", "gone", "ü"]),
    }
    return pb.InferParameter(**{f"{kind}_param": draw(values[kind])}) if kind else pb.InferParameter()


def given_to(draw: st.DrawFn, message: Any) -> None:
    for key, value in draw(st.dictionaries(KEYS, parameters(), max_size=3)).items():
        message.parameters[key].CopyFrom(value)


@st.composite
def hostile_requests(draw: st.DrawFn) -> pb.ModelInferRequest:
    """Any names, shapes, sizes and parameters; sizes are often about right, so that some requests get far."""
    request = pb.ModelInferRequest(model_name=draw(st.sampled_from(list(SPECS))))
    for _ in range(draw(st.integers(0, 4))):
        shape, datatype = draw(st.lists(DIMS, max_size=4)), draw(st.sampled_from([*DATATYPES, "", "FP8"]))
        tensor = request.inputs.add(name=draw(NAMES), datatype=datatype, shape=shape)
        given_to(draw, tensor)
        size = min(max(0, math.prod(shape)) * draw(st.sampled_from([1, 2, 4, 8])), 512)
        if draw(st.booleans()):
            request.raw_input_contents.append(draw(st.binary(max_size=size)) if size % 3 else bytes(size))
        elif draw(st.booleans()):
            tensor.contents.fp32_contents.extend([0.5] * (size // 4))
    for name in draw(st.lists(NAMES, max_size=3)):
        given_to(draw, request.outputs.add(name=name))
    given_to(draw, request)
    return request


@settings(deadline=None, max_examples=300 if LONG else 100)
@given(hostile_requests())
def test_requests_of_any_kind_are_answered_or_refused(request: pb.ModelInferRequest) -> None:
    judged(target("infer"), request.SerializeToString())


@given(
    st.integers(1, MAX_ROWS),
    st.integers(0, 5),
    st.integers(0, 3),
    st.data(),
    st.permutations(["x", "y"]),
    st.permutations(["a", "b"]),
)
def test_valid_requests_are_answered_with_their_own_tensors(
    rows: int, columns: int, texts: int, data: st.DataObject, wanted: list[str], order: list[str]
) -> None:
    """From a model that returns its two tensors, in whatever order they come and are asked for."""
    floats = np.arange(rows * 2 * columns, dtype=np.float32).reshape(rows, 2, columns)
    strings = np.empty((rows, texts), object)
    for place in np.ndindex(strings.shape):
        strings[place] = data.draw(st.binary(max_size=6))
    brought = {"a": ("FP32", floats), "b": ("BYTES", strings)}
    request = pb.ModelInferRequest(model_name="rows", id="7")
    for name in order:
        datatype, array = brought[name]
        request.inputs.add(name=name, datatype=datatype, shape=array.shape)
        request.raw_input_contents.append(raw_bytes(array))
    for name in wanted:
        request.outputs.add(name=name)
    model = open_model("rows", Regions(1))
    decoded = model.codec.read(request)
    results = model.execute([decoded.inputs[0]], 0).results[0]
    assert not isinstance(results, Exception)
    response = pb.ModelInferResponse.FromString(serialized(encoded(model.codec, request, decoded, results)))
    assert response.id == "7"
    assert [output.name for output in response.outputs] == wanted
    expected = {"x": raw_bytes(floats), "y": raw_bytes(strings)}
    assert list(response.raw_output_contents) == [expected[name] for name in wanted]
