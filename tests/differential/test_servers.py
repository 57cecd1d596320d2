"""Servers as a whole: health, compression, headers, restrictions, and startup."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub

from paceline.protos import inference_pb2 as pb
from paceline.protos.inference_pb2_grpc import GRPCInferenceServiceStub
from tests.differential.calls_loads import warmup
from tests.differential.comparing import Call, answer_of, differences
from tests.differential.messages import floats, index, infer, load, unload
from tests.differential.pair import BY_NAME, Both, One, serving_both, serving_here
from tests.differential.repository import MODELS, write_repository
from tests.differential.test_counts import counts
from tests.differential.triton_process import TritonProcess

GOOD = infer("free", {"INPUT0": floats(1, 3)})
FLAGS = (
    "--grpc-restricted-protocol=model-repository:key=secret",
    "--grpc-header-forward-pattern=(x-.*|priority|triton_.*)",
)
CALLS = [
    Call("restricted, without the key", index(), "UNAVAILABLE", phrase="triton-grpc-protocol-key"),
    Call("restricted, with another key", index(), "UNAVAILABLE", metadata={"triton-grpc-protocol-key": "x"}),
    Call("restricted, with the key", index(ready=True), metadata={"triton-grpc-protocol-key": "secret"}),
    Call("not restricted", GOOD),
    Call("a header that is forwarded", GOOD, metadata={"x-mine": "1"}),
    Call("a header that isn't forwarded", GOOD, metadata={"mine": "1"}),
    Call("a reserved header that is forwarded", GOOD, here="INVALID_ARGUMENT", metadata={"priority": "1"}),
    Call("a header of Triton's that is forwarded", GOOD, here="INVALID_ARGUMENT", metadata={"triton_x": "1"}),
]


@pytest.fixture(scope="module")
def flagged(installed: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    models = {name: MODELS[name] for name in ("free", "broken")}
    with serving_both(tmp_path_factory.mktemp("flagged"), models, (*BY_NAME, *FLAGS)) as serving:
        yield serving


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.what)
def test_call_with_headers(call: Call, flagged: Both) -> None:
    found = differences(call, answer_of(flagged.triton.channel, call), answer_of(flagged.here.channel, call))
    assert not found, "\n".join(found)


@pytest.mark.parametrize("compression", [grpc.Compression.Gzip, grpc.Compression.Deflate], ids=lambda one: one.name)
def test_compressed_request_is_accepted(flagged: Both, compression: grpc.Compression) -> None:
    for one in (flagged.triton, flagged.here):
        stub = GRPCInferenceServiceStub(one.channel)  # type: ignore[no-untyped-call]
        assert stub.ModelInfer(GOOD, timeout=20, compression=compression).model_name == "free"


def health(one: One, service: str) -> str:
    try:
        status = HealthStub(one.channel).Check(health_pb2.HealthCheckRequest(service=service), timeout=20).status
    except grpc.RpcError as error:
        failure: Any = error
        return str(failure.code().name)
    return health_pb2.HealthCheckResponse.ServingStatus.Name(status)


def test_health_while_a_model_is_broken(flagged: Both) -> None:
    services = ("", "inference.GRPCInferenceService", "nobody")
    assert [health(flagged.triton, service) for service in services] == ["NOT_SERVING"] * 3
    assert [health(flagged.here, service) for service in services] == ["NOT_SERVING", "NOT_SERVING", "NOT_FOUND"]


def test_model_that_fails_at_startup_ends_triton_but_not_this_server(tmp_path: Path, installed: None) -> None:
    models = {name: MODELS[name] for name in ("free", "broken")}
    repository = write_repository(tmp_path / "triton" / "models", models)
    with pytest.raises(AssertionError, match="failed to load all models"):
        TritonProcess(repository, tmp_path / "triton").__enter__()
    with serving_here(tmp_path, models, ()) as here:
        assert answer_of(here.channel, Call("", GOOD)).status == "OK"


@pytest.fixture(scope="module")
def alone(installed: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    """One model, which loads."""
    with serving_both(tmp_path_factory.mktemp("alone"), {"serial": MODELS["serial"]}) as serving:
        yield serving


def readiness_during(one: One, request: pb.RepositoryModelLoadRequest) -> set[bool]:
    """All answers of ServerReady until the load has ended."""
    stub = GRPCInferenceServiceStub(one.channel)  # type: ignore[no-untyped-call]
    told, loading = set(), stub.RepositoryModelLoad.future(request, timeout=60)
    while not loading.done():
        told.add(stub.ServerReady(pb.ServerReadyRequest(), timeout=20).ready)
    loading.result()
    return told


def test_server_is_ready_during_reloads_but_not_loads(alone: Both) -> None:
    for one in (alone.triton, alone.here):
        assert readiness_during(one, load("serial")) == {True}
        assert answer_of(one.channel, Call("", unload("serial"))).status == "OK"
        # Before the server has seen the load, and after its end, it is ready.
        assert False in readiness_during(one, load("serial"))


def test_warm_up_is_counted_only_by_triton(alone: Both) -> None:
    for one, rows in ((alone.triton, 3), (alone.here, 0)):
        call = Call("", warmup("dims: [3] zero_data: true", 3))
        assert answer_of(one.channel, call).status == "OK"
        assert counts(one, "serial")["rows"] == rows
