"""Faulty requests over the wire: each is refused with its status and reason, and no other request is affected."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import numpy as np
import pytest

from paceline.backends.spec import ModelSpec, TensorSpec
from paceline.protos import inference_pb2 as pb
from tests.integration.serving import Served, failure_of, serving
from tests.memory_models import MemoryModel
from tests.polling import eventually_async
from tests.wire import Change, add_raw, bytes_element, infer, raw, rows_of_floats, shape

Request = pb.ModelInferRequest
Code = grpc.StatusCode

SPEC = ModelSpec(
    (TensorSpec("a", "FP32", (-1, 2)), TensorSpec("b", "BYTES", (-1, -1), utf8=True)),
    (TensorSpec("x", "FP32", (-1, 2)), TensorSpec("y", "BYTES", (-1, -1), utf8=True)),
)


def good(text: bytes = b"text", rows: int = 1) -> Request:
    return infer("m", {"a": rows_of_floats(rows), "b": np.array([[text]] * rows, object)})


@pytest.fixture
def model() -> MemoryModel:
    return MemoryModel(SPEC)


@pytest.fixture
async def served(tmp_path: Path, model: MemoryModel) -> AsyncIterator[Served]:
    async with serving(tmp_path, {"m": model}, config="max_batch_size: 4 dynamic_batching { }") as served:
        yield served


async def refused(served: Served, model: MemoryModel, request: Request) -> tuple[Code, str]:
    """The status and text that `request` gets while one neighbour executes and another waits. Both neighbours and the
    next request must be served, and nothing of `request` may be left behind."""
    ran = len(model.batches)
    model.gate.close()
    running = asyncio.ensure_future(served.infer(good(b"runs")))
    await asyncio.to_thread(model.gate.wait_entered, ran + 1)
    waiting = asyncio.ensure_future(served.infer(good(b"waits", rows=2)))
    await eventually_async(lambda: served.waiting("m") == 1, "the neighbour in the queue")
    outcome = await failure_of(served.infer(request))
    assert served.waiting("m") == 1
    model.gate.open()
    assert (await running).raw_output_contents[1] == bytes_element(b"runs")
    assert (await waiting).raw_output_contents[1] == bytes_element(b"waits") * 2
    assert (await served.infer(good(b"next"))).raw_output_contents[1] == bytes_element(b"next")
    assert model.batches[ran:] == [(1,), (2,), (1,)]
    assert await served.metric("nv_inference_pending_request_count") == 0
    return outcome


def param(key: str, **value: object) -> Change:
    def change(request: Request) -> None:
        request.parameters[key].CopyFrom(pb.InferParameter(**value))  # type: ignore[arg-type]

    return change


def wanting(*outputs: str) -> Change:
    def change(request: Request) -> None:
        for name in outputs:
            request.outputs.add(name=name)

    return change


def datatype(name: str) -> Change:
    def change(request: Request) -> None:
        request.inputs[0].datatype = name

    return change


def without_inputs(request: Request) -> None:
    del request.inputs[:], request.raw_input_contents[:]


def without_b(request: Request) -> None:
    del request.inputs[1], request.raw_input_contents[1]


def with_c(request: Request) -> None:
    add_raw(request, "c", "FP32", [1], bytes(4))


def with_a_again(request: Request) -> None:
    add_raw(request, "a", "FP32", [1, 2], bytes(8))


def with_surplus_raw(request: Request) -> None:
    request.raw_input_contents.append(bytes(8))


def with_raw_missing(request: Request) -> None:
    del request.raw_input_contents[1]


def with_no_data(request: Request) -> None:
    del request.raw_input_contents[:]


def with_both_forms(request: Request) -> None:
    request.inputs[0].contents.fp32_contents.extend([0, 1])


def with_wrong_field(request: Request) -> None:
    del request.raw_input_contents[:]
    request.inputs[0].contents.fp64_contents.extend([0, 1])
    request.inputs[1].contents.bytes_contents.append(b"text")


def with_too_few_values(request: Request) -> None:
    del request.raw_input_contents[:]
    request.inputs[0].contents.fp32_contents.extend([0])
    request.inputs[1].contents.bytes_contents.append(b"text")


INVALID: list[tuple[str, Change, str]] = [
    ("no inputs", without_inputs, "missing inputs ['a', 'b']: expected ['a', 'b'], got []"),
    ("missing input", without_b, "missing inputs ['b']: expected ['a', 'b'], got ['a']"),
    ("unknown input", with_c, "unexpected input 'c', expected ['a', 'b']"),
    ("duplicate input", with_a_again, "input 'a' is given more than once"),
    ("unknown output", wanting("q"), "unexpected inference output 'q' for model 'm': expected some of ['x', 'y']"),
    ("duplicate output", wanting("x", "y", "x"), "output 'x' is requested more than once"),
    ("wrong datatype", datatype("FP64"), "input 'a': expected datatype FP32, got 'FP64'"),
    ("no datatype", datatype(""), "input 'a': expected datatype FP32, got ''"),
    ("surplus raw entry", with_surplus_raw, "expected 2 entries in raw_input_contents, one per input, got 3"),
    ("raw entry missing", with_raw_missing, "expected 2 entries in raw_input_contents, one per input, got 1"),
    ("no data", with_no_data, "input 'a': expected data in contents or raw_input_contents, got neither"),
    ("raw and typed", with_both_forms, "input 'a': expected either contents or raw_input_contents, got both"),
    ("wrong typed field", with_wrong_field, "input 'a': expected FP32 in fp32_contents alone, got fp64_contents"),
    ("too few values", with_too_few_values, "input 'a': expected 2 values in fp32_contents for shape [1, 2], got 1"),
    ("no shape", shape(0), "input 'a': expected a leading batch dimension, got shape []"),
    ("zero rows", shape(0, 0, 2), "input 'a': expected a batch of 1 to 4 rows, got 0 in shape [0, 2]"),
    ("too many rows", shape(0, 5, 2), "input 'a': expected a batch of 1 to 4 rows, got 5 in shape [5, 2]"),
    ("negative rows", shape(0, -1, 2), "input 'a': expected a batch of 1 to 4 rows, got -1 in shape [-1, 2]"),
    ("rows that differ", shape(1, 2, 1), "input 'b': expected 1 rows as in input 'a', got 2 in shape [2, 1]"),
    ("wrong dims", shape(0, 1, 3), "unexpected shape for input 'a' for model 'm': expected [-1, 2], got [1, 3]"),
    ("rank 65", shape(0, *[1] * 65), f"unexpected shape for input 'a' for model 'm': expected [-1, 2], got {[1] * 65}"),
    ("negative dims", shape(1, 1, -1), "input 'b': shape: expected no negative dimension, got [1, -1]"),
    (
        "2^40 elements in 8 bytes",
        shape(1, 1, 2**40),
        f"input 'b': expected at least {2**42} bytes for the lengths of the {2**40} elements of BYTES of shape "
        f"[1, {2**40}], got 8",
    ),
    (
        "element count beyond 64 bits",
        shape(1, 1, 2**63 - 1),
        f"input 'b': shape: expected at most {(2**63 - 1) // 8} elements, got [1, {2**63 - 1}]",
    ),
    ("too few bytes", raw(0, bytes(7)), "input 'a': expected 8 bytes for FP32 of shape [1, 2], got 7"),
    ("too many bytes", raw(0, bytes(2**20)), f"input 'a': expected 8 bytes for FP32 of shape [1, 2], got {2**20}"),
    (
        "4 GiB element",
        raw(1, bytes_element(b"text", length=2**32 - 1)),
        f"input 'b': expected {2**32 - 1} bytes in element 0 of 1, got 4",
    ),
    (
        "surplus element",
        raw(1, bytes_element(b"a") + bytes_element(b"b")),
        "input 'b': expected 1 elements of BYTES to end at byte 5, got 5 bytes more",
    ),
    (
        "cut length",
        raw(1, b"\x01\x00"),
        "input 'b': expected at least 4 bytes for the lengths of the 1 elements of BYTES of shape [1, 1], got 2",
    ),
    (
        "text that is not UTF-8",
        raw(1, bytes_element(b"\xc3\x28")),
        "input 'b': expected UTF-8 text in each element, got invalid continuation byte in element 0",
    ),
    ("infinite parameter", param("x", double_param=math.inf), "parameter 'x': expected a finite number, got inf"),
    ("NaN parameter", param("x", double_param=math.nan), "parameter 'x': expected a finite number, got nan"),
    ("parameter without value", param("x"), "parameter 'x': expected a value, got none"),
    (
        "timeout as text",
        param("timeout", string_param="1"),
        "invalid value type for 'timeout' parameter, expected int64_param or uint64_param, got string_param",
    ),
    ("negative timeout", param("timeout", int64_param=-5), "parameter 'timeout': expected >= 0, got -5"),
    (
        "priority as bool",
        param("priority", bool_param=True),
        "invalid value type for 'priority' parameter, expected int64_param or uint64_param, got bool_param",
    ),
    (
        "reserved key",
        param("triton_x", bool_param=True),
        "parameter 'triton_x': keys starting with 'triton_' are reserved; known: "
        "['triton_enable_empty_final_response']",
    ),
]


@pytest.mark.parametrize(("change", "text"), [case[1:] for case in INVALID], ids=[case[0] for case in INVALID])
async def test_infer_refuses_a_faulty_request_with_its_reason_and_serves_its_neighbours(
    served: Served, model: MemoryModel, change: Change, text: str
) -> None:
    request = good()
    change(request)
    whole = text if "for model 'm'" in text else f"model 'm': {text}"  # Triton's texts contain the name
    assert await refused(served, model, request) == (Code.INVALID_ARGUMENT, whole)


def named(name: str, version: str = "") -> Request:
    request = good()
    request.model_name, request.model_version = name, version
    return request


@pytest.mark.parametrize(
    ("name", "version", "code", "text"),
    [
        ("nope", "", Code.NOT_FOUND, "Request for unknown model: 'nope' is not found; this server has ['m']"),
        ("", "", Code.NOT_FOUND, "Request for unknown model: '' is not found; this server has ['m']"),
        (
            "\u6a21\u578b",
            "",
            Code.NOT_FOUND,
            "Request for unknown model: '\u6a21\u578b' is not found; this server has ['m']",
        ),
        ("m", "2", Code.NOT_FOUND, "Request for unknown model: 'm' version 2 is not found; versions served: ['1']"),
        (
            "m",
            "9" * 30,
            Code.NOT_FOUND,
            f"Request for unknown model: 'm' version {'9' * 30} is not found; versions served: ['1']",
        ),
        ("m", "one", Code.INVALID_ARGUMENT, "model 'm': expected a version number, got 'one'"),
        ("m", "1.0", Code.INVALID_ARGUMENT, "model 'm': expected a version number, got '1.0'"),
        ("m", "-2", Code.INVALID_ARGUMENT, "model 'm': expected a version number, got '-2'"),
    ],
)
async def test_infer_of_an_unknown_model_or_version_is_refused_with_its_reason(
    served: Served, model: MemoryModel, name: str, version: str, code: Code, text: str
) -> None:
    assert await refused(served, model, named(name, version)) == (code, text)


def in_shared_memory(request: Request) -> None:
    request.inputs[0].parameters["shared_memory_region"].string_param = "r"
    del request.raw_input_contents[0]


def into_shared_memory(request: Request) -> None:
    request.outputs.add(name="x").parameters["shared_memory_region"].string_param = "r"


SWITCHED_OFF = "'shared_memory_region' is switched off; start the server with --allow-client-shm=true to switch it on"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (in_shared_memory, f"input 'a': {SWITCHED_OFF}"),
        (into_shared_memory, f"output 'x': {SWITCHED_OFF}"),
    ],
)
async def test_infer_with_an_extension_that_is_switched_off_is_unimplemented(
    served: Served, model: MemoryModel, change: Change, text: str
) -> None:
    request = good()
    change(request)
    assert await refused(served, model, request) == (Code.UNIMPLEMENTED, f"model 'm': {text}")


@pytest.mark.parametrize("field", ["input", "model", "datatype", "version", "dims"])
async def test_infer_gives_faults_of_any_length_a_reason_short_enough_to_arrive(
    served: Served, model: MemoryModel, field: str
) -> None:
    request, long = good(), "\u00fc" * 500_000
    if field == "input":
        request.inputs[0].name = long
    elif field == "model":
        request.model_name = long
    elif field == "datatype":
        request.inputs[0].datatype = long
    elif field == "version":
        request.model_version = long
    else:
        request.inputs[0].shape[:] = [2**62] * 1_000
    code, text = await refused(served, model, request)
    assert code is (Code.NOT_FOUND if field == "model" else Code.INVALID_ARGUMENT)
    assert 100 < len(text.encode()) <= 3_100


@pytest.mark.parametrize(
    "id", ["", "\u00fc\U0001f600", "x" * 1_000_000, "a\nb\x00"], ids=["none", "unicode", "huge", "control"]
)
async def test_infer_returns_any_id_unchanged(served: Served, id: str) -> None:
    request = good()
    request.id = id
    assert (await served.infer(request)).id == id
