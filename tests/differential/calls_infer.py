"""ModelInfer: accepted and refused requests, and the answers."""

from __future__ import annotations

import struct

import numpy as np

from paceline.protos import inference_pb2 as pb
from tests.differential.comparing import Call
from tests.differential.messages import floats, infer, ints, of_input, raw, texts, typed, wanting
from tests.differential.repository import DATATYPES

__all__ = ["CALLS", "HARMFUL"]

RAW = "raw_output_contents"
ALL = ("outputs", RAW)
PAIR = {"INPUT0": ints(1, 4), "INPUT1": ints(1, 4)}
FREE = {"INPUT0": floats(1, 3)}
ROW = struct.pack("<3f", 1, 2, 3)
FOUR = struct.pack("<4i", 1, 2, 3, 4)


def both(**parameters: object) -> pb.ModelInferRequest:
    return infer("pair", PAIR, parameters=parameters)


def free(**parameters: object) -> pb.ModelInferRequest:
    return infer("free", FREE, parameters=parameters)


def unsigned(value: int) -> pb.InferParameter:
    return pb.InferParameter(uint64_param=value)


def doubled(outputs: str) -> pb.ModelInferRequest:
    return wanting(infer("pair", PAIR), outputs, outputs)


def type_named(name: str, dtype: str) -> pb.ModelInferRequest:
    values = texts(b"a", b"", b"\0") if dtype == "O" else np.array([[0, 1, 1]], dtype)
    return infer("types", {f"INPUT_{name}": values}, outputs=[f"OUTPUT_{name}"])


def without_contents() -> pb.ModelInferRequest:
    request = infer("free", FREE)
    del request.raw_input_contents[:]
    return request


def both_contents() -> pb.ModelInferRequest:
    request = infer("free", FREE)
    request.inputs[0].contents.fp32_contents.extend([1, 2, 3])
    return request


def mixed_contents() -> pb.ModelInferRequest:
    request = raw("pair", ("INPUT1", "INT32", [1, 4], FOUR))
    request.inputs.append(typed("pair", "INPUT0", "INT32", [1, 4], int_contents=range(4)).inputs[0])
    return request


ANSWERED = [
    Call("infer", infer("pair", PAIR)),
    Call("infer by version", infer("pair", PAIR, version="1")),
    Call("infer by version -1", infer("pair", PAIR, version="-1"), "INVALID_ARGUMENT", "OK", "version `-1`"),
    Call("infer with an id", infer("pair", PAIR, id="one")),
    Call("infer with an id of any kind", infer("pair", PAIR, id="ä \n\t/")),
    Call("infer 8 rows", infer("pair", {"INPUT0": ints(8, 4), "INPUT1": ints(8, 4)})),
    Call("infer without a batch axis", infer("whole", {"INPUT0": ints(4), "INPUT1": ints(4)})),
    Call("infer of a model that doesn't batch dynamically", infer("serial", {"INPUT0": floats(4, 3)})),
    Call("infer of a free axis of 1", infer("free", {"INPUT0": floats(1, 1)})),
    Call("infer of an empty axis", infer("free", {"INPUT0": floats(1, 0)})),
    Call("infer of a free axis in the middle", infer("grid", {"INPUT0": ints(2, 3, 2, dtype="<i8")})),
    Call("infer inputs in another order", infer("pair", {"INPUT1": ints(1, 4), "INPUT0": ints(1, 4)})),
    Call(
        "outputs in another order", wanting(infer("pair", PAIR), "OUTPUT1", "OUTPUT0"), row="order of outputs", free=ALL
    ),
    Call("one output", wanting(infer("pair", PAIR), "OUTPUT1")),
    Call("text", infer("text", {"INPUT0": texts(b"a", b"", "ü".encode(), b"\0\xff")})),
    Call("text, typed", typed("text", "INPUT0", "BYTES", [1, 2], bytes_contents=[b"a", b""])),
    Call("optional input there", infer("optional", {"INPUT0": floats(1, 3), "INPUT1": floats(1, 2)})),
    Call("optional input left out", infer("optional", {"INPUT0": floats(1, 3)})),
    Call("reshape", infer("reshaped", {"INPUT0": floats(2, 2, 2), "INPUT1": floats(2, 1)})),
    Call("version by number", infer("versions", {"INPUT0": floats(1, 4)}, version="1")),
    Call("version that is the highest", infer("versions", {"INPUT0": floats(1, 4)})),
    Call("version among the latest", infer("latest", {"INPUT0": floats(1, 4)}, version="2")),
    *(Call(f"datatype {name}", type_named(name, dtype)) for name, dtype in DATATYPES.items()),
    Call("typed BOOL", typed("types", "INPUT_BOOL", "BOOL", [1, 2], bool_contents=[True, False])),
    Call("typed INT8", typed("types", "INPUT_INT8", "INT8", [1, 2], int_contents=[-1, 2])),
    Call("typed INT16", typed("types", "INPUT_INT16", "INT16", [1, 2], int_contents=[-1, 2])),
    Call("typed INT32", typed("types", "INPUT_INT32", "INT32", [1, 2], int_contents=[-1, 2])),
    Call("typed INT64", typed("types", "INPUT_INT64", "INT64", [1, 2], int64_contents=[-1, 2])),
    Call("typed UINT8", typed("types", "INPUT_UINT8", "UINT8", [1, 2], uint_contents=[1, 2])),
    Call("typed UINT16", typed("types", "INPUT_UINT16", "UINT16", [1, 2], uint_contents=[1, 2])),
    Call("typed UINT32", typed("types", "INPUT_UINT32", "UINT32", [1, 2], uint_contents=[1, 2])),
    Call("typed UINT64", typed("types", "INPUT_UINT64", "UINT64", [1, 2], uint64_contents=[1, 2])),
    Call("typed FP32", typed("types", "INPUT_FP32", "FP32", [1, 2], fp32_contents=[1, 2])),
    Call("typed FP64", typed("types", "INPUT_FP64", "FP64", [1, 2], fp64_contents=[1, 2])),
    Call(
        "typed INT8 beyond its range",
        typed("types", "INPUT_INT8", "INT8", [1, 1], int_contents=[300]),
        here="INVALID_ARGUMENT",
        row="typed contents beyond the datatype",
    ),
    Call(
        "typed UINT8 beyond its range",
        typed("types", "INPUT_UINT8", "UINT8", [1, 1], uint_contents=[300]),
        here="INVALID_ARGUMENT",
        row="typed contents beyond the datatype",
    ),
]

REFUSED = [
    Call(
        "unknown model", infer("nobody", PAIR), "NOT_FOUND", phrase="Request for unknown model: 'nobody' is not found"
    ),
    Call("no model's name", infer("", PAIR), "NOT_FOUND"),
    Call(
        "unknown version",
        infer("pair", PAIR, version="9"),
        "NOT_FOUND",
        phrase="Request for unknown model: 'pair' version 9 is not found",
    ),
    Call("version left out by the policy", infer("versions", {"INPUT0": floats(1, 4)}, version="2"), "NOT_FOUND"),
    Call("version that is no number", infer("pair", PAIR, version="x"), "INVALID_ARGUMENT", phrase="version"),
    Call("version and more", infer("pair", PAIR, version="1x"), "OK", "INVALID_ARGUMENT", "version such as"),
    Call("version with a sign", infer("pair", PAIR, version="+1"), "OK", "INVALID_ARGUMENT", "version such as"),
    Call("version with zeros", infer("pair", PAIR, version="01"), "OK", "NOT_FOUND", "version such as"),
    Call("version 0", infer("pair", PAIR, version="0"), "NOT_FOUND"),
    Call("version -2", infer("pair", PAIR, version="-2"), "INVALID_ARGUMENT"),
    Call(
        "version beyond 64 bits",
        infer("pair", PAIR, version="9" * 20),
        "INVALID_ARGUMENT",
        "NOT_FOUND",
        "version such as",
    ),
    Call(
        "model that didn't load",
        infer("broken", {"INPUT0": floats(1, 4)}),
        "NOT_FOUND",
        "UNAVAILABLE",
        "a model that isn't ready",
    ),
    Call("model that didn't load, by version", infer("broken", {"INPUT0": floats(1, 4)}, version="1"), "UNAVAILABLE"),
    Call("input missing", infer("pair", {"INPUT0": ints(1, 4)}), "INVALID_ARGUMENT", phrase="INPUT1"),
    Call("no inputs", infer("pair"), "INVALID_ARGUMENT"),
    Call(
        "optional input alone",
        infer("optional", {"INPUT1": floats(1, 4)}),
        "OK",
        "INVALID_ARGUMENT",
        "an optional input instead",
    ),
    Call("unknown input", infer("free", {**FREE, "INPUT9": floats(1, 3)}), "INVALID_ARGUMENT", phrase="INPUT9"),
    Call("unknown input instead", infer("free", {"INPUT9": floats(1, 3)}), "INVALID_ARGUMENT", phrase="INPUT9"),
    Call("input twice", raw("free", *[("INPUT0", "FP32", [1, 3], ROW)] * 2), "INVALID_ARGUMENT", phrase="INPUT0"),
    Call(
        "unknown output",
        wanting(infer("free", FREE), "OUTPUT9"),
        "INVALID_ARGUMENT",
        phrase="unexpected inference output 'OUTPUT9' for model 'free'",
    ),
    Call("output twice", doubled("OUTPUT0"), "OK", "INVALID_ARGUMENT", "an output asked for twice"),
    Call("other datatype", raw("free", ("INPUT0", "INT32", [1, 3], ROW)), "INVALID_ARGUMENT", phrase="INT32"),
    Call("unknown datatype", raw("free", ("INPUT0", "FP31", [1, 3], ROW)), "INVALID_ARGUMENT"),
    Call("datatype in small letters", raw("free", ("INPUT0", "fp32", [1, 3], ROW)), "INVALID_ARGUMENT"),
    Call("no datatype", raw("free", ("INPUT0", "", [1, 3], ROW)), "INVALID_ARGUMENT"),
    Call("datatype TYPE_FP32", raw("free", ("INPUT0", "TYPE_FP32", [1, 3], ROW)), "INVALID_ARGUMENT"),
    Call("no shape", raw("free", ("INPUT0", "FP32", [], ROW)), "INVALID_ARGUMENT"),
    Call("no batch axis", raw("free", ("INPUT0", "FP32", [3], ROW)), "INVALID_ARGUMENT", phrase="shape"),
    Call("an axis too many", raw("free", ("INPUT0", "FP32", [1, 3, 1], ROW)), "INVALID_ARGUMENT", phrase="shape"),
    Call("axis of another size", infer("fails", {"INPUT0": floats(1, 3)}), "INVALID_ARGUMENT", phrase="shape"),
    Call("batch axis where there is none", infer("flat", {"INPUT0": floats(1, 4)}), "INVALID_ARGUMENT", phrase="shape"),
    Call("negative axis", raw("free", ("INPUT0", "FP32", [1, -1], ROW)), "INVALID_ARGUMENT", phrase="INPUT0"),
    Call("negative rows", raw("free", ("INPUT0", "FP32", [-1, 3], ROW)), "INVALID_ARGUMENT"),
    Call("no rows", raw("free", ("INPUT0", "FP32", [0, 3], b"")), "INVALID_ARGUMENT"),
    Call(
        "no rows, and the bytes of one",
        raw("free", ("INPUT0", "FP32", [0, 3], ROW)),
        "OK",
        "INVALID_ARGUMENT",
        "0 rows",
    ),
    Call("too many rows", infer("free", {"INPUT0": floats(9, 3)}), "INVALID_ARGUMENT", phrase="8"),
    Call("too many rows of a wrong shape", infer("fails", {"INPUT0": floats(9, 3)}), "INVALID_ARGUMENT"),
    Call("rows that disagree", infer("pair", {"INPUT0": ints(1, 4), "INPUT1": ints(2, 4)}), "INVALID_ARGUMENT"),
    Call("axes beyond any memory", raw("free", ("INPUT0", "FP32", [1, 2**62], ROW)), "INVALID_ARGUMENT"),
    Call("too few bytes", raw("free", ("INPUT0", "FP32", [1, 3], ROW[:-4])), "INVALID_ARGUMENT", phrase="INPUT0"),
    Call("too many bytes", raw("free", ("INPUT0", "FP32", [1, 3], ROW * 2)), "INVALID_ARGUMENT", phrase="INPUT0"),
    Call("no bytes", raw("free", ("INPUT0", "FP32", [1, 3], b"")), "INVALID_ARGUMENT"),
    Call("no contents", without_contents(), "INVALID_ARGUMENT"),
    Call("raw and typed contents", both_contents(), "INVALID_ARGUMENT", phrase="contents"),
    Call(
        "raw contents for one of two",
        raw("pair", ("INPUT0", "INT32", [1, 4], FOUR), ("INPUT1", "INT32", [1, 4], None)),
        "INVALID_ARGUMENT",
    ),
    Call(
        "raw contents beyond the inputs",
        pb.ModelInferRequest(model_name="free", inputs=infer("free", FREE).inputs, raw_input_contents=[ROW, ROW]),
        "OK",
        "INVALID_ARGUMENT",
        "raw contents beyond",
    ),
    Call(
        "no contents of an empty axis",
        raw("free", ("INPUT0", "FP32", [1, 0], None)),
        "INVALID_ARGUMENT",
        "OK",
        "an input of no elements",
    ),
    Call(
        "raw contents for one and typed ones for the other",
        mixed_contents(),
        "INVALID_ARGUMENT",
        phrase="contents",
    ),
    Call("typed contents too short", typed("free", "INPUT0", "FP32", [1, 3], fp32_contents=[1]), "INVALID_ARGUMENT"),
    Call("typed contents too long", typed("free", "INPUT0", "FP32", [1, 1], fp32_contents=[1, 2]), "INVALID_ARGUMENT"),
    Call(
        "typed contents of another type", typed("free", "INPUT0", "FP32", [1, 1], fp64_contents=[1]), "INVALID_ARGUMENT"
    ),
    Call(
        "typed contents of two types",
        typed("free", "INPUT0", "FP32", [1, 1], fp32_contents=[1], fp64_contents=[1]),
        "INVALID_ARGUMENT",
    ),
    Call("typed FP16", typed("types", "INPUT_FP16", "FP16", [1, 1], fp32_contents=[1]), "INVALID_ARGUMENT"),
    Call("text of too few elements", raw("text", ("INPUT0", "BYTES", [1, 2], b"\x01\0\0\0a")), "INVALID_ARGUMENT"),
    Call("text of too many elements", raw("text", ("INPUT0", "BYTES", [1, 1], b"\x01\0\0\0a" * 2)), "INVALID_ARGUMENT"),
    Call("text cut in a length", raw("text", ("INPUT0", "BYTES", [1, 1], b"\x01\0\0")), "INVALID_ARGUMENT"),
    Call("text cut in an element", raw("text", ("INPUT0", "BYTES", [1, 1], b"\x09\0\0\0a")), "INVALID_ARGUMENT"),
    Call("text of no elements", raw("text", ("INPUT0", "BYTES", [1, 0], b""))),
    Call("text of no elements and some bytes", raw("text", ("INPUT0", "BYTES", [1, 0], bytes(4))), "INVALID_ARGUMENT"),
    Call("text longer than can be", raw("text", ("INPUT0", "BYTES", [1, 1], b"\xff" * 4)), "INVALID_ARGUMENT"),
    Call("text of no bytes", raw("text", ("INPUT0", "BYTES", [1, 1], b"")), "INVALID_ARGUMENT"),
    Call(
        "bool of 2", raw("types", ("INPUT_BOOL", "BOOL", [1, 1], b"\x02")), "OK", "INVALID_ARGUMENT", "a byte of BOOL"
    ),
    Call(
        "model that raises",
        infer("fails", {"INPUT0": -np.ones((1, 4), np.float32)}),
        "INTERNAL",
        phrase="less than nothing",
    ),
]

PARAMETERS = [
    Call("unknown parameter, text", both(mine="a")),
    Call("unknown parameter, number", both(mine=1)),
    Call("unknown parameter, bool", both(mine=True)),
    Call("unknown parameter, double", both(mine=1.5)),
    Call("unknown parameter, unsigned", both(mine=unsigned(1)), "INVALID_ARGUMENT", "OK", "`uint64_param`"),
    Call("unknown parameter without a value", both(mine=pb.InferParameter()), "INVALID_ARGUMENT"),
    Call("unknown parameter that is no number", both(mine=float("nan")), "OK", "INVALID_ARGUMENT", "a number that"),
    Call("priority", both(priority=1)),
    Call("priority, unsigned", both(priority=unsigned(1))),
    Call("priority below 0", both(priority=-1), "INVALID_ARGUMENT", phrase="priority"),
    Call("priority as text", both(priority="1"), "INVALID_ARGUMENT", phrase="priority"),
    Call("timeout", both(timeout=1000)),
    Call("timeout, unsigned", both(timeout=unsigned(1000)), "INVALID_ARGUMENT", "OK", "`uint64_param`"),
    Call("timeout below 0", both(timeout=-1), "OK", "INVALID_ARGUMENT", "`timeout` below 0"),
    Call("timeout as text", both(timeout="1"), "INVALID_ARGUMENT", phrase="timeout"),
    Call("timeout as double", both(timeout=1.0), "INVALID_ARGUMENT", phrase="timeout"),
    Call("sequence_id", both(sequence_id=7, sequence_start=True, sequence_end=True)),
    Call("sequence_id as text", both(sequence_id="a")),
    Call("sequence_id as bool", both(sequence_id=True), "INVALID_ARGUMENT", phrase="sequence_id"),
    Call("sequence_id below 0", both(sequence_id=-1)),
    Call("sequence_id, unsigned", both(sequence_id=unsigned(7)), "INVALID_ARGUMENT", "OK", "`uint64_param`"),
    Call("sequence_id that is long", both(sequence_id="x" * 129), "UNIMPLEMENTED", phrase="string correlation ID"),
    Call("sequence_start as number", both(sequence_start=1), "INVALID_ARGUMENT", phrase="sequence_start"),
    Call("sequence_end as number", both(sequence_end=1), "INVALID_ARGUMENT", phrase="sequence_end"),
    Call("headers", both(headers="a")),
    Call("binary_data_output", both(binary_data_output=True)),
    Call("binary_data_output false", both(binary_data_output=False), row="`binary_data_output` of", free=ALL),
    Call(
        "binary_data_output as number", both(binary_data_output=0), "OK", "INVALID_ARGUMENT", "`binary_data_output` as"
    ),
    Call("triton_ and anything", both(triton_x=True), "INVALID_ARGUMENT", phrase="triton_"),
    Call("triton_enable_empty_final_response", both(triton_enable_empty_final_response=True)),
    Call(
        "triton_enable_empty_final_response as number", both(triton_enable_empty_final_response=1), "INVALID_ARGUMENT"
    ),
    Call("unknown parameter of an input", of_input(infer("pair", PAIR), mine=1)),
    Call("unknown parameter of an output", wanting(infer("pair", PAIR), "OUTPUT0", mine=1)),
    Call("binary_data of an output", wanting(infer("pair", PAIR), "OUTPUT0", binary_data=True)),
    Call("binary_data_size of an input", of_input(infer("pair", PAIR), binary_data_size=16)),
]

LABELLED = {"INPUT0": np.array([[1, 4, 2, 3], [9, 8, 8, 7]], np.float32)}


def classes(model: str, value: object, inputs: dict[str, object] | None = None) -> pb.ModelInferRequest:
    return wanting(infer(model, inputs or LABELLED), "OUTPUT0", classification=value)  # type: ignore[arg-type]


CLASSIFICATION = [
    Call("2 classes", classes("labelled", 2)),
    Call("as many classes as elements", classes("labelled", 4)),
    Call("more classes than elements", classes("labelled", 9)),
    Call("2**40 classes", classes("labelled", 2**40), row="`classification` beyond", free=("outputs", RAW)),
    Call("0 classes", classes("labelled", 0), "INVALID_ARGUMENT", phrase="classification"),
    Call("-1 classes", classes("labelled", -1), "INVALID_ARGUMENT", phrase="classification"),
    Call("classes as text", classes("labelled", "2"), "INVALID_ARGUMENT", phrase="classification"),
    Call("classes as unsigned", classes("labelled", unsigned(2)), "INVALID_ARGUMENT", phrase="classification"),
    Call("classes without labels", classes("free", 2, {"INPUT0": floats(1, 3)})),
    Call("classes without a batch axis", classes("flat", 2, {"INPUT0": floats(4)})),
    Call("classes of no elements", classes("free", 2, {"INPUT0": floats(1, 0)})),
    Call("classes of numbers", classes("grid", 2, {"INPUT0": ints(1, 2, 2, dtype="<i8")})),
    Call("classes of fractions", classes("flat", 4, {"INPUT0": np.array([0.1, 1e-9, 1e20, -3], np.float32)})),
    Call("classes of no number", classes("flat", 4, {"INPUT0": np.array([np.inf, -np.inf, 1, 0], np.float32)})),
    Call(
        "classes of FP64", wanting(infer("types", {"INPUT_FP64": np.array([[0.1]])}), "OUTPUT_FP64", classification=1)
    ),
    Call(
        "classes of UINT8",
        wanting(infer("types", {"INPUT_UINT8": np.array([[3, 4]], "u1")}), "OUTPUT_UINT8", classification=1),
    ),
    Call(
        "classes of INT8",
        wanting(infer("types", {"INPUT_INT8": np.array([[-3, -4]], "i1")}), "OUTPUT_INT8", classification=1),
    ),
]

HARMFUL = [
    Call(
        "axes whose product is 0 in 64 bits",
        raw("free", ("INPUT0", "FP32", [4, 2**62], b"")),
        "INTERNAL",
        "INVALID_ARGUMENT",
        "a shape of more elements",
    ),
    Call(
        "classes of text",
        classes("text", 1, {"INPUT0": texts(b"a")}),
        "UNAVAILABLE",
        "INVALID_ARGUMENT",
        "`classification` of what",
    ),
]
"""These end Triton, or a process of it: each gets a Triton of its own."""

CALLS = [*ANSWERED, *REFUSED, *PARAMETERS, *CLASSIFICATION]
