"""Who may call: tokens, and restricted groups of RPCs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from paceline.server.config import Settings
from paceline.server.rpc.credentials import GROUPS, line_of, parse_restrictions
from tests.integration.scripted import Script, mark_of, request
from tests.integration.serving import Served, failure_of, serving
from tests.integration.streams import Stream
from tests.integration.upstreams import Upstream, proxying, upstream
from tests.polling import eventually_awaited

pytestmark = pytest.mark.usefixtures("frontends")

Code = grpc.StatusCode
Metadata = Sequence[tuple[str, str]]

GOOD: Metadata = [("authorization", "Bearer good")]
NO_TOKEN = (
    Code.UNAUTHENTICATED,
    "expected the header 'authorization: Bearer TOKEN' with a token that this server knows",
)
OPEN_TO_ALL = {"ServerLive", "ServerReady", "Check", "List", "Watch"}
REFLECTION = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"
RPCS = sorted(path for paths in GROUPS.values() for path in paths)
MANY_MIB = 64 * 2**20


def with_tokens(folder: Path, *tokens: str, **more: Any) -> Settings:
    path = folder / "tokens"
    path.write_text("\n".join(line_of(f"name-of-{token}", token) for token in tokens))
    return Settings(paths=(folder,), token_file=path, **more)


async def status_of(served: Served, path: str, metadata: Metadata = (), body: bytes = b"") -> tuple[Code, str]:
    """How a call of the RPC ends, or OK as soon as it answers. gRPC's client makes up its own status if it writes to a
    stream at the moment when that ends: the call is repeated then."""
    for _ in range(20):
        outcome = await _status_of(served, path, metadata, body)
        if outcome != (Code.INTERNAL, "Internal error from Core"):
            break
    return outcome


async def _status_of(served: Served, path: str, metadata: Metadata, body: bytes) -> tuple[Code, str]:
    call: Any
    if path.endswith(("ModelStreamInfer", "Info")):
        call = served.channel.stream_stream(path)(iter([body]), metadata=metadata, timeout=20)
    elif path.endswith("Watch"):
        call = served.channel.unary_stream(path)(body, metadata=metadata, timeout=20)
    else:
        call = served.channel.unary_unary(path)(body, metadata=metadata, timeout=20)
        try:
            await call
        except grpc.aio.AioRpcError as error:
            return error.code(), error.details() or ""
        return Code.OK, ""
    try:
        if await call.read() is not grpc.aio.EOF:  # type: ignore[attr-defined]
            return Code.OK, ""
        return await call.code(), await call.details()
    except grpc.aio.AioRpcError as error:
        return error.code(), error.details() or ""
    finally:
        call.cancel()


# ---- Tokens ----------------------------------------------------------------------------------------------------------


async def test_every_rpc_but_those_of_probes_needs_a_token(tmp_path: Path) -> None:
    async with serving(tmp_path, {"m": Script().model}, settings=with_tokens(tmp_path, "good")) as served:
        for path in (*RPCS, REFLECTION, "/inference.GRPCInferenceService/Unheard", "/no.Service/Rpc"):
            outcome = await status_of(served, path)
            if path.rpartition("/")[2] in OPEN_TO_ALL:
                # Older versions of grpcio-health-checking don't have List.
                there = not path.endswith("/List") or hasattr(health_pb2, "HealthListRequest")
                assert outcome[0] is (Code.OK if there else Code.UNIMPLEMENTED), path
            else:
                assert outcome == NO_TOKEN, path
            assert (await status_of(served, path, GOOD))[0] is not Code.UNAUTHENTICATED, path


@pytest.mark.parametrize(
    "headers",
    [
        [("authorization", "Bearer bad")],
        [("authorization", "Bearer ")],
        [("authorization", "good")],
        [("authorization", "Basic good")],
        [("authorization", "Bearer " + "x" * 5000)],
        [*GOOD, ("authorization", "Bearer bad")],
        [("authorization-bin", b"Bearer good")],
        [("x-authorization", "Bearer good")],
    ],
)
async def test_invalid_token_is_refused_while_the_good_one_keeps_working(tmp_path: Path, headers: Any) -> None:
    async with serving(tmp_path, {"m": Script().model}, settings=with_tokens(tmp_path, "good")) as served:
        assert await failure_of(served.stub.ModelInfer(request(1), metadata=headers, timeout=20)) == NO_TOKEN
        assert mark_of(await served.stub.ModelInfer(request(2), metadata=GOOD, timeout=20)) == 2
        stream = Stream(served, metadata=headers)
        assert (await stream.rest(), await stream.status()) == ([], NO_TOKEN)
        stream = Stream(served, metadata=list(GOOD))
        await stream.send(request(3))
        assert await stream.next() == 3


async def test_token_changed_on_disk_replaces_the_old_one(tmp_path: Path) -> None:
    settings = with_tokens(tmp_path, "good")
    async with serving(tmp_path, {"m": Script().model}, settings=settings) as served:
        assert mark_of(await served.stub.ModelInfer(request(1), metadata=GOOD, timeout=20)) == 1
        stream = Stream(served, metadata=list(GOOD))
        await stream.send(request(2))
        assert await stream.next() == 2
        outcomes: list[Code] = []

        async def refused() -> bool:
            code = (await status_of(served, "/inference.GRPCInferenceService/ServerMetadata", GOOD))[0]
            outcomes.append(code)
            return code is Code.UNAUTHENTICATED

        assert not await refused()
        new = tmp_path / "new"
        new.write_text(line_of("other", "other"))
        assert settings.token_file is not None
        os.replace(new, settings.token_file)
        while not await refused():
            assert len(outcomes) < 100_000
        assert set(outcomes) == {Code.OK, Code.UNAUTHENTICATED}
        other = [("authorization", "Bearer other")]
        assert mark_of(await served.stub.ModelInfer(request(1), metadata=other, timeout=20)) == 1
        await stream.send(request(3))
        assert await stream.next() == 3, "open streams stay open"


async def test_message_of_a_refused_call_is_not_read(tmp_path: Path) -> None:
    """The message isn't even complete: its caller would have to send more to get anything but the refusal."""
    async with serving(tmp_path, {"m": Script().model}, settings=with_tokens(tmp_path, "good")) as served:
        path = "/inference.GRPCInferenceService/ModelInfer"
        assert await status_of(served, path, body=bytes(MANY_MIB)) == NO_TOKEN
        call: Any = served.channel.stream_unary(path)(timeout=20)
        assert (await call.code(), await call.details()) == NO_TOKEN


async def test_refusals_are_counted_by_reason(tmp_path: Path) -> None:
    settings = with_tokens(tmp_path, "good", restrictions=parse_restrictions(["metadata:k=v"]))
    async with serving(tmp_path, {"m": Script().model}, settings=settings) as served:
        path = "/inference.GRPCInferenceService/ServerMetadata"
        for headers in ((), (), GOOD, (*GOOD, ("triton-grpc-protocol-k", "v"))):
            await status_of(served, path, headers)

        async def counted() -> bool:
            metrics = await served.metrics()
            name = "paceline_refused_rpcs"
            return [metrics[f'{name}{{reason="{reason}"}}'] for reason in ("unauthenticated", "restricted")] == [2, 1]

        await eventually_awaited(counted, "two refusals for lack of a token, one for lack of a header")


# ---- Restrictions ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("group", sorted(GROUPS))
async def test_restricted_group_needs_its_header_and_all_others_need_none(tmp_path: Path, group: str) -> None:
    settings = Settings(paths=(tmp_path,), restrictions=parse_restrictions([f"{group}:admin-key=Open Sesame"]))
    header = "triton-grpc-protocol-admin-key"
    refusal = (Code.UNAVAILABLE, f"This protocol is restricted, expecting header '{header}'")
    async with serving(tmp_path, {"m": Script().model}, settings=settings) as served:
        for path in (*RPCS, REFLECTION):
            for wrong in ([], [(header, "open sesame")], [(header, "")], [("admin-key", "Open Sesame")]):
                assert (await status_of(served, path, wrong) == refusal) is (path in GROUPS[group]), path
            twice = [(header, "Open Sesame"), (header, "x")]
            assert (await status_of(served, path, twice) == refusal) is (path in GROUPS[group]), path
            assert await status_of(served, path, [(header, "Open Sesame")]) != refusal, path


async def test_restricted_health_needs_its_header_but_no_token(tmp_path: Path) -> None:
    settings = with_tokens(tmp_path, "good", restrictions=parse_restrictions(["health:k=v"]))
    async with serving(tmp_path, {"m": Script().model}, settings=settings) as served:
        health: Any = health_pb2_grpc.HealthStub(served.channel)  # type: ignore[no-untyped-call]
        check = health_pb2.HealthCheckRequest()
        assert (await failure_of(health.Check(check, timeout=20)))[0] is Code.UNAVAILABLE
        ready = await health.Check(check, metadata=[("triton-grpc-protocol-k", "v")], timeout=20)
        assert ready.status == health_pb2.HealthCheckResponse.SERVING


# ---- Secrets ---------------------------------------------------------------------------------------------------------


async def test_headers_that_identify_the_caller_become_no_parameters(tmp_path: Path) -> None:
    """Another server is told the parameters that headers become."""
    stub = Upstream()
    settings = with_tokens(tmp_path, "good", grpc_header_forward_pattern=".*")
    headers = [*GOOD, ("triton-grpc-protocol-k", "v"), ("x-tenant", "a")]
    async with upstream(stub) as target, proxying(tmp_path, target, settings=settings, models=("m",)) as served:
        await served.stub.ModelInfer(request(1), metadata=headers, timeout=20)
        stream = Stream(served, metadata=headers)
        await stream.send(request(2))
        await stream.message()
    assert len(stub.calls) == 2
    for call in stub.calls:
        assert call.parameters["x-tenant"].string_param == "a"
        assert not {"authorization", "triton-grpc-protocol-k"} & set(call.parameters)
