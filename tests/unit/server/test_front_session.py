"""What a front asks for, done in the engine: messages don't touch each other, and errors keep their words."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import grpc
import pytest

from paceline.backends.errors import WITH_STATUS
from paceline.backends.transport.link import Link
from paceline.backends.transport.parcel import Message
from paceline.protos import inference_pb2 as pb
from paceline.scheduler.errors import ExecutionFailed
from paceline.scheduler.policy import NEVER
from paceline.server.call_facts import NO_PASSED_HEADERS
from paceline.server.codec.wire_request import RequestReader
from paceline.server.errors import STATUS_OF, Aborted, ServerStopping, StepFailed
from paceline.server.fronts.protocol import Kind, packed_error, unpacked_error
from paceline.server.fronts.session import FrontRequest, FrontSession
from paceline.server.models.model_lookup import ModelLookup
from paceline.server.requests.in_flight import failure_of
from paceline.server.requests.inference import Inference

KIB = 2**10


async def _echo(request: bytes, context: object) -> bytes:
    return request


class Front:
    """A front's end of the link to a session, with memory of a MiB."""

    def __init__(self) -> None:
        engine, remote = Link.pair(2**20)
        models = ModelLookup()
        handlers = {"Echo": grpc.unary_unary_rpc_method_handler(_echo, lambda data: data, lambda data: data)}
        self.session = FrontSession(
            engine, Inference(models), models, handlers, lambda *_: None, lambda: None, RequestReader()
        )
        self.link = Link.join(remote)
        self.got = asyncio.Queue[Message]()
        self.session.start()
        self.link.start(lambda messages: [self.got.put_nowait(one) for one in messages], lambda: None)

    def answer(self, number: int, size_bytes: int) -> None:
        """Let the engine answer a request with so many bytes."""
        message = pb.ModelInferRequest()
        request = FrontRequest(self.session, number, False, message, NEVER, None, NO_PASSED_HEADERS, 0)
        request.answer = bytes(size_bytes)
        self.session.on_done(request)


@pytest.fixture
async def front() -> AsyncIterator[Front]:
    made = Front()
    yield made
    made.link.close()
    made.session.close()


async def test_unforeseen_failure_leaves_other_messages_alone(front: Front) -> None:
    unforeseen = (Kind.INFER, 1, "no request has so few fields")
    for message in (unforeseen, (Kind.TAKEN, 1), (Kind.CALL, 2, "Echo", None, (), b"data")):
        front.link.send(message)
    kind, number, status, text = await front.got.get()
    assert (kind, number, status) == (Kind.FAILED, 1, "INTERNAL")
    assert text.startswith("internal error: TypeError: ")
    assert await front.got.get() == (Kind.ANSWER, 2, b"data")
    assert front.session.requests == 0


async def test_cancelled_answer_lets_those_behind_it_go(front: Front) -> None:
    for number, kib in enumerate((300, 900, 300), 1):
        front.answer(number, kib * KIB)
    kind, number, parcel = await front.got.get()
    assert (kind, number) == (Kind.PIECES, 1)
    held = front.link.unpack(parcel)
    front.link.send((Kind.CANCEL, 2))
    kind, number, _ = await front.got.get()
    assert (kind, number) == (Kind.PIECES, 3)
    assert held[0].nbytes == 300 * KIB


def each_error() -> Iterator[BaseException]:
    """Every error that a caller can meet, alone and as what an execution failed with; and one that nobody foresaw."""
    for kind in (*STATUS_OF, KeyError):
        if issubclass(kind, WITH_STATUS):
            made: list[BaseException] = [kind(status, "why") for status in ("OUT_OF_RANGE", "NEWER_THAN_US")]
        elif kind is StepFailed:
            made = [StepFailed("why", status) for status in (grpc.StatusCode.NOT_FOUND, None)]
        elif kind is Aborted:
            made = [Aborted(grpc.StatusCode.NOT_FOUND, "why")]
        elif kind is ServerStopping:
            made = [ServerStopping()]
        else:
            made = [kind.__new__(kind)]
            made[0].args = ("no room for 5 bytes",)
        for error in made:
            yield error
            failed = ExecutionFailed(str(error))
            failed.__cause__ = error
            yield failed


def test_every_error_is_told_as_in_one_process() -> None:
    for error in each_error():
        received = unpacked_error(*packed_error(error, "m"))
        assert failure_of(received, "m", "ModelInfer") == failure_of(error, "m", "ModelInfer")
        assert isinstance(received, ServerStopping) == isinstance(error, ServerStopping)
