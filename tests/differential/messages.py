"""Requests for the lists of calls, short enough for a line each.

Lives here: short constructors of messages. Must not: expected answers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from paceline.protos import inference_pb2 as pb
from tests.wire import Array, infer, parameter

__all__ = [
    "config",
    "floats",
    "index",
    "infer",
    "ints",
    "load",
    "logs",
    "metadata",
    "of_input",
    "raw",
    "ready",
    "statistics",
    "texts",
    "traces",
    "typed",
    "unload",
    "wanting",
]


def floats(*shape: int) -> Array:
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


def ints(*shape: int, dtype: str = "<i4") -> Array:
    return np.arange(np.prod(shape), dtype=dtype).reshape(shape)


def texts(*elements: bytes) -> Array:
    """One row of BYTES."""
    return np.array([elements], object)


def raw(model: str, *tensors: tuple[str, str, Iterable[int], bytes | None], **more: Any) -> pb.ModelInferRequest:
    """A request with tensors as given: name, datatype, shape, bytes (None: no entry), whether that makes sense or
    not."""
    request = infer(model, **more)
    for name, datatype, shape, data in tensors:
        request.inputs.add(name=name, datatype=datatype, shape=shape)
        if data is not None:
            request.raw_input_contents.append(data)
    return request


def typed(model: str, name: str, datatype: str, shape: Iterable[int], **contents: Any) -> pb.ModelInferRequest:
    """A request with one tensor, its `contents` by field."""
    request = pb.ModelInferRequest(model_name=model)
    request.inputs.add(name=name, datatype=datatype, shape=shape, contents=pb.InferTensorContents(**contents))
    return request


def wanting(request: pb.ModelInferRequest, *outputs: str, **parameters: object) -> pb.ModelInferRequest:
    """The same request for these outputs, each with `parameters`."""
    for name in outputs:
        output = request.outputs.add(name=name)
        for key, value in parameters.items():
            output.parameters[key].CopyFrom(parameter(value))
    return request


def of_input(request: pb.ModelInferRequest, **parameters: object) -> pb.ModelInferRequest:
    """The same request, its first input with `parameters`."""
    for key, value in parameters.items():
        request.inputs[0].parameters[key].CopyFrom(parameter(value))
    return request


def ready(name: str, version: str = "") -> pb.ModelReadyRequest:
    return pb.ModelReadyRequest(name=name, version=version)


def metadata(name: str, version: str = "") -> pb.ModelMetadataRequest:
    return pb.ModelMetadataRequest(name=name, version=version)


def config(name: str, version: str = "") -> pb.ModelConfigRequest:
    return pb.ModelConfigRequest(name=name, version=version)


def statistics(name: str, version: str = "") -> pb.ModelStatisticsRequest:
    return pb.ModelStatisticsRequest(name=name, version=version)


def index(repository: str = "", ready: bool = False) -> pb.RepositoryIndexRequest:
    return pb.RepositoryIndexRequest(repository_name=repository, ready=ready)


def load(name: str, repository: str = "", **parameters: object) -> pb.RepositoryModelLoadRequest:
    """Texts are string_param, bytes bytes_param and so on; `file_…` is `file:…` with slashes for `__`."""
    request = pb.RepositoryModelLoadRequest(model_name=name, repository_name=repository)
    for key, value in parameters.items():
        _set(request.parameters[key.replace("file_", "file:", 1).replace("__", "/")], value)
    return request


def unload(name: str, repository: str = "", **parameters: object) -> pb.RepositoryModelUnloadRequest:
    request = pb.RepositoryModelUnloadRequest(model_name=name, repository_name=repository)
    for key, value in parameters.items():
        _set(request.parameters[key], value)
    return request


def traces(model: str = "", **settings: Iterable[str]) -> pb.TraceSettingRequest:
    values = {name: pb.TraceSettingRequest.SettingValue(value=given) for name, given in settings.items()}
    return pb.TraceSettingRequest(model_name=model, settings=values)


def logs(**settings: object) -> pb.LogSettingsRequest:
    request = pb.LogSettingsRequest()
    for name, value in settings.items():
        field = {bool: "bool_param", int: "uint32_param", str: "string_param"}[type(value)]
        setattr(request.settings[name], field, value)
    return request


def _set(parameter: pb.ModelRepositoryParameter, value: object) -> None:
    fields: Mapping[type, str] = {bool: "bool_param", int: "int64_param", str: "string_param", bytes: "bytes_param"}
    setattr(parameter, fields[type(value)], value)
