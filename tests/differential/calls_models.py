"""Information about server and models, loads and unloads."""

from __future__ import annotations

from pathlib import Path

from paceline.protos import inference_pb2 as pb
from tests.differential.comparing import Call
from tests.differential.messages import config, floats, index, infer, load, metadata, ready, statistics, unload
from tests.differential.repository import MODELS

__all__ = ["CALLS"]

PINNED = ("optimization",)
REASON = ("reason",)
"""The reason of a failed load, which each server words differently."""
TOLD = [
    Call("live", pb.ServerLiveRequest()),
    Call("server ready while a model is broken", pb.ServerReadyRequest()),
    Call("server metadata", pb.ServerMetadataRequest(), row="server metadata", free=("name", "version", "extensions")),
    Call("ready", ready("pair")),
    Call("ready by version", ready("pair", "1")),
    Call("ready of a version that isn't", ready("pair", "9"), "OK", "NOT_FOUND", "ModelReady of the unknown"),
    Call("ready of a version left out", ready("versions", "2"), "OK", "NOT_FOUND", "ModelReady of the unknown"),
    Call("ready of nobody", ready("nobody"), "OK", "NOT_FOUND", "ModelReady of the unknown"),
    Call("ready of a bad version", ready("pair", "x"), "INVALID_ARGUMENT"),
    Call("ready of what didn't load", ready("broken")),
    Call("ready of what didn't load, by version", ready("broken", "1")),
    *(Call(f"metadata of {name}", metadata(name)) for name in MODELS if name != "broken"),
    Call("metadata by version", metadata("versions", "3")),
    Call("metadata of a lower version", metadata("versions", "1")),
    Call("metadata of a version that isn't", metadata("pair", "9"), "NOT_FOUND"),
    Call("metadata of nobody", metadata("nobody"), "NOT_FOUND"),
    Call("metadata without a name", metadata(""), "NOT_FOUND"),
    Call("metadata of a bad version", metadata("pair", "x"), "INVALID_ARGUMENT"),
    Call("metadata of what didn't load", metadata("broken"), "NOT_FOUND", "UNAVAILABLE", "a model that isn't ready"),
    *(Call(f"config of {name}", config(name), row="pinned memory", free=PINNED) for name in MODELS if name != "broken"),
    Call("config by version", config("versions", "3"), row="pinned memory", free=PINNED),
    Call("config of a version that isn't", config("pair", "9"), "NOT_FOUND"),
    Call("config of nobody", config("nobody"), "NOT_FOUND"),
    Call("config of a bad version", config("pair", "x"), "INVALID_ARGUMENT"),
    Call("config of what didn't load", config("broken"), "NOT_FOUND", "UNAVAILABLE", "a model that isn't ready"),
    Call("statistics of nobody", statistics("nobody"), "INVALID_ARGUMENT", "NOT_FOUND",
         "ModelStatistics of the unknown"),
    Call("statistics of a version that isn't", statistics("pair", "9"),
         "INVALID_ARGUMENT", "NOT_FOUND", "ModelStatistics of the unknown"),
    Call("statistics of a bad version", statistics("pair", "x"), "INVALID_ARGUMENT"),
    Call("statistics of what didn't load", statistics("broken"),
         "INVALID_ARGUMENT", "UNAVAILABLE", "ModelStatistics of the unknown"),
    Call("index", index(), free=REASON),
    Call("index of those ready", index(ready=True)),
    Call("index of a repository", index("models"), "UNIMPLEMENTED", phrase="repository_name"),
]  # fmt: skip

_FREE = (
    '{"backend": "python", "max_batch_size": 4, "input": [{"name": "INPUT0", "data_type": "TYPE_FP32", "dims": [-1]}],'
)
_FREE += '"output": [{"name": "OUTPUT0", "data_type": "TYPE_FP32", "dims": [-1]}],'
_FREE += '"parameters": {"outputs": {"string_value": "OUTPUT0:<f4"}}}'
NONSENSE = "loads and unloads that make no sense"
_ONE = {"INPUT0": floats(1, 4)}
_CODE = Path(__file__).with_name("model.py").read_bytes()

LOADED = [
    Call("unload", unload("serial")),
    Call("infer what was unloaded", infer("serial", _ONE), "NOT_FOUND", phrase="has no available versions"),
    Call("infer what was unloaded, by version", infer("serial", _ONE, version="1"), "UNAVAILABLE", "NOT_FOUND",
         "a version that was unloaded"),
    Call("ready of what was unloaded", ready("serial")),
    Call("metadata of what was unloaded", metadata("serial"), "NOT_FOUND", phrase="has no available versions"),
    Call("index with what was unloaded", index(), free=REASON),
    Call("server ready with what was unloaded", pb.ServerReadyRequest()),
    Call("unload again", unload("serial")),
    Call("unload nobody", unload("nobody")),
    Call("unload without a name", unload(""), "OK", "INVALID_ARGUMENT", NONSENSE),
    Call("unload of a repository", unload("serial", "models"), "UNIMPLEMENTED", phrase="repository_name"),
    Call("unload with dependents", unload("serial", unload_dependents=True)),
    Call("unload with dependents as text", unload("serial", unload_dependents="yes"), "INVALID_ARGUMENT"),
    Call("unload with an unknown parameter", unload("serial", mine=True), "OK", "INVALID_ARGUMENT", NONSENSE),
    Call("load", load("serial")),
    Call("infer what was loaded", infer("serial", _ONE)),
    Call("load again", load("serial")),
    Call("load nobody", load("nobody"), "INTERNAL", "NOT_FOUND", "load of a name that no repository has",
         "failed to load 'nobody'"),
    Call("load without a name", load(""), "INTERNAL", "INVALID_ARGUMENT", NONSENSE),
    Call("load of a path", load("../models"), "INVALID_ARGUMENT"),
    Call("load of a repository", load("serial", "models"), "UNIMPLEMENTED", phrase="repository_name"),
    Call("load what is broken", load("broken"), "INVALID_ARGUMENT", phrase="load failed for model 'broken'"),
    Call("load with an unknown parameter", load("serial", mine="x"), "INVALID_ARGUMENT",
         phrase="unrecognized load parameter"),
    Call("load with a configuration", load("serial", config=_FREE)),
    Call("config of that", config("serial"), row="pinned memory", free=PINNED),
    Call("load with a configuration as bytes", load("serial", config=b"{}"), "INVALID_ARGUMENT",
         phrase="expected string_param"),
    Call("load with a configuration that is no JSON", load("serial", config="max_batch_size: 4"), "INTERNAL",
         "INVALID_ARGUMENT", NONSENSE),
    Call("load with an empty configuration", load("serial", config=""), "INTERNAL", "INVALID_ARGUMENT", NONSENSE),
    Call("load with a list as configuration", load("serial", config="[]"), "INTERNAL", "INVALID_ARGUMENT", NONSENSE),
    Call("load with a field that is there twice", load("serial", config='{"max_batch_size": 3,' + _FREE[1:]), "OK",
         "INVALID_ARGUMENT", NONSENSE),
    Call("load with a number as text", load("serial", config=_FREE.replace("4", '"4"', 1))),
    Call("load with unknown fields", load("serial", config='{"nobody": 1}'), "INTERNAL", "INVALID_ARGUMENT", NONSENSE),
    Call("load with a bad number of rows", load("serial", config=_FREE.replace("4", "-4", 1)), "INTERNAL",
         "INVALID_ARGUMENT", NONSENSE),
    Call("load with another name", load("serial", config=_FREE.replace("{", '{"name": "other",', 1)), "INTERNAL",
         "INVALID_ARGUMENT", NONSENSE),
    Call("load with a configuration of nobody", load("nobody", config=_FREE), "INTERNAL", "NOT_FOUND",
         "load of a name"),
    Call("load with files and no configuration", load("serial", file_1__model_py=b""), "INTERNAL",
         "INVALID_ARGUMENT", NONSENSE),
    Call("load with a file as text", load("serial", config=_FREE, file_1__model_py="a"), "INVALID_ARGUMENT",
         phrase="expected bytes_param"),
    Call("what served goes on", infer("serial", _ONE)),
    Call("load of code", load("serial", config=_FREE, **{"file_1__model.py": _CODE}), "OK", "INVALID_ARGUMENT",
         "code that a client brings"),
    Call("infer that or what served", infer("serial", _ONE)),
    Call("unload what didn't load", unload("broken")),
    Call("infer that", infer("broken", _ONE), "NOT_FOUND"),
    Call("server ready without that", pb.ServerReadyRequest(), row="unload of a model", free=("ready",)),
    Call("reload as it is on disk", load("serial")),
    Call("config of that", config("serial"), row="pinned memory", free=PINNED),
]  # fmt: skip

CALLS = [*TOLD, *LOADED]
