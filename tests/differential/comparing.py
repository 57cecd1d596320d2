"""One call, made to both servers, and what may differ in their answers.

Lives here: calls and answers as values, and how two answers are compared. Must not: lists of calls, or servers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

from paceline.protos.inference_pb2_grpc import GRPCInferenceServiceStub
from tests.polling import eventually

__all__ = ["Answer", "Call", "answer_of", "differences", "faults_here", "lasting_answer_of"]


@dataclass(frozen=True, slots=True)
class Call:
    """A request to both servers, and what is known of the answers.

    `status` is the name of both servers' status, or of Triton's, if `here` names another for this server; then `row` is
    the beginning of the row of docs/protocol.md that says why. Both error texts contain `phrase`. `free` are fields of
    the reply that need not agree, at any depth; with `row`, if that row says why.
    """

    what: str
    request: Message
    status: str = "OK"
    here: str = ""
    row: str = ""
    phrase: str = ""
    free: Sequence[str] = ()
    metadata: Mapping[str, str] | None = None
    timeout_s: float = 20

    @property
    def rpc(self) -> str:
        return type(self.request).__name__.removesuffix("Request")


@dataclass(frozen=True, slots=True)
class Answer:
    """A status by name, with the error's text or the reply as protobuf writes it in JSON."""

    status: str
    text: str = ""
    reply: Any = None

    def __str__(self) -> str:
        return f"{self.status} {self.text or self.reply}"


def answer_of(channel: grpc.Channel, call: Call) -> Answer:
    """The answer of the server behind `channel`."""
    rpc = getattr(GRPCInferenceServiceStub(channel), call.rpc)  # type: ignore[no-untyped-call]
    try:
        reply = rpc(call.request, timeout=call.timeout_s, metadata=tuple((call.metadata or {}).items()))
    except grpc.RpcError as error:
        failure: Any = error
        return Answer(failure.code().name, failure.details() or "")
    return Answer("OK", reply=MessageToDict(reply, preserving_proto_field_name=True))


def lasting_answer_of(channel: grpc.Channel, call: Call) -> Answer:
    """The same, asked again while a model is being unloaded: Triton answers an unload before it is done."""
    answers: list[Answer] = []

    def is_lasting() -> bool:
        answers.append(answer_of(channel, call))
        return "UNLOADING" not in str(answers[-1])

    eventually(is_lasting, f"no model that is being unloaded, of '{call.what}'")
    return answers[-1]


def differences(call: Call, triton: Answer, here: Answer) -> list[str]:
    """What isn't as `call` expects, one line each; empty if everything is."""
    found = [*_faults("Triton", triton, call.status, call.phrase), *faults_here(call, here)]
    if triton.status == here.status == "OK":
        ours, theirs = (_without(call.free, answer.reply) for answer in (here, triton))
        if ours != theirs:
            found += [f"Triton's reply: {theirs}", f"this server's: {ours}"]
    return found


def faults_here(call: Call, here: Answer) -> list[str]:
    """The same for what can be checked without Triton: this server's status, and its error text."""
    return _faults("here", here, call.here or call.status, call.phrase)


def _faults(who: str, answer: Answer, status: str, phrase: str) -> list[str]:
    found = [] if answer.status == status else [f"{who}: expected {status}, got {answer}"]
    if answer.status != "OK" and phrase.lower() not in answer.text.lower():
        found.append(f"{who}: expected the words '{phrase}', got '{answer.text}'")
    return found


def _without(names: Sequence[str], value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without(names, one) for name, one in value.items() if name not in names}
    return [_without(names, one) for one in value] if isinstance(value, list) else value
