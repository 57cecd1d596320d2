"""Loading and unloading over gRPC, as the tests of it say it.

Lives here: the requests, and the index as tuples. Must not: assertions about behaviour.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from protos import inference_pb2 as pb
from server.config import ControlMode, Settings
from tests.integration.serving import Served
from tests.polling import eventually_async

__all__ = ["Line", "all_left", "explicit", "index", "load", "load_request", "polling", "ready", "unload"]

Line = tuple[str, str, str, str]


def explicit(*paths: Path, load: tuple[str, ...] = (), **more: Any) -> Settings:
    return Settings(paths=paths, model_control_mode=ControlMode.EXPLICIT, load_models=load, **more)


def polling(*paths: Path, **more: Any) -> Settings:
    """The test polls; the server wouldn't for days."""
    return Settings(paths=paths, model_control_mode=ControlMode.POLL, repository_poll_secs=1e6, **more)


def load_request(name: str, **parameters: object) -> pb.RepositoryModelLoadRequest:
    """`parameters`: text, bytes, truth or integers by key, in the field of their type."""
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
    """Name, version, state and reason of each line."""
    answer = await served.stub.RepositoryIndex(pb.RepositoryIndexRequest(ready=ready), timeout=20)
    return [(line.name, line.version, line.state, line.reason) for line in answer.models]


async def ready(served: Served) -> bool:
    """Whether the server calls itself ready."""
    answer = await served.stub.ServerReady(pb.ServerReadyRequest(), timeout=20)
    return bool(answer.ready)


async def all_left(served: Served) -> None:
    """Return once every version that takes no more requests is closed."""
    await eventually_async(lambda: not served.server.repository.leaving, "what was unloaded closed")
