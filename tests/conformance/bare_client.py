"""A user's own program: what protoc generated from our two .proto files, grpcio, and nothing else.

It is copied beside freshly generated stubs and run on its own: `python bare_client.py TARGET`. It sends a server of the
zoo's models every kind of request of the Open Inference Protocol and prints the answers as one JSON document. Must not:
import anything of this project, or numpy.
"""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import inference_pb2 as pb
import inference_pb2_grpc
from google.protobuf.json_format import MessageToDict

ROW = list(range(16))
INTS = struct.Struct("<16i")


def main(target: str) -> None:
    with grpc.insecure_channel(target) as channel:
        stub = inference_pb2_grpc.GRPCInferenceServiceStub(channel)
        json.dump({"modules": own_modules(), **answers(stub), **refusals(stub)}, sys.stdout)


def own_modules() -> dict[str, str]:
    """Where the modules in use that could be this project's were loaded from."""
    folders = ("protos", "server", "scheduler", "backends", "clients", "numpy")
    stubs = {name: str(Path(sys.modules[name].__file__ or "").parent) for name in ("inference_pb2", "model_config_pb2")}
    return stubs | {name: "must not be here" for name in folders if name in sys.modules}


def answers(stub: Any) -> dict[str, Any]:
    asked: dict[str, tuple[Callable[..., Any], Any]] = {
        "live": (stub.ServerLive, pb.ServerLiveRequest()),
        "ready": (stub.ServerReady, pb.ServerReadyRequest()),
        "model ready": (stub.ModelReady, pb.ModelReadyRequest(name="simple", version="1")),
        "server metadata": (stub.ServerMetadata, pb.ServerMetadataRequest()),
        "model metadata": (stub.ModelMetadata, pb.ModelMetadataRequest(name="simple")),
        "typed": (stub.ModelInfer, typed("INT32", int_contents=ROW)),
        "raw": (stub.ModelInfer, raw(INTS.pack(*ROW), INTS.pack(*ROW))),
        "typed output": (stub.ModelInfer, typed_output("simple")),
        "text": (stub.ModelInfer, text(b"gr\xc3\xbcn", b"")),
        "scalar": (stub.ModelInfer, scalar(1.25)),
    }
    return {what: MessageToDict(rpc(request, timeout=20)) for what, (rpc, request) in asked.items()}


def refusals(stub: Any) -> dict[str, list[str]]:
    both = raw(INTS.pack(*ROW), INTS.pack(*ROW))
    both.inputs[1].contents.int_contents.extend(ROW)
    wrong_parameter = typed("INT32", int_contents=ROW)
    wrong_parameter.parameters["timeout"].string_param = "soon"
    return {
        what: refusal(stub.ModelInfer, request)
        for what, request in {
            "raw too short": raw(INTS.pack(*ROW), b"\0" * 63),
            "raw missing": raw(INTS.pack(*ROW)),
            "raw too many": raw(*[INTS.pack(*ROW)] * 3),
            "raw and typed": both,
            "typed too few": typed("INT32", int_contents=ROW[1:]),
            "typed of another kind": typed("INT32", fp32_contents=ROW),
            "typed twice": typed("INT32", int_contents=ROW, int64_contents=ROW),
            "no data": typed("INT32"),
            "unknown datatype": typed("INT33", int_contents=ROW),
            "parameter of another kind": wrong_parameter,
            "typed output of fp16": typed_output("identity_fp16"),
            "typed output of bf16": typed_output("identity_bf16"),
        }.items()
    }


def refusal(rpc: Callable[..., Any], request: Any) -> list[str]:
    """Status and text."""
    try:
        rpc(request, timeout=20)
    except grpc.RpcError as error:
        call: Any = error  # it is one as well
        return [call.code().name, call.details()]
    return ["OK", ""]


def simple(datatype: str) -> Any:
    request = pb.ModelInferRequest(model_name="simple", id="7")
    for name in ("INPUT0", "INPUT1"):
        request.inputs.add(name=name, datatype=datatype, shape=[1, 16])
    return request


def typed(datatype: str, **contents: Any) -> Any:
    request = simple(datatype)
    if contents:
        for tensor in request.inputs:
            tensor.contents.CopyFrom(pb.InferTensorContents(**contents))
    return request


def raw(*data: bytes) -> Any:
    request = simple("INT32")
    request.raw_input_contents.extend(data)
    return request


def typed_output(model: str) -> Any:
    if model == "simple":
        request = typed("INT32", int_contents=ROW)
    else:
        request = pb.ModelInferRequest(model_name=model, raw_input_contents=[b"\0" * 8])
        request.inputs.add(name="INPUT0", datatype=model.rpartition("_")[2].upper(), shape=[1, 4])
    request.parameters["binary_data_output"].bool_param = False
    return request


def text(*elements: bytes) -> Any:
    request = pb.ModelInferRequest(model_name="identity_bytes")
    tensor = request.inputs.add(name="INPUT0", datatype="BYTES", shape=[1, len(elements)])
    tensor.contents.bytes_contents.extend(elements)
    return request


def scalar(value: float) -> Any:
    request = pb.ModelInferRequest(model_name="scalar")
    request.inputs.add(name="INPUT0", datatype="FP32").contents.fp32_contents.append(value)
    return request


if __name__ == "__main__":
    main(sys.argv[1])
