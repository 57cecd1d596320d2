"""The commands `describe` and `models` against a scripted peer."""

from __future__ import annotations

import json

import grpc
import pytest
from click.testing import CliRunner, Result

from paceline.protos import inference_pb2 as pb
from paceline.protos.model_config_pb2 import ModelConfig
from paceline.server.cli import main
from tests.unit.clients.peer import Peer, serving


def run(peer: Peer, command: str, *arguments: str) -> Result:
    return CliRunner().invoke(main, [command, "--server", peer.target, *arguments])


@pytest.fixture
def listing(peer: Peer) -> Peer:
    for name, version, state, reason in (
        ("b", "10", "READY", ""),
        ("b", "9", "UNAVAILABLE", "unloaded"),
        ("a", "", "UNAVAILABLE", "no\nfile"),
        ("c", "", "", ""),
    ):
        peer.index.models.add(name=name, version=version, state=state, reason=reason)
    return peer


def test_describe_prints_metadata_and_configuration(peer: Peer) -> None:
    peer.takes(x=("FP32", [-1, 2]))
    peer.model.versions.append("3")
    peer.config = ModelConfig(name="m", platform="p", max_batch_size=8)
    result = run(peer, "describe", "m", "--version", "3")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.splitlines() == [
        "m  version 3  p",
        "  inputs     x  FP32  [rows, 2]",
        "  outputs    none",
        "  batching   none: requests of up to 8 rows run one by one",
    ]
    assert [(each.name, each.version) for each in peer.requests] == [("m", "3"), ("m", "3")]


def test_describe_works_without_model_config(peer: Peer) -> None:
    result = run(peer, "describe", "m", "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["is_configured"] is False


def test_describe_unknown_model_is_one_line(peer: Peer) -> None:
    class Strict(Peer):
        def ModelMetadata(
            self, request: pb.ModelMetadataRequest, context: grpc.ServicerContext
        ) -> pb.ModelMetadataResponse:
            context.abort(grpc.StatusCode.NOT_FOUND, "no such model")

    with serving(Strict()) as strict:
        result = run(strict, "describe", "m")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == "Error: NOT_FOUND: no such model\n"


@pytest.mark.parametrize("arguments", [("describe", "m"), ("models",)], ids=lambda arguments: arguments[0])
def test_server_that_is_not_there_is_one_line(arguments: tuple[str, ...]) -> None:
    result = CliRunner().invoke(main, [*arguments, "--server", "127.0.0.1:1"])
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (1, "", 1)


def test_models_are_listed_by_name_and_number(listing: Peer) -> None:
    assert run(listing, "models").stdout.splitlines() == [
        "MODEL  VERSION  STATE        REASON",
        "a      -        UNAVAILABLE  no file",
        "b      9        UNAVAILABLE  unloaded",
        "b      10       READY",
        "c      -        -",
    ]


def test_models_as_json_have_each_field(listing: Peer) -> None:
    result = run(listing, "models", "--json", "--ready")
    assert json.loads(result.stdout)["models"][0] == {
        "name": "a", "version": "", "state": "UNAVAILABLE", "reason": "no\nfile"
    }  # fmt: skip
    assert listing.requests[-1].ready
