"""Fuzz targets: RPCs as gRPC hands them over, bytes in, and a status or bytes out; many on a stream.

Lives here: a server without a port, put together as `server.app` does. Must not: judge memory or time.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import struct
import tempfile
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
from grpc.aio import EOF  # type: ignore[attr-defined]

from paceline.backends.errors import LoadError
from paceline.backends.registry import backend
from paceline.protos import inference_pb2 as pb
from paceline.server.config import ControlMode
from paceline.server.memory.regions import Regions
from paceline.server.models.layout import Layout
from paceline.server.models.load_queue import LoadQueue
from paceline.server.models.repository import Repository
from paceline.server.requests.inference import Inference
from paceline.server.rpc.calls import HeaderRules
from paceline.server.rpc.model_rpcs import ModelRpcs
from paceline.server.rpc.service import InferenceService
from paceline.server.rpc.settings_rpcs import SettingsRpcs
from paceline.server.rpc.shared_memory import SharedMemory
from paceline.server.rpc.streaming import Streaming
from paceline.server.rpc.unary_inference import UnaryInference
from paceline.server.telemetry.metrics import Metrics
from paceline.server.telemetry.tracing import Tracer
from tests.fuzz.judging import REFUSALS, Finding, Target

__all__ = ["METHODS", "SHARED", "targets"]

METHODS = [
    method.name
    for method in pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods
    if method.name not in ("ModelStreamInfer", "RepositoryModelLoad")
]
"""The methods that the first byte of an input selects from. Loading has its own target."""

SHARED = "paceline-fuzz"
"""The name of an object of 16 bytes that may be registered."""

_CONFIGS = {
    "echo": """
        max_batch_size: 2 dynamic_batching {} parameters { key: "paceline.split_oversized" value { string_value: "1" } }
        input { name: "a" data_type: TYPE_FP32 dims: [ -1 ] } output { name: "x" data_type: TYPE_FP32 dims: [ -1 ] }""",
    "text": """
        input { name: "a" data_type: TYPE_STRING dims: [ -1 ] } output { name: "x" data_type: TYPE_STRING dims: [ -1 ] }
        input { name: "b" data_type: TYPE_INT32 dims: [ -1 ] optional: true }
        output { name: "y" data_type: TYPE_INT32 dims: [ -1 ] }""",
}


def targets() -> list[Target]:
    """All targets of this module, ready to run."""
    folder = Path(tempfile.mkdtemp(prefix="paceline-fuzz-"))
    for name, config in _CONFIGS.items():
        (folder / name / "1").mkdir(parents=True)
        (folder / name / "config.pbtxt").write_text(f'backend: "identity" {config}')
    object = Path("/dev/shm") / SHARED
    object.write_bytes(bytes(16))
    atexit.register(object.unlink, missing_ok=True)
    world = _World(folder)
    return [
        Target("service", world.call, fixed_bytes=2_000_000, times=400),
        Target("stream", world.stream, fixed_bytes=2_000_000, times=400),
    ]


class _Refused(Exception):
    """Raised where a call is aborted."""


class _Context:
    """A call, with all that the server uses of one."""

    def __init__(self, requests: Sequence[bytes] = (), metadata: Sequence[tuple[str, str]] = ()) -> None:
        self._metadata = metadata
        self._requests = deque(requests)
        self.parse: Callable[[bytes], Any] = bytes
        self.answers: list[Any] = []
        self.code: grpc.StatusCode | None = None
        self.text = ""

    def invocation_metadata(self) -> Sequence[tuple[str, str]]:
        return self._metadata

    def time_remaining(self) -> float:
        return 10.0

    async def abort(self, code: grpc.StatusCode, text: str) -> None:
        self.code, self.text = code, text
        raise _Refused

    def set_code(self, code: grpc.StatusCode) -> None:
        self.code = code

    def set_details(self, text: str) -> None:
        self.text = text

    async def read(self) -> Any:
        return self.parse(self._requests.popleft()) if self._requests else EOF

    async def write(self, message: Any) -> None:
        self.answers.append(message)


class _Details:
    def __init__(self, method: str) -> None:
        self.method = f"/inference.GRPCInferenceService/{method}"
        self.invocation_metadata = ()


class _World:
    """The service with two models, registered here instead of with gRPC. Changes that affect later calls are undone."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._loop = asyncio.new_event_loop()
        self._handlers: Any = None
        self._repository: Repository
        self._loop.run_until_complete(self._open())

    def add_generic_rpc_handlers(self, handlers: Sequence[Any]) -> None:
        """The method of a gRPC server that `InferenceService.add_to` calls."""
        (self._handlers,) = handlers

    async def _open(self) -> None:
        regions, layout = Regions(4), Layout([self._folder])
        layout.open()
        self._repository = Repository(Metrics(), LoadQueue(backend), regions=regions)
        self._regions = regions
        await self._repository.load_all(layout.models())
        tracer = Tracer()
        inference = Inference(self._repository, tracer)
        inference.serving = True
        rules = HeaderRules("^x-")
        groups: list[Any] = [
            ModelRpcs(self._repository, layout, ControlMode.EXPLICIT),
            SharedMemory(regions, _no_gpus),
            SettingsRpcs(self._repository, tracer, is_allowed=True),
            UnaryInference(inference, rules),
            Streaming(inference, 16, rules),
        ]
        InferenceService(inference, self._repository, "fuzzed", "0", groups).add_to(self)  # type: ignore[arg-type]

    async def _reopen(self) -> None:
        await self._repository.stop()
        await self._open()

    def _handler(self, method: str) -> Any:
        return self._handlers.service(_Details(method))

    def call(self, data: bytes) -> None:
        """The first byte selects the method, the others are the request."""
        if not data:
            return
        method = METHODS[data[0] % len(METHODS)]
        handler, context = self._handler(method), _Context(metadata=(("x-from", "afar"), ("te", "trailers")))
        request = handler.request_deserializer(data[1:])
        try:
            answer = self._loop.run_until_complete(asyncio.wait_for(handler.unary_unary(request, context), 20))
        except _Refused:
            if context.code not in REFUSALS:
                raise Finding(f"{method}: {context.code}: {context.text}") from None
            return
        finally:
            logging.getLogger("paceline").setLevel(logging.CRITICAL + 1)
        _sent(handler, answer)
        if method.endswith(("Unload", "Register", "Unregister", "Setting", "Settings")):
            self._loop.run_until_complete(self._reopen())

    def stream(self, data: bytes) -> None:
        """The first byte says whether errors end the stream; requests follow, each after two bytes of length."""
        if not data:
            return
        requests, rest = [], data[1:]
        while len(rest) >= 2:
            (size,) = struct.unpack_from("<H", rest)
            requests.append(rest[2 : 2 + size])
            rest = rest[2 + size :]
        ends = data[0] % 2 == 1
        handler, context = (
            self._handler("ModelStreamInfer"),
            _Context(requests, (("triton_grpc_error", str(ends).lower()),)),
        )
        context.parse = handler.request_deserializer
        self._loop.run_until_complete(asyncio.wait_for(handler.stream_stream(None, context), 20))
        answers = [pb.ModelStreamInferResponse.FromString(_sent(handler, one)) for one in context.answers]
        self._check_stream(requests, ends, context, answers)

    def _check_stream(
        self,
        requests: Sequence[bytes],
        ends: bool,
        context: _Context,
        answers: Sequence[pb.ModelStreamInferResponse],
    ) -> None:
        codes = {answer.infer_response.parameters["paceline_status"].string_param for answer in answers}
        allowed = {code.name for code in REFUSALS} | {"CANCELLED", ""}
        if not codes <= allowed or (context.code is not None and context.code.name not in allowed):
            raise Finding(f"stream: {codes}, {context.code} {context.text}: {answers}")
        if len(answers) > len(requests) or (context.code is not None and not ends):
            raise Finding(f"stream: {len(answers)} answers to {len(requests)} requests, {context.code}")
        waiting = sum(model.batcher.waiting_requests for model in self._repository.models)
        if waiting:
            raise Finding(f"stream: {waiting} requests are left in queues")


def _no_gpus() -> int:
    raise LoadError("there are none")


def _sent(handler: Any, answer: Any) -> bytes:
    """What gRPC sends: answers to inferences are bytes already."""
    sent = answer if handler.response_serializer is None else handler.response_serializer(answer)
    if not isinstance(sent, bytes):
        raise Finding(f"expected an answer in bytes, got {type(sent).__name__}")
    return sent
