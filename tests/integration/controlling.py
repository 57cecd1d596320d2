"""Loading and unloading over gRPC, in short for tests.

Lives here: the requests, models that load slowly, and the index as tuples. Must not: assertions about behaviour.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from paceline.protos import inference_pb2 as pb
from paceline.server.config import ControlMode, Settings
from tests.integration.serving import Served, echo_model
from tests.memory_models import MemoryModel
from tests.polling import eventually_async
from tests.wire import infer, rows_of_floats

__all__ = [
    "READY_M",
    "ROW",
    "WARMED_UP_CONFIG",
    "Line",
    "all_left",
    "answers",
    "ask",
    "explicit",
    "index",
    "load",
    "load_request",
    "loading",
    "model_ready",
    "polling",
    "ready",
    "slow_model",
    "unload",
]

Line = tuple[str, str, str, str]

ROW = rows_of_floats(1)
WARMED_UP_CONFIG = 'input { name: "a" data_type: TYPE_FP32 dims: 2 }'
"""A model of known dims is warmed up, which a closed gate holds up: its load takes as long as the test wants."""
READY_M = [("m", "1", "READY", "")]


def explicit(*paths: Path, load: tuple[str, ...] = (), **more: Any) -> Settings:
    return Settings(paths=paths, model_control_mode=ControlMode.EXPLICIT, load_models=load, **more)


def polling(*paths: Path, **more: Any) -> Settings:
    """POLL mode in which only the test polls: the server wouldn't for days."""
    return Settings(paths=paths, model_control_mode=ControlMode.POLL, repository_poll_secs=1e6, **more)


def load_request(name: str, **parameters: object) -> pb.RepositoryModelLoadRequest:
    """`parameters`: text, bytes, booleans or integers by key, each set in the field of its type."""
    request = pb.RepositoryModelLoadRequest(model_name=name)
    for key, value in parameters.items():
        field = {str: "string_param", bytes: "bytes_param", bool: "bool_param", int: "int64_param"}[type(value)]
        setattr(request.parameters[key], field, value)
    return request


async def load(served: Served, name: str, **parameters: object) -> None:
    await served.stub.RepositoryModelLoad(load_request(name, **parameters), timeout=20)


async def unload(served: Served, name: str) -> None:
    await served.stub.RepositoryModelUnload(pb.RepositoryModelUnloadRequest(model_name=name), timeout=20)


async def index(served: Served, *, ready: bool = False) -> list[Line]:
    """Name, version, state and reason of each entry."""
    answer = await served.stub.RepositoryIndex(pb.RepositoryIndexRequest(ready=ready), timeout=20)
    return [(line.name, line.version, line.state, line.reason) for line in answer.models]


async def ready(served: Served) -> bool:
    """Whether the server reports that it is ready."""
    answer = await served.stub.ServerReady(pb.ServerReadyRequest(), timeout=20)
    return bool(answer.ready)


async def all_left(served: Served) -> None:
    """Wait until every version that takes no more requests is closed."""
    await eventually_async(lambda: not served.server.repository.leaving, "what was unloaded closed")


def ask(model: str = "m", version: str = "") -> pb.ModelInferRequest:
    return infer(model, {"a": ROW}, version=version)


async def answers(served: Served, model: str = "m", version: str = "") -> bool:
    answer = await served.infer(ask(model, version))
    return bool(answer.raw_output_contents[0] == ROW.tobytes())


async def model_ready(served: Served, model: str = "m", version: str = "") -> bool:
    answer = await served.stub.ModelReady(pb.ModelReadyRequest(name=model, version=version), timeout=20)
    return bool(answer.ready)


def slow_model() -> MemoryModel:
    """A model whose load waits at its gate."""
    model = echo_model()
    model.gate.close()
    return model


async def loading(served: Served, model: MemoryModel, name: str = "m", **parameters: object) -> asyncio.Task[None]:
    """A load that waits at the gate of `model`."""
    task = asyncio.create_task(load(served, name, **parameters))
    await asyncio.to_thread(model.gate.wait_entered, 1)
    return task
