"""Metadata that gRPC can't send is refused before anything is sent, however a call is made."""

from __future__ import annotations

from typing import Any

import grpc
import numpy as np
import pytest

from paceline.clients import AsyncInferenceClient, InferenceClient
from paceline.clients.connection import checked_metadata
from paceline.protos import inference_pb2 as pb
from paceline.protos.inference_pb2_grpc import GRPCInferenceServiceStub
from tests.unit.clients.conftest import Twin
from tests.unit.clients.peer import Peer

X = {"x": np.zeros((1, 2), np.float32)}
KEYS = ["a", "a_.-1", "a-bin", "Upper", "", "a b", "a:b", ":path", "é"]
VALUES = ["x", "", " x ~", "é", "\n", "\t", "\x7f", b"x", b"\0", b"\xff", 1]
REFUSED = [("Upper", "x"), ("a", "é"), ("a", b"\0"), ("a", 1), ("a-bin", "x")]


def refused(pair: Any) -> bool:
    try:
        return checked_metadata([pair]) != (pair,)
    except (ValueError, TypeError):
        return True


def test_pairs_that_grpc_cannot_send_are_refused_and_no_others(peer: Peer) -> None:
    with grpc.insecure_channel(peer.target) as channel:
        call: Any = GRPCInferenceServiceStub(channel).ServerLive  # type: ignore[no-untyped-call]
        for pair in [(key, value) for key in KEYS for value in VALUES]:
            try:
                call(pb.ServerLiveRequest(), metadata=[pair], timeout=20)
                sent = True
            except (grpc.RpcError, TypeError):
                sent = False
            assert refused(pair) is not sent, pair


@pytest.mark.parametrize("pair", REFUSED, ids=repr)
async def test_calls_with_metadata_that_cannot_be_sent_are_refused(twin: Twin, peer: Peer, pair: Any) -> None:
    for method, arguments in ((twin.infer, ("m", X)), (twin.server_live, ())):
        with pytest.raises((ValueError, TypeError), match=r"^metadata"):
            await method(*arguments, metadata=[pair])
    assert peer.requests == []


@pytest.mark.parametrize("pair", REFUSED, ids=repr)
def test_clients_with_metadata_that_cannot_be_sent_are_refused(pair: Any) -> None:
    for make in (
        lambda: InferenceClient("x", metadata=[pair]),
        lambda: AsyncInferenceClient("x", metadata=[pair], transport="stream", coalesce=8),
    ):
        with pytest.raises((ValueError, TypeError), match=r"^metadata"):
            make()


async def test_coalescing_with_metadata_that_cannot_be_sent_is_refused(peer: Peer) -> None:
    async with AsyncInferenceClient(peer.target, coalesce=8) as client:
        with pytest.raises(ValueError, match="got 'Upper'"):
            await client.infer("m", X, metadata=[("Upper", "x")])
    assert peer.requests == []


def test_refusal_names_the_key_and_not_the_value() -> None:
    with pytest.raises(ValueError, match="metadata 'a': expected printable ASCII") as refusal:
        checked_metadata([("a", "SÉCRET")])
    assert "CRET" not in str(refusal.value)


def test_mapping_is_refused() -> None:
    with pytest.raises(TypeError, match="expected pairs of key and value, got dict"):
        checked_metadata({"ab": "x"})  # type: ignore[arg-type]
