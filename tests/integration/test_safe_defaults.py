"""RPCs that change the server's state or touch its machine are off by default."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message

from paceline.protos import inference_pb2 as pb
from tests.integration.controlling import load_request
from tests.integration.scripted import Script, mark_of, request
from tests.integration.serving import Served, failure_of, serving
from tests.shared_objects import shared_object

pytestmark = pytest.mark.usefixtures("frontends")

SERVICE = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"]
HARMLESS = {
    "ServerLive", "ServerReady", "ModelReady", "ServerMetadata", "ModelMetadata", "ModelInfer", "ModelStreamInfer",
    "ModelConfig", "ModelStatistics", "RepositoryIndex", "SystemSharedMemoryStatus", "CudaSharedMemoryStatus",
}  # fmt: skip


def log_settings() -> pb.LogSettingsRequest:
    wanted = pb.LogSettingsRequest()
    wanted.settings["log_info"].bool_param = False
    return wanted


def trace_settings() -> pb.TraceSettingRequest:
    wanted = pb.TraceSettingRequest()
    wanted.settings["trace_rate"].value.append("1")
    return wanted


CHANGING: dict[str, tuple[Message, str]] = {
    "RepositoryModelLoad": (load_request("m"), "--model-control-mode explicit"),
    "RepositoryModelUnload": (pb.RepositoryModelUnloadRequest(model_name="m"), "--model-control-mode explicit"),
    "SystemSharedMemoryRegister": (
        pb.SystemSharedMemoryRegisterRequest(name="r", key="", byte_size=4),
        "--allow-client-shm",
    ),
    "SystemSharedMemoryUnregister": (pb.SystemSharedMemoryUnregisterRequest(name="r"), "--allow-client-shm"),
    "CudaSharedMemoryRegister": (
        pb.CudaSharedMemoryRegisterRequest(name="r", raw_handle=bytes(64), byte_size=4),
        "--allow-client-shm",
    ),
    "CudaSharedMemoryUnregister": (pb.CudaSharedMemoryUnregisterRequest(name="r"), "--allow-client-shm"),
    "LogSettings": (log_settings(), "--allow-remote-settings true"),
    "TraceSetting": (trace_settings(), "--allow-remote-settings true"),
}


async def state(served: Served) -> list[Message]:
    """What the RPCs above could change."""
    asked: list[tuple[str, Message]] = [
        ("RepositoryIndex", pb.RepositoryIndexRequest()),
        ("SystemSharedMemoryStatus", pb.SystemSharedMemoryStatusRequest()),
        ("CudaSharedMemoryStatus", pb.CudaSharedMemoryStatusRequest()),
        ("LogSettings", pb.LogSettingsRequest()),
        ("TraceSetting", pb.TraceSettingRequest()),
    ]
    return [await getattr(served.stub, rpc)(message, timeout=20) for rpc, message in asked]


def test_each_rpc_is_listed_as_harmless_or_as_off_by_default() -> None:
    assert HARMLESS | set(CHANGING) == {method.name for method in SERVICE.methods}
    assert not HARMLESS & set(CHANGING)


@pytest.mark.parametrize("rpc", CHANGING)
async def test_rpc_that_changes_something_is_off_by_default_and_names_its_flag(tmp_path: Path, rpc: str) -> None:
    message, switch = CHANGING[rpc]
    with shared_object(4) as there:
        if isinstance(message, pb.SystemSharedMemoryRegisterRequest):
            message.key = there.key
        async with serving(tmp_path, {"m": Script().model}) as served:
            before = await state(served)
            call: Any = getattr(served.stub, rpc)
            code, text = await failure_of(call(message, timeout=20))
            assert code is grpc.StatusCode.UNIMPLEMENTED
            assert switch in text
            assert await state(served) == before
            assert mark_of(await served.infer(request(1))) == 1
