"""Inputs to start from: a few good ones and a few bad ones for each target, from which mutation finds the rest.

`python -m tests.fuzz.seeds` writes them into the corpus, beside the findings kept there.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator

import numpy as np

from paceline.protos import inference_pb2 as pb
from tests.fuzz.services import METHODS, SHARED
from tests.fuzz.targets import CORPUS
from tests.shared_objects import add_shared_input, request_shared_output
from tests.wire import add_raw, bytes_element, infer, parameter

Seeds = Iterator[tuple[str, bytes]]

FLOATS = np.arange(4, dtype=np.float32).reshape(1, 2, 2)
TEXTS = np.array([[b"one", b""]], object)


def infer_seeds() -> Seeds:
    for name, request in _requests():
        yield name, request.SerializeToString()


def _requests() -> Iterator[tuple[str, pb.ModelInferRequest]]:
    rows = infer("rows", {"a": FLOATS, "b": TEXTS}, id="7", outputs=["y", "x"])
    yield "rows", rows
    known = {"priority": 1, "timeout": 1000, "binary_data_output": False, "paceline_batch_info": True, "mine": 0.5}
    yield "parameters", infer("rows", {"a": FLOATS, "b": TEXTS}, parameters=known)
    yield "text", infer("text", {"a": np.array([b"a", "ü".encode()], object), "b": np.array([True, False])})
    yield "no_text", infer("text", {"a": np.array([b"\xff"], object), "b": np.array([True, False])})
    yield "scalar", infer("scalar", {"a": np.array(5)})
    yield "any", infer("any", {"a": FLOATS, "b": np.array(b"x", object)})
    yield "any_rows", infer("any_rows", {"a": FLOATS, "b": TEXTS})
    every = pb.ModelInferRequest(model_name="every")
    add_raw(every, "FP32", "FP32", [1], bytes(4))
    add_raw(every, "BF16", "BF16", [2], bytes(4))
    add_raw(every, "BYTES", "BYTES", [1], bytes_element(b"abc"))
    yield "every", every
    typed = infer("every", outputs=["o5", "y"])
    typed.inputs.add(name="FP32", datatype="FP32", shape=[2]).contents.fp32_contents.extend([1, float("nan")])
    typed.inputs.add(name="INT8", datatype="INT8", shape=[1]).contents.int_contents.append(-128)
    typed.inputs.add(name="BYTES", datatype="BYTES", shape=[1]).contents.bytes_contents.append(b"x")
    typed.parameters["binary_data_output"].bool_param = False
    yield "typed", typed
    shape = np.array([2], np.int32)
    adapting = {"a": np.zeros((2, 2, 4, 3), np.float32), "b": shape, "c": np.array([[b"p", b"q"]] * 2, object)}
    yield "adapting", infer("adapting", adapting)
    yield "optional", infer("adapting", {"a": np.zeros((1, 2, 0, 3), np.float32), "b": shape})
    step = {"sequence_id": 2**40, "sequence_start": True, "sequence_end": False}
    yield "step", infer("steps", {"a": FLOATS[0, :1], "b": np.array(3)}, parameters=step)
    yield "ragged", infer("ragged", {"a": np.ones((2, 3), np.float32)})
    classes = infer("rows", {"a": FLOATS, "b": TEXTS}, outputs=["x"])
    classes.outputs[0].parameters["classification"].int64_param = 2
    yield "classes", classes
    shared = pb.ModelInferRequest(model_name="rows")
    add_shared_input(shared, "a", "FP32", [1, 2, 2], "r", 16, 32)
    add_shared_input(shared, "b", "BYTES", [1, 0], "r", 0)
    request_shared_output(shared, "x", "r", 16, 128)
    yield "shared", shared
    absurd = pb.ModelInferRequest(model_name="rows", raw_input_contents=[b"", b""])
    absurd.inputs.add(name="a", datatype="FP32", shape=[1, 2, 2**62])
    absurd.inputs.add(name="b", datatype="BYTES", shape=[1, 2**40])
    yield "absurd", absurd


def tensor_seeds() -> Seeds:
    for number in range(14):
        yield f"datatype_{number}", bytes([number, 2, 3, 2]) + bytes(8)
    yield "huge", b"\x09\x02" + b"\xff" + struct.pack("<q", 2**62) + b"\x01"
    for number in range(14):
        if number > 11:
            yield f"bytes_{number}", bytes([number, 1, 3]) + bytes_element(b"ab") + bytes_element(b"", 2**32 - 1)


def contents_seeds() -> Seeds:
    contents = pb.InferTensorContents(int_contents=[1, -1, 300], bytes_contents=[b"a"], fp64_contents=[0.5])
    for number in range(14):
        yield f"datatype_{number}", bytes([number, 1, 4]) + contents.SerializeToString()
    for name, one in {
        "ints": pb.InferTensorContents(int_contents=[1, -1, 300]),
        "bools": pb.InferTensorContents(bool_contents=[True, False, True]),
        "floats": pb.InferTensorContents(fp32_contents=[1, float("inf"), 0]),
    }.items():
        yield name, b"\x02\x01\x04" + one.SerializeToString()


def headers_seeds() -> Seeds:
    plain = infer(parameters={"timeout": 5, "mine": "x", "paceline_unordered": True}).SerializeToString()
    yield "plain", b"x-one\n1\nx-two\nzwei\xc3\xbc\n" + plain
    yield "reserved", b"priority\n1\n" + plain
    yield "repeated", b"x\n1\nx\n2\nblob-bin\n\x00\xff\n"
    for kind, value in {"none": None, "inf": float("inf"), "below": -1}.items():
        message = infer(parameters={"priority": 1})
        message.parameters["timeout"].CopyFrom(parameter(value) if value is not None else pb.InferParameter())
        yield kind, b"\n" + message.SerializeToString()


_TENSORS = """
input { name: "a" data_type: TYPE_FP32 dims: [ 2, -1 ] } output { name: "x" data_type: TYPE_FP32 dims: [ 2, -1 ] }
"""


def config_seeds() -> Seeds:
    texts = {
        "plain": 'backend: "identity" max_batch_size: 4 dynamic_batching { }',
        "none": 'backend: "identity" max_batch_size: 0',
        "policies": """backend: "identity" max_batch_size: 8 dynamic_batching { preferred_batch_size: [ 2, 4 ]
            max_queue_delay_microseconds: 100 priority_levels: 3 default_priority_level: 2
            default_queue_policy { timeout_action: DELAY default_timeout_microseconds: 9 max_queue_size: 5 }
            priority_queue_policy { key: 1 value { allow_timeout_override: true } } }""",
        "own": """backend: "identity" max_batch_size: 8 parameters { key: "paceline.batch_sizes"
            value { string_value: "2,8" } } parameters { key: "execute_delay_ms" value { string_value: "0" } }
            parameters { key: "paceline.split_oversized" value { string_value: "true" } }""",
        "groups": """backend: "identity" max_batch_size: 1 instance_group [ { count: 2 kind: KIND_CPU }, { count: 1 } ]
            version_policy { specific { versions: [ 1 ] } } metric_tags { key: "team" value: "a" }""",
        "warm": """backend: "identity" max_batch_size: 2 model_warmup { name: "w" batch_size: 2 count: 3 inputs {
            key: "a" value { data_type: TYPE_FP32 dims: [ 2, 3 ] random_data: true } } }""",
        "steps": """backend: "identity" max_batch_size: 4 sequence_batching { max_sequence_idle_microseconds: 9
            direct { minimum_slot_utilization: 0.5 max_queue_delay_microseconds: 3 } }""",
        "states": """backend: "identity" max_batch_size: 4 sequence_batching { oldest { preferred_batch_size: 2 }
            control_input { name: "s" control { kind: CONTROL_SEQUENCE_START fp32_false_true: [ 0, 1 ] } }
            state { input_name: "h" output_name: "g" data_type: TYPE_FP32 dims: [ 2, -1 ]
              initial_state { name: "i" data_type: TYPE_FP32 dims: [ 2, 0 ] zero_data: true } } }""",
        "onnx": 'platform: "onnxruntime_onnx" optimization { graph { level: 1 } }',
    }
    for name, text in texts.items():
        yield name, (text + _TENSORS).encode()
    yield (
        "tensors",
        b"""backend: "identity" max_batch_size: 4
input { name: "a" data_type: TYPE_FP32 dims: [ 6 ] reshape { shape: [ 2, 3 ] } }
input { name: "b" data_type: TYPE_STRING dims: [ -1 ] optional: true }
input { name: "s" data_type: TYPE_INT32 dims: [ 2 ] is_shape_tensor: true }
output { name: "x" data_type: TYPE_FP32 dims: [ 6 ] reshape { shape: [ 2, 3 ] } }
output { name: "y" data_type: TYPE_STRING dims: [ -1 ] }
output { name: "t" data_type: TYPE_INT32 dims: [ 2 ] is_shape_tensor: true }
""",
    )
    yield (
        "ragged",
        b"""backend: "identity" max_batch_size: 4
input { name: "a" data_type: TYPE_FP32 dims: [ -1 ] allow_ragged_batch: true }
output { name: "x" data_type: TYPE_FP32 dims: [ -1 ] }
batch_output { target_name: "x" kind: BATCH_SCATTER_WITH_INPUT_SHAPE source_input: "a" }
""",
    )
    yield (
        "made",
        b"""backend: "identity" max_batch_size: 4 input { name: "a" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "x" data_type: TYPE_FP32 dims: [ -1 ] label_filename: "../labels.txt" }
batch_input { kind: BATCH_ELEMENT_COUNT target_name: "n" data_type: TYPE_FP32 source_input: "a" }
""",
    )


def load_seeds() -> Seeds:
    config = {
        "backend": "identity",
        "max_batch_size": 4,
        "input": [{"name": "a", "data_type": "TYPE_FP32", "dims": [2]}],
        "output": [{"name": "x", "data_type": "TYPE_FP32", "dims": [2]}],
    }
    cases = {
        "plain": (json.dumps(config), ["1/model.onnx"]),
        "deep": ('{"parameters":' + '{"a":' * 40, ["1/a", "2/b/c"]),
        "outside": (json.dumps(config), ["../../x", "1/../../y", "/etc/x"]),
        "clash": (json.dumps(config), ["1/a", "1/a/b"]),
    }
    for name, (text, files) in cases.items():
        request = pb.RepositoryModelLoadRequest(model_name="m")
        request.parameters["config"].string_param = text
        for file in files:
            request.parameters[f"file:{file}"].bytes_param = b"x"
        yield name, request.SerializeToString()
    yield "bare", pb.RepositoryModelLoadRequest(model_name="m").SerializeToString()


def _echo(rows: int = 1) -> bytes:
    return infer("echo", {"a": np.ones((rows, 3), np.float32)}, id="1").SerializeToString()


def service_seeds() -> Seeds:
    requests = {
        "ModelInfer": infer("text", {"a": np.array([b"x"], object)}),
        "ServerReady": pb.ServerReadyRequest(),
        "ModelReady": pb.ModelReadyRequest(name="echo", version="1"),
        "ModelMetadata": pb.ModelMetadataRequest(name="text", version="01"),
        "ServerMetadata": pb.ServerMetadataRequest(),
        "ModelConfig": pb.ModelConfigRequest(name="echo", version="1"),
        "ModelStatistics": pb.ModelStatisticsRequest(name="echo"),
        "RepositoryIndex": pb.RepositoryIndexRequest(ready=True),
        "RepositoryModelUnload": pb.RepositoryModelUnloadRequest(model_name="echo"),
        "SystemSharedMemoryStatus": pb.SystemSharedMemoryStatusRequest(name="r"),
        "SystemSharedMemoryRegister": pb.SystemSharedMemoryRegisterRequest(
            name="r", key=f"/{SHARED}", offset=4, byte_size=8
        ),
        "SystemSharedMemoryUnregister": pb.SystemSharedMemoryUnregisterRequest(name="r"),
        "CudaSharedMemoryRegister": pb.CudaSharedMemoryRegisterRequest(name="g", raw_handle=bytes(64), byte_size=8),
        "TraceSetting": pb.TraceSettingRequest(model_name="echo"),
        "LogSettings": pb.LogSettingsRequest(),
    }
    requests["TraceSetting"].settings["trace_rate"].value.append("5")
    requests["LogSettings"].settings["log_verbose_level"].uint32_param = 1
    for method, request in requests.items():
        yield method, bytes([METHODS.index(method)]) + request.SerializeToString()
    for rows in (1, 2, 5):
        yield f"rows_{rows}", bytes([METHODS.index("ModelInfer")]) + _echo(rows)


def stream_seeds() -> Seeds:
    cancel = infer("echo", id="1", parameters={"paceline_cancel": True}).SerializeToString()
    unordered = infer("echo", {"a": np.ones((1, 3), np.float32)}, parameters={"paceline_unordered": True})
    requests = [_echo(), unordered.SerializeToString(), b"\xff", _echo(5), cancel, infer("nobody").SerializeToString()]
    for flag in (0, 1):
        parts = [struct.pack("<H", len(one)) + one for one in requests]
        yield f"all_{flag}", bytes([flag]) + b"".join(parts)
        yield f"one_{flag}", bytes([flag]) + parts[0]


def frames_seeds() -> Seeds:
    for step in (1, 7, 64, 255):
        yield f"step_{step}", bytes([step, 0]) + bytes(range(64, 256, 3))
    yield "broken_off", bytes([9, 11]) + b"\x45hello\x82world" * 4


def write() -> None:
    """Write all seeds."""
    for name, maker in list(globals().items()):
        if name.endswith("_seeds"):
            folder = CORPUS / name.removesuffix("_seeds")
            folder.mkdir(parents=True, exist_ok=True)
            for seed, data in maker():
                (folder / f"seed-{seed}").write_bytes(data)


if __name__ == "__main__":
    write()
