"""Invalid requests: refused before they are queued, with an error naming model, tensor, expected and got."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from paceline.backends.spec import ModelSpec, TensorSpec
from paceline.protos import inference_pb2 as pb
from paceline.protos.wire import MAX_FIELDS
from paceline.server.codec.codec import ModelCodec
from paceline.server.codec.wire_request import RequestReader
from paceline.server.errors import InvalidRequest, NotSupported
from tests.wire import Change, add_raw, bytes_element, infer, parameter, raw, rows_of_floats, shape

Request = pb.ModelInferRequest

SPEC = ModelSpec(
    (TensorSpec("a", "FP32", (2,)), TensorSpec("b", "BYTES", (-1,), utf8=True)),
    (TensorSpec("x", "FP32", (2,)), TensorSpec("h", "FP16", (2,))),
    batched=True,
)
WHOLE = ModelSpec((TensorSpec("t", "FP32", (-1, 2)),), (TensorSpec("t", "FP32", (-1, 2)),))


def good() -> Request:
    """A valid request of one row for SPEC."""
    return infer("m", {"a": rows_of_floats(1), "b": np.array([[b"text"]], object)})


def refusal(request: Request, spec: ModelSpec = SPEC, max_rows: int = 8) -> str:
    with pytest.raises(InvalidRequest) as caught:
        ModelCodec("m", "1", spec, max_rows).read(request)
    return str(caught.value)


def refused(change: Change) -> str:
    request = good()
    ModelCodec("m", "1", SPEC, 8).read(request)
    change(request)
    return refusal(request)


def remove_input(request: Request) -> None:
    del request.inputs[0], request.raw_input_contents[0]


def remove_all(request: Request) -> None:
    del request.inputs[:], request.raw_input_contents[:]


def add_unknown_input(request: Request) -> None:
    add_raw(request, "c", "FP32", [1], b"")


def repeat_input(request: Request) -> None:
    add_raw(request, "a", "FP32", [1, 2], bytes(8))


def repeat_another_input(request: Request) -> None:
    add_raw(request, "b", "BYTES", [1, 1], bytes_element(b"text"))


def change_datatype(request: Request) -> None:
    request.inputs[0].datatype = "INT32"


def change_to_no_datatype(request: Request) -> None:
    request.inputs[0].datatype = "float32"


def add_unknown_output(request: Request) -> None:
    request.outputs.add(name="q")


def repeat_output(request: Request) -> None:
    request.outputs.add(name="x")
    request.outputs.add(name="x")


def add_raw_entry(request: Request) -> None:
    request.raw_input_contents.append(b"")


def drop_raw_entry(request: Request) -> None:
    del request.raw_input_contents[1]


def add_contents_beside_raw(request: Request) -> None:
    request.inputs[0].contents.fp32_contents.extend([1, 2])


def add_empty_contents_beside_raw(request: Request) -> None:
    request.inputs[1].contents.SetInParent()


def give_one_raw_and_one_typed(request: Request) -> None:
    drop_raw_entry(request)
    add_contents_beside_raw(request)


def full_error(text: str) -> str:
    """The error that the caller reads. Texts in Triton's wording already contain the model's name."""
    return text if "for model 'm'" in text else f"model 'm': {text}"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (remove_input, "missing inputs ['a']: expected ['a', 'b'], got ['b']"),
        (remove_all, "missing inputs ['a', 'b']: expected ['a', 'b'], got []"),
        (add_unknown_input, "unexpected input 'c', expected ['a', 'b']"),
        (repeat_input, "input 'a' is given more than once"),
        (repeat_another_input, "input 'b' is given more than once"),
        (change_datatype, "input 'a': expected datatype FP32, got 'INT32'"),
        (change_to_no_datatype, "input 'a': expected datatype FP32, got 'float32'"),
        (add_unknown_output, "unexpected inference output 'q' for model 'm': expected some of ['x', 'h']"),
        (repeat_output, "output 'x' is requested more than once"),
        (add_raw_entry, "expected 2 entries in raw_input_contents, one per input, got 3"),
        (drop_raw_entry, "expected 2 entries in raw_input_contents, one per input, got 1"),
        (add_contents_beside_raw, "input 'a': expected either contents or raw_input_contents, got both"),
        (give_one_raw_and_one_typed, "input 'a': expected either contents or raw_input_contents, got both"),
        (add_empty_contents_beside_raw, "input 'b': expected either contents or raw_input_contents, got both"),
    ],
)
def test_decode_names_datatypes_or_entries_that_do_not_fit_are_refused(change: Change, text: str) -> None:
    assert refused(change) == full_error(text)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (shape(0), "input 'a': expected a leading batch dimension, got shape []"),
        (shape(0, 0, 2), "input 'a': expected a batch of 1 to 8 rows, got 0 in shape [0, 2]"),
        (shape(0, 9, 2), "input 'a': expected a batch of 1 to 8 rows, got 9 in shape [9, 2]"),
        (shape(0, -1, 2), "input 'a': expected a batch of 1 to 8 rows, got -1 in shape [-1, 2]"),
        (shape(0, 2**40, 2), f"input 'a': expected a batch of 1 to 8 rows, got {2**40} in shape [{2**40}, 2]"),
        (shape(0, 2, 2), "input 'b': expected 2 rows as in input 'a', got 1 in shape [1, 1]"),
        (shape(1, 2, 1), "input 'b': expected 1 rows as in input 'a', got 2 in shape [2, 1]"),
        (shape(0, 1, 3), "unexpected shape for input 'a' for model 'm': expected [-1, 2], got [1, 3]"),
        (shape(0, 1), "unexpected shape for input 'a' for model 'm': expected [-1, 2], got [1]"),
        (shape(0, 1, 2, 1), "unexpected shape for input 'a' for model 'm': expected [-1, 2], got [1, 2, 1]"),
        (shape(0, 1, -2), "unexpected shape for input 'a' for model 'm': expected [-1, 2], got [1, -2]"),
        (shape(1, 1, -1), "input 'b': shape: expected no negative dimension, got [1, -1]"),
        (shape(1, 1, -2), "unexpected shape for input 'b' for model 'm': expected [-1, -1], got [1, -2]"),
        (shape(0, *[1] * 65), f"unexpected shape for input 'a' for model 'm': expected [-1, 2], got {[1] * 65}"),
    ],
)
def test_decode_shapes_that_do_not_fit_are_refused(change: Change, text: str) -> None:
    assert refused(change) == full_error(text)


@pytest.mark.parametrize(
    ("dims", "rows", "shape", "expected", "send"),
    [
        ((2048,), 64, [2048], "[-1, 2048]", "[1, 2048]"),
        ((2048,), 4096, [2048], "[-1, 2048]", "[1, 2048]"),
        ((1,), 8, [1], "[-1, 1]", "[1, 1]"),
        ((-1,), 8, [9], "[-1, -1]", "[1, 9]"),
        ((3, -1), 8, [3, 0], "[-1, 3, -1]", "[1, 3, 0]"),
        ((), 8, [], "[-1]", "[1]"),
    ],
)
@pytest.mark.parametrize("datatype", ["FP32", "BYTES"])
def test_missing_batch_axis_is_named(
    dims: tuple[int, ...], rows: int, shape: list[int], expected: str, send: str, datatype: str
) -> None:
    request = Request()
    request.inputs.add(name="t", datatype=datatype, shape=shape)
    assert refusal(request, ModelSpec((TensorSpec("t", datatype, dims),), (), batched=True), rows) == (
        f"unexpected shape for input 't' for model 'm': expected {expected}, got {shape}: the batch axis is missing; "
        f"send shape {send} for one row"
    )


def test_other_sizes_lack_no_batch_axis() -> None:
    # By their rank, all axes but the first could be missing as well as the first one.
    request = infer("m", {"a": rows_of_floats(1), "b": np.array([b"text", b"more"], object)})
    request.inputs[0].shape[:] = [2, 1]
    assert "the batch axis is missing" not in refusal(request)
    request.inputs[0].shape[:] = [1, 2]
    assert refusal(request) == (
        "unexpected shape for input 'b' for model 'm': expected [-1, -1], got [2]: the batch axis is missing; "
        "send shape [1, 2] for one row"
    )


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (raw(0, bytes(7)), "input 'a': expected 8 bytes for FP32 of shape [1, 2], got 7"),
        (raw(0, b""), "input 'a': expected 8 bytes for FP32 of shape [1, 2], got 0"),
        (raw(0, bytes(9)), "input 'a': expected 8 bytes for FP32 of shape [1, 2], got 9"),
        (
            raw(1, b"\x00\x00"),
            "input 'b': expected at least 4 bytes for the lengths of the 1 elements of BYTES of shape [1, 1], got 2",
        ),
        (raw(1, bytes_element(b"abc", length=4)), "input 'b': expected 4 bytes in element 0 of 1, got 3"),
        (raw(1, bytes_element(b"", length=2**32 - 1)), "input 'b': expected 4294967295 bytes in element 0 of 1, got 0"),
        (raw(1, bytes_element(b"a") * 2), "input 'b': expected 1 elements of BYTES to end at byte 5, got 5 bytes more"),
        (
            raw(1, bytes_element(b"\xff")),
            "input 'b': expected UTF-8 text in each element, got invalid start byte in element 0",
        ),
        (
            shape(1, 1, 2**40),
            "input 'b': expected at least 4398046511104 bytes for the lengths of the 1099511627776 "
            "elements of BYTES of shape [1, 1099511627776], got 8",
        ),
        (shape(1, 1, 2**62), f"input 'b': shape: expected at most {(2**63 - 1) // 8} elements, got [1, {2**62}]"),
    ],
)
def test_decode_data_that_does_not_fit_is_refused(change: Change, text: str) -> None:
    assert refused(change) == f"model 'm': {text}"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (shape(0, 3, 2), "input 't': expected data in contents or raw_input_contents, got neither"),
        (shape(0, -1, 2), "input 't': shape: expected no negative dimension, got [-1, 2]"),
        (shape(0, -7, 2), "unexpected shape for input 't' for model 'm': expected [-1, 2], got [-7, 2]"),
        (shape(0, 2**62, 2), f"input 't': shape: expected at most {(2**63 - 1) // 8} elements, got [{2**62}, 2]"),
        (shape(0), "unexpected shape for input 't' for model 'm': expected [-1, 2], got []"),
    ],
)
def test_decode_without_batch_axis_shapes_that_do_not_fit_are_refused(change: Change, text: str) -> None:
    request = Request()
    request.inputs.add(name="t", datatype="FP32")
    change(request)
    assert refusal(request, WHOLE, 0) == full_error(text)


def typed(datatype: str, **contents: list[object]) -> tuple[Request, ModelSpec]:
    request = Request()
    request.inputs.add(name="t", datatype=datatype, shape=[2], contents=pb.InferTensorContents(**contents))  # type: ignore[arg-type]
    tensor = TensorSpec("t", datatype, (2,))
    return request, ModelSpec((tensor,), (tensor,))


@pytest.mark.parametrize(
    ("case", "text"),
    [
        (typed("FP32"), "expected data in contents or raw_input_contents, got neither"),
        (typed("FP32", fp32_contents=[1]), "expected 2 values in fp32_contents for shape [2], got 1"),
        (typed("FP32", fp32_contents=[1, 2, 3]), "expected 2 values in fp32_contents for shape [2], got 3"),
        (typed("FP32", fp64_contents=[1, 2]), "expected FP32 in fp32_contents alone, got fp64_contents"),
        (
            typed("FP32", fp32_contents=[1, 2], bool_contents=[True]),
            "expected FP32 in fp32_contents alone, got bool_contents",
        ),
        (
            typed("FP16", fp32_contents=[1, 2]),
            "expected the raw form for FP16, got typed contents, which cannot carry it",
        ),
        (
            typed("BF16", fp32_contents=[1, 2]),
            "expected the raw form for BF16, got typed contents, which cannot carry it",
        ),
        (typed("INT8", int_contents=[1, 128]), "expected -128 to 127 in int_contents for INT8, got 128"),
        (typed("UINT16", uint_contents=[65536, 0]), "expected 0 to 65535 in uint_contents for UINT16, got 65536"),
        (typed("BYTES", bytes_contents=[b"x"]), "expected 2 values in bytes_contents for shape [2], got 1"),
    ],
)
def test_decode_typed_contents_that_do_not_fit_are_refused(case: tuple[Request, ModelSpec], text: str) -> None:
    request, spec = case
    if not request.inputs[0].contents.ListFields():
        request.inputs[0].ClearField("contents")
    assert refusal(request, spec, 0) == f"model 'm': input 't': {text}"


def test_decode_raw_bool_other_than_0_and_1_is_refused() -> None:
    request = Request()
    add_raw(request, "t", "BOOL", [2], b"\x01\x02")
    tensor = TensorSpec("t", "BOOL", (2,))
    text = refusal(request, ModelSpec((tensor,), (tensor,)), 0)
    assert text == "model 'm': input 't': expected 0 or 1 in each byte of BOOL, got 2"


def test_decode_bad_parameter_is_refused_naming_the_model() -> None:
    def change(request: Request) -> None:
        request.parameters["timeout"].string_param = "soon"

    assert refused(change) == (
        "model 'm': invalid value type for 'timeout' parameter, expected int64_param or uint64_param, got string_param"
    )


@pytest.mark.parametrize("outputs", [[], ["x", "h"]])
def test_decode_typed_outputs_that_contents_cannot_carry_are_refused_before_execution(outputs: list[str]) -> None:
    def change(request: Request) -> None:
        request.parameters["binary_data_output"].bool_param = False
        for name in outputs:
            request.outputs.add(name=name)

    text = (
        "output 'h': expected binary_data_output to be true or left out, as typed contents can't carry FP16, got false"
    )
    assert refused(change) == f"model 'm': {text}"


def test_decode_typed_outputs_must_fit_into_contents_only_if_they_are_asked_for() -> None:
    request = good()
    request.parameters["binary_data_output"].bool_param = False
    request.outputs.add(name="x")
    assert ModelCodec("m", "1", SPEC, 8).read(request).options.parameters.typed_outputs


SWITCHED_OFF = "'shared_memory_region' is switched off; start the server with --allow-client-shm=true to switch it on"


def test_decode_output_into_shared_memory_is_not_supported_where_switched_off() -> None:
    request = good()
    request.outputs.add(name="x").parameters["shared_memory_region"].string_param = "1"
    with pytest.raises(NotSupported) as caught:
        ModelCodec("m", "1", SPEC, 8).read(request)
    assert str(caught.value) == f"model 'm': output 'x': {SWITCHED_OFF}"


@pytest.mark.parametrize(
    ("output", "count", "text"),
    [
        ("x", "3", "expected int64_param, got string_param"),
        ("x", 0, "expected a number of classes > 0, got 0"),
        ("h", 1, "expected one of UINT8, UINT16, UINT32, UINT64, INT8, INT16, INT32, INT64, FP32, FP64, got FP16"),
    ],
)
def test_decode_invalid_requests_for_classes_are_refused(output: str, count: object, text: str) -> None:
    def change(request: Request) -> None:
        request.outputs.add(name=output).parameters["classification"].CopyFrom(parameter(count))

    assert refused(change) == f"model 'm': output '{output}': parameter 'classification': {text}"


def test_decode_input_in_shared_memory_is_not_supported_where_switched_off() -> None:
    request = good()
    del request.raw_input_contents[0]
    request.inputs[0].parameters["shared_memory_region"].string_param = "region"
    with pytest.raises(NotSupported) as caught:
        ModelCodec("m", "1", SPEC, 8).read(request)
    assert str(caught.value) == f"model 'm': input 'a': {SWITCHED_OFF}"


def test_decode_works_after_a_refused_request() -> None:
    codec = ModelCodec("m", "1", SPEC, 8)
    with pytest.raises(InvalidRequest):
        codec.read(Request())
    assert codec.read(good()).options.rows == 1


MIB = 2**20
MANY = MAX_FIELDS - 100
"""As many fields as are read at all."""


def infer_of(change: Change) -> bytes:
    request = good()
    change(request)
    return request.SerializeToString()


@pytest.mark.parametrize(
    ("more", "text"),
    [
        (b"\x3a\x00" * MANY, "entries in raw_input_contents"),
        (b"\x32\x00" * MANY, "unexpected inference output ''"),
        (b"\x2a\x00" * MANY, "unexpected input ''"),
        (b"\x2a\x03\x0a\x01a" * (MANY // 2), "input 'a' is given more than once"),
        (infer_of(shape(0, *[1] * MIB)), "input 'a': shape: expected at most 64 dimensions, got 1048576"),
    ],
    ids=["raw", "outputs", "inputs", "same", "dims"],
)
def test_refusal_of_very_many_small_fields_takes_little_memory(more: bytes, text: str) -> None:
    """Otherwise a small request would take a lot of memory, and time from all others."""
    data = good().SerializeToString()
    if more.startswith(b"\x2a"):
        data = pb.ModelInferRequest(model_name="m").SerializeToString()
    elif more.startswith(b"\x0a"):
        data = b""
    reader, codec = RequestReader(), ModelCodec("m", "1", SPEC, 8)
    reader(data)
    tracemalloc.start()
    try:
        request = reader(data + more)
        assert not isinstance(request, Exception)
        with pytest.raises(InvalidRequest, match=text):
            codec.read(request)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert most < 4 * len(data + more) + MIB // 2  # some thousand fields are noted before it is given up
