"""The structure of each target's inputs, so that changed ones can still be parsed.

Lives here: unpacking and repacking, for each target whose inputs hold messages. Must not: run targets.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable

from google.protobuf import json_format, text_format
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from paceline.protos import inference_pb2 as pb
from paceline.protos import model_config_pb2 as config_pb
from paceline.protos.datatypes import DATATYPES
from tests.fuzz.messages import change
from tests.fuzz.services import METHODS

__all__ = ["changed"]

_REQUESTS = ["rows", "text", "scalar", "every", "adapting", "ragged", "echo", "a", "b", "c", "x", "y", "z", "o3", "r"]
_REQUESTS += [
    "any", "any_rows", "steps", "sequence_start", "sequence_end",
    "shared_memory_region", "shared_memory_byte_size", "shared_memory_offset", "classification", "priority", "timeout",
    "binary_data_output", "paceline_batch_info", "paceline_cancel", "paceline_unordered", "paceline_deadline_us",
    "sequence_id", "triton_x", "config", "file:1/model.onnx", "trace_rate", "trace_count", "trace_level", "TIMESTAMPS",
    "log_frequency", "log_info", "log_format", "json", "paceline-fuzz", "unload_dependents", *DATATYPES,
]  # fmt: skip
_CONFIGS = [
    "a", "b", "x", "y", "m", "identity", "onnxruntime", "ensemble", "paceline.batch_sizes", "paceline.max_queue_rows",
    "paceline.max_queue_bytes", "paceline.split_oversized", "paceline.await_returns", "execute_delay_ms", "model.onnx",
]  # fmt: skip

Change = Callable[[bytes, random.Random], bytes]


def changed(name: str, data: bytes, chance: random.Random) -> bytes | None:
    """`data`, an input of target `name`, with a few changes to its messages; None if it holds none."""
    try:
        return _CHANGES[name](data, chance) if name in _CHANGES else None
    except (DecodeError, text_format.ParseError, json_format.ParseError, ValueError, IndexError, struct.error):
        return None


def _some(message: Message, chance: random.Random, words: list[str]) -> Message:
    for _ in range(chance.choice((1, 1, 2, 3, 6))):
        change(message, chance, words)
    return message


def _request(data: bytes, chance: random.Random) -> bytes:
    return _some(pb.ModelInferRequest.FromString(data), chance, _REQUESTS).SerializeToString()


def _contents(data: bytes, chance: random.Random) -> bytes:
    start = 2 + data[1] % 6
    return data[:start] + _some(pb.InferTensorContents.FromString(data[start:]), chance, []).SerializeToString()


def _config(data: bytes, chance: random.Random) -> bytes:
    message = text_format.Parse(data.decode(), config_pb.ModelConfig())
    return text_format.MessageToString(_some_config(message, chance)).encode()


def _some_config(config: config_pb.ModelConfig, chance: random.Random) -> config_pb.ModelConfig:
    """Change `config`, half of the time to outputs that match the inputs, as backend `identity` needs them."""
    _some(config, chance, _CONFIGS)
    if chance.random() < 0.5:
        names = [one.name for one in config.output]
        del config.output[:]
        for number, one in enumerate(config.input):
            output = config.output.add(name=names[number] if number < len(names) else f"o{number}")
            output.data_type, output.is_shape_tensor = one.data_type, one.is_shape_tensor
            output.dims.extend(one.dims)
            if one.HasField("reshape"):
                output.reshape.CopyFrom(one.reshape)
    return config


def _load(data: bytes, chance: random.Random) -> bytes:
    request = pb.RepositoryModelLoadRequest.FromString(data)
    if "config" in request.parameters and chance.random() < 0.8:
        config = json_format.Parse(request.parameters["config"].string_param, config_pb.ModelConfig())
        text = json_format.MessageToJson(_some_config(config, chance), indent=None)
        request.parameters["config"].string_param = text
    else:
        _some(request, chance, _REQUESTS)
    return request.SerializeToString()


def _service(data: bytes, chance: random.Random) -> bytes:
    method = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods_by_name[METHODS[data[0] % len(METHODS)]]
    message = GetMessageClass(method.input_type).FromString(data[1:])
    return data[:1] + _some(message, chance, _REQUESTS).SerializeToString()


def _stream(data: bytes, chance: random.Random) -> bytes:
    requests, rest = [], data[1:]
    while len(rest) >= 2:
        (size,) = struct.unpack_from("<H", rest)
        requests.append(rest[2 : 2 + size])
        rest = rest[2 + size :]
    at = chance.randrange(len(requests))
    match chance.randrange(5):
        case 0:
            requests.insert(at, chance.choice(requests))
        case 1:
            del requests[at]
        case _:
            requests[at] = _request(requests[at], chance)
    return data[:1] + b"".join(struct.pack("<H", len(one)) + one for one in requests)


_CHANGES: dict[str, Change] = {
    "infer": _request,
    "contents": _contents,
    "config": _config,
    "load": _load,
    "service": _service,
    "stream": _stream,
}
