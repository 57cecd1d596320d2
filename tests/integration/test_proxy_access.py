"""The proxy and access control: its TLS and token towards the upstream, and which of the callers' tokens that gets."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from paceline.clients import ClientError, InferenceClient, Unavailable
from paceline.server.rpc.credentials import line_of
from tests.certificates import Authority, Pair
from tests.harness import ServerProcess, run_command, write_identity
from tests.integration.http2 import call_by_hand
from tests.integration.probing import get
from tests.integration.scripted import request
from tests.integration.upstreams import Upstream, upstream

HERS, OURS = "tok-hers", "tok-ours"
ROW = {"INPUT0": np.ones((1, 16), np.float32)}
TWO = {"a": np.ones((1, 2), np.float32)}


@dataclass(frozen=True)
class World:
    """An upstream with mutual TLS that accepts only the token OURS."""

    target: str
    folder: Path
    ours: Authority
    others: Authority
    own: Pair

    def args(self, roots: Path, own: Pair | None, token: str | None = OURS) -> list[str]:
        args = ["--upstream", self.target, "--upstream-use-ssl=true", f"--upstream-root-cert={roots}"]
        if own is not None:
            args += [f"--upstream-client-cert={own.certificate}", f"--upstream-client-key={own.key}"]
        if token is not None:
            (self.folder / token).write_text(token)
            args += [f"--upstream-token-file={self.folder / token}"]
        return args


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("world")
    ours, others = Authority(folder), Authority(folder, "others")
    pair, own = ours.sign("server"), ours.sign("client")
    (folder / "tokens").write_text(line_of("proxy", OURS))
    write_identity(folder / "models")
    args = [
        "--grpc-use-ssl-mutual=true",
        f"--grpc-server-cert={pair.certificate}",
        f"--grpc-server-key={pair.key}",
        f"--grpc-root-cert={ours.roots}",
        f"--grpc-token-file={folder / 'tokens'}",
    ]
    with ServerProcess(folder / "models", args=args) as server:
        yield World(server.target, folder, ours, others, own)


def test_proxy_speaks_tls_with_its_own_certificate_and_token(world: World) -> None:
    for more in ((), ("--upstream-server-name", "localhost"), ("--frontends", "2")):
        args = [*world.args(world.ours.roots, world.own), *more]
        with ServerProcess(args=args) as proxy, InferenceClient(proxy.target) as client:
            assert client.server_ready()
            assert client.infer("echo", ROW)["OUTPUT0"].tolist() == ROW["INPUT0"].tolist()


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("stranger's roots", "CERTIFICATE_VERIFY_FAILED"),
        ("no certificate", "Socket closed"),
        ("other name", "Hostname Verification Check failed"),
        ("wrong token", "with a token that this server knows"),
        ("no token", "with a token that this server knows"),
    ],
)
def test_proxy_refused_by_its_upstream_is_unready_and_says_why(world: World, fault: str, words: str) -> None:
    roots = world.others.roots if fault == "stranger's roots" else world.ours.roots
    token = {"wrong token": "tok-wrong", "no token": None}.get(fault, OURS)
    args = world.args(roots, None if fault == "no certificate" else world.own, token)
    args += ["--upstream-server-name", "elsewhere.example"] if fault == "other name" else []
    with ServerProcess(args=args) as proxy, InferenceClient(proxy.target) as client:
        assert not client.server_ready()
        with pytest.raises(ClientError) as refusal:
            client.infer("echo", ROW)
        status, probed = get(proxy.metrics_port, "/readyz")
        proxy.terminate()
        answered, logged = str(refusal.value), "".join(proxy.stderr)
    assert (type(refusal.value), status) == (Unavailable, 503)
    for said in (answered, probed, logged):
        assert words in said
        assert OURS not in said
        assert "tok-wrong" not in said


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--upstream-use-ssl=true", "--upstream-root-cert=missing.crt"), "TLS: missing.crt: No such file"),
        (("--upstream-use-ssl=true", "--upstream-root-cert=README.md"), "expected certificates as PEM in README.md"),
        (("--upstream-token-file=missing",), "--upstream-token-file: missing: No such file"),
        (("--upstream-token-file=README.md",), "README.md: expected a token and nothing else"),
    ],
)
def test_missing_or_invalid_files_keep_the_proxy_from_starting(args: Sequence[str], words: str) -> None:
    done = run_command("serve", "--grpc-port=0", "--metrics-port=0", "--upstream=127.0.0.1:1", *args)
    assert done.returncode == 1
    assert words in done.stderr.splitlines()[-1]


def asks(target: str, token: str) -> None:
    with InferenceClient(target, token=token) as client:
        client.infer("m", TWO)


@pytest.mark.parametrize(
    ("args", "expected_authorization"),
    [
        ((), f"Bearer {HERS}"),  # the proxy checks no tokens: this one may be for the upstream
        (("--grpc-token-file={tokens}",), None),
        (("--grpc-token-file={tokens}", "--upstream-header=authorization"), f"Bearer {HERS}"),
        (("--upstream-token-file={own}",), f"Bearer {OURS}"),
        (("--upstream-token-file={own}", "--grpc-token-file={tokens}"), f"Bearer {OURS}"),
    ],
    ids=["by default", "ours to check", "asked for", "own", "own and ours to check"],
)
async def test_upstream_gets_no_token_meant_for_us_unless_configured(
    tmp_path: Path, args: Sequence[str], expected_authorization: str | None
) -> None:
    (tmp_path / "tokens").write_text(line_of("edge", HERS))
    (tmp_path / "own").write_text(OURS)
    given = [one.format(tokens=tmp_path / "tokens", own=tmp_path / "own") for one in args]
    stub = Upstream()
    async with upstream(stub) as target:
        proxy = ServerProcess(args=["--upstream", target, "--upstream-model=m", *given])
        proxy.start()  # in this thread, as the process lives only as long as the thread that starts it
        try:
            await asyncio.to_thread(proxy.wait_ready)
            await asyncio.to_thread(asks, proxy.target, HERS)
        finally:
            proxy.kill()
    assert [headers.get("authorization") for headers in stub.headers] == [expected_authorization]


@pytest.mark.parametrize(
    ("header", "travels"),
    [("authorization", False), ("x-tenant-bin", True), ("traceparent", True)],
)
async def test_unsendable_header_fails_its_request_or_is_left_out(tmp_path: Path, header: str, travels: bool) -> None:
    """gRPC accepts values that it refuses to send. A trace only accompanies its request, which can do without."""
    stub, passed = Upstream(), ["--upstream-header=authorization", "--upstream-header=x-tenant-bin"]
    value = "AAAA" if header.endswith("-bin") else "a\x01\u00e9"
    data = request(1).SerializeToString()
    async with upstream(stub) as target:
        proxy = ServerProcess(args=["--upstream", target, "--upstream-model=m", *passed])
        proxy.start()
        try:
            await asyncio.to_thread(proxy.wait_ready)
            said = await call_by_hand(proxy.grpc_port, data, {header: value})
            assert (b"grpc-status\x013" in said) is not travels  # INVALID_ARGUMENT
            assert (b"can't be passed on" in said) is not travels
            assert len(stub.calls) == travels
            await call_by_hand(proxy.grpc_port, data, {"authorization": "fine"})
        finally:
            proxy.kill()
    assert stub.headers[-1]["authorization"] == "fine"
    assert all(line.startswith("{") for line in proxy.stderr)
    assert [line for line in proxy.log if line["level"] != "INFO"] == []
