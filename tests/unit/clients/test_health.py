"""`paceline health` against a scripted peer: what it says of a server that isn't ready."""

from __future__ import annotations

import grpc
import pytest
from click.testing import CliRunner, Result
from grpc_health.v1 import health_pb2

from paceline.protos import inference_pb2 as pb
from paceline.server.cli import main
from tests.unit.clients.peer import Peer, serving


@pytest.fixture
def unready(peer: Peer) -> Peer:
    peer.health = health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.NOT_SERVING)
    return peer


def health(peer: Peer, *arguments: str) -> Result:
    result = CliRunner().invoke(main, ["health", "--server", peer.target, *arguments])
    assert (result.exit_code, result.stdout) == (1, "NOT_SERVING\n")
    return result


def test_reasons_are_those_of_models_without_a_ready_version(unready: Peer) -> None:
    for name, version, state, reason in (
        ("fine", "2", "READY", ""),
        ("fine", "1", "UNAVAILABLE", "unloaded"),
        ("bad", "", "UNAVAILABLE", "no\nfile\x1b"),
        ("slow", "3", "LOADING", ""),
        ("unloaded", "1", "UNAVAILABLE", "unloaded"),
        ("never", "", "", ""),
    ):
        unready.index.models.add(name=name, version=version, state=state, reason=reason)
    assert health(unready).stderr.splitlines() == [
        "model 'bad' is UNAVAILABLE: no file?",
        "model 'slow' version 3 is LOADING",
    ]


def test_more_than_twenty_reasons_are_counted(unready: Peer) -> None:
    for number in range(23):
        unready.index.models.add(name=str(number), state="LOADING")
    lines = health(unready).stderr.splitlines()
    assert (len(lines), lines[-1]) == (21, "and 3 more")


def test_no_model_to_blame_points_to_the_probe(unready: Peer) -> None:
    assert "/readyz on the metrics port says why" in health(unready).stderr
    assert "/livez on the metrics port says why" in health(unready, "--service", "liveness").stderr


def test_index_that_is_refused_is_said_with_the_status(unready: Peer) -> None:
    class Secretive(Peer):
        def RepositoryIndex(
            self, request: pb.RepositoryIndexRequest, context: grpc.ServicerContext
        ) -> pb.RepositoryIndexResponse:
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "no token")

    with serving(Secretive()) as peer:
        peer.health = unready.health
        assert health(peer).stderr == "the states of its models are unknown: UNAUTHENTICATED: no token\n"
