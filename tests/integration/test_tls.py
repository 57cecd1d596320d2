"""TLS and mutual TLS: who may connect, and certificates that change while the server runs."""

from __future__ import annotations

import asyncio
import resource
import ssl
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from paceline.clients import AsyncInferenceClient
from paceline.clients.errors import ClientError
from paceline.protos.inference_pb2_grpc import GRPCInferenceServiceStub
from paceline.server.app import Server
from paceline.server.config import Settings
from paceline.server.errors import StartError
from paceline.server.limits import Connections
from paceline.server.rpc.credentials import line_of
from paceline.server.rpc.tls import Certificates, TlsFiles
from tests.certificates import Authority, Pair
from tests.harness import ServerProcess, write_identity
from tests.integration.scripted import Script, mark_of, request
from tests.integration.serving import Served, failure_of, serving
from tests.rlimits import limited

pytestmark = pytest.mark.usefixtures("frontends")

Code = grpc.StatusCode


def settings(folder: Path, pair: Pair, roots: Path | None = None, *, mutual: bool = False) -> Settings:
    tls = TlsFiles(pair.certificate, pair.key, roots, mutual)
    return Settings(paths=(folder,), grpc_address="127.0.0.1", grpc_port=0, metrics_port=0, tls=tls)


def channel(served: Served, roots: Path, own: Pair | None = None) -> grpc.aio.Channel:
    """A separate connection, by a client that trusts `roots` and shows `own` if asked for a certificate."""
    pair = (own.key.read_bytes(), own.certificate.read_bytes()) if own else (None, None)
    credentials = grpc.ssl_channel_credentials(roots.read_bytes(), *pair)
    return grpc.aio.secure_channel(served.target, credentials, [("grpc.use_local_subchannel_pool", 1)])


async def infer(connection: grpc.aio.Channel, mark: int) -> float:
    stub: Any = GRPCInferenceServiceStub(connection)  # type: ignore[no-untyped-call]
    return mark_of(await stub.ModelInfer(request(mark), timeout=20))


async def refusal(connection: grpc.aio.Channel) -> Code:
    stub: Any = GRPCInferenceServiceStub(connection)  # type: ignore[no-untyped-call]
    return (await failure_of(stub.ModelInfer(request(1), timeout=20)))[0]


def served_certificate(served: Served) -> str:
    """The certificate that a new connection gets, as PEM without any text around it."""
    host, _, port = served.target.rpartition(":")
    return ssl.get_server_certificate((host, int(port)))


def pem(pair: Pair) -> str:
    return pair.certificate.read_text()


async def test_tls_serves_only_clients_that_trust_the_certificate(tmp_path: Path) -> None:
    ours, others = Authority(tmp_path), Authority(tmp_path, "others")
    async with serving(tmp_path, {"m": Script().model}, settings=settings(tmp_path, ours.sign("server"))) as served:
        async with channel(served, ours.roots) as connection:
            assert await infer(connection, 1) == 1
        async with channel(served, others.roots) as connection:
            assert await refusal(connection) is Code.UNAVAILABLE
        assert (await failure_of(served.stub.ModelInfer(request(1), timeout=20)))[0] is Code.UNAVAILABLE  # plain text
        async with channel(served, ours.roots) as connection:
            assert await infer(connection, 2) == 2


async def test_mutual_tls_serves_only_clients_with_a_certificate_of_ours(tmp_path: Path) -> None:
    ours, others = Authority(tmp_path), Authority(tmp_path, "others")
    server = settings(tmp_path, ours.sign("server"), ours.roots, mutual=True)
    async with serving(tmp_path, {"m": Script().model}, settings=server) as served:
        for own in (None, others.sign("stranger")):
            async with channel(served, ours.roots, own) as connection:
                assert await refusal(connection) is Code.UNAVAILABLE
        async with channel(served, ours.roots, ours.sign("client")) as connection:
            assert await infer(connection, 1) == 1


async def test_our_client_accepts_certificates_as_credentials_and_a_token_as_metadata(tmp_path: Path) -> None:
    ours = Authority(tmp_path)
    own, tokens = ours.sign("client"), tmp_path / "tokens"
    tokens.write_text(line_of("edge", "good"))
    server = replace(settings(tmp_path, ours.sign("server"), ours.roots, mutual=True), token_file=tokens)
    credentials = grpc.ssl_channel_credentials(
        ours.roots.read_bytes(), own.key.read_bytes(), own.certificate.read_bytes()
    )
    headers = [("authorization", "Bearer good")]
    async with serving(tmp_path, {"m": Script().model}, settings=server) as served:
        async with AsyncInferenceClient(served.target, credentials=credentials, metadata=headers) as client:
            result = await client.infer("m", {"a": np.array([[7.0]], np.float32)})
            assert result["x"].tolist() == [[7.0]]
        async with AsyncInferenceClient(served.target, credentials=credentials) as client:
            with pytest.raises(ClientError, match="authorization: Bearer"):
                await client.infer("m", {"a": np.array([[7.0]], np.float32)})


async def test_connection_without_a_tls_handshake_is_closed_like_an_idle_one(tmp_path: Path) -> None:
    ours = Authority(tmp_path)
    server = replace(settings(tmp_path, ours.sign("server")), connections=Connections(max_idle_ms=2_000))
    async with serving(tmp_path, {"m": Script().model}, settings=server) as served:

        async def received_after(said: bytes) -> bytes:
            reader, writer = await asyncio.open_connection("127.0.0.1", served.server.grpc_port)
            writer.write(said)
            received = await asyncio.wait_for(reader.read(), 20)
            writer.close()
            return received

        beginning_of_a_hello = b"\x16\x03\x01\x02\x00"
        assert await asyncio.gather(received_after(b""), received_after(beginning_of_a_hello)) == [b"", b""]
        async with channel(served, ours.roots) as connection:
            assert await infer(connection, 1) == 1


async def test_replaced_certificate_is_shown_to_new_connections_while_old_ones_continue(tmp_path: Path) -> None:
    ours = Authority(tmp_path)
    first, second = ours.sign("server"), ours.sign("next")
    before, after = pem(first), pem(second)
    assert before != after
    async with serving(tmp_path, {"m": Script().model}, settings=settings(tmp_path, first)) as served:
        assert await asyncio.to_thread(served_certificate, served) == before
        async with channel(served, ours.roots) as old:
            assert await infer(old, 1) == 1
            first.replace(second)
            assert await asyncio.to_thread(served_certificate, served) == after
            assert await infer(old, 2) == 2
            async with channel(served, ours.roots) as new:
                assert await infer(new, 3) == 3


async def test_new_certificate_is_not_shown_until_its_key_is_present(tmp_path: Path) -> None:
    ours = Authority(tmp_path)
    first, second = ours.sign("server"), ours.sign("next")
    before, after = pem(first), pem(second)
    async with serving(tmp_path, {"m": Script().model}, settings=settings(tmp_path, first)) as served:
        first.certificate.write_text(after)
        assert await asyncio.to_thread(served_certificate, served) == before
        first.key.unlink()
        assert await asyncio.to_thread(served_certificate, served) == before
        first.key.write_text("no key")
        assert await asyncio.to_thread(served_certificate, served) == before
        first.replace(second)
        assert await asyncio.to_thread(served_certificate, served) == after


async def test_replaced_root_decides_about_new_clients(tmp_path: Path) -> None:
    ours, others = Authority(tmp_path), Authority(tmp_path, "others")
    roots = tmp_path / "roots.crt"
    roots.write_bytes(ours.roots.read_bytes())
    one, another = ours.sign("one"), others.sign("another")
    server = settings(tmp_path, ours.sign("server"), roots, mutual=True)
    async with serving(tmp_path, {"m": Script().model}, settings=server) as served:
        async with channel(served, ours.roots, one) as connection:
            assert await infer(connection, 1) == 1
        roots.write_bytes(others.roots.read_bytes())
        async with channel(served, ours.roots, one) as connection:
            assert await refusal(connection) is Code.UNAVAILABLE
        async with channel(served, ours.roots, another) as connection:
            assert await infer(connection, 1) == 1


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("missing certificate", "server.crt: No such file or directory"),
        ("missing key", "server.key: No such file or directory"),
        ("missing root", "roots.crt: No such file or directory"),
        ("piped certificate", "server.crt: expected a file, got something else"),
        ("piped root", "roots.crt: expected a file, got something else"),
        ("bad certificate", "expected a certificate in"),
        ("bad key", "expected a certificate in"),
        ("other key", "expected a certificate in"),
        ("locked key", "without a password"),
        ("bad root", "expected certificates as PEM in"),
    ],
)
async def test_missing_or_invalid_files_keep_the_server_from_starting(tmp_path: Path, fault: str, reason: str) -> None:
    ours = Authority(tmp_path)
    pair, roots = ours.sign("server"), tmp_path / "roots.crt"
    roots.write_bytes(ours.roots.read_bytes())
    what, _, which = fault.partition(" ")
    path = {"certificate": pair.certificate, "key": pair.key, "root": roots}[which]
    ours.spoil(path, what, pair)
    server = Server(settings(tmp_path, pair, roots, mutual=True))
    with pytest.raises(StartError, match=reason):
        await server.start()


@pytest.mark.parametrize(("mode", "warnings"), [(0o640, 0), (0o644, 1)])
def test_world_readable_key_is_a_warning(tmp_path: Path, mode: int, warnings: int) -> None:
    pair = Authority(tmp_path).sign("server")
    pair.key.chmod(mode)
    write_identity(tmp_path / "models")
    args = ["--grpc-use-ssl=true", f"--grpc-server-cert={pair.certificate}", f"--grpc-server-key={pair.key}"]
    with ServerProcess(tmp_path / "models", args=args) as server:
        said = [line["message"] for line in server.log if line["level"] == "WARNING"]
    assert len(said) == warnings
    assert all("every user of this machine can read the key" in one for one in said)


def test_certificates_that_could_not_be_read_are_read_at_the_next_handshake(tmp_path: Path) -> None:
    ours = Authority(tmp_path)
    pair = ours.sign("server")
    certificates = Certificates(TlsFiles(pair.certificate, pair.key))
    certificates.credentials()
    assert certificates._if_changed() is None
    pair.replace(ours.sign("another"))
    with limited(resource.RLIMIT_NOFILE, 3):  # more are open already
        assert certificates._if_changed() is None
    assert certificates._if_changed() is not None
    assert certificates._if_changed() is None


def test_certificate_outside_its_validity_is_a_warning_at_the_start_and_on_replacement(tmp_path: Path) -> None:
    ours = Authority(tmp_path)
    pair = ours.sign_expired("server")
    pair.key.chmod(0o600)
    write_identity(tmp_path / "models")
    args = ["--grpc-use-ssl=true", f"--grpc-server-cert={pair.certificate}", f"--grpc-server-key={pair.key}"]
    with ServerProcess(tmp_path / "models", args=args) as server:
        for other in (ours.sign("good"), ours.sign_for_tomorrow("early")):
            pair.replace(other)
            ssl.get_server_certificate(("127.0.0.1", server.grpc_port))
    used = f"TLS: new certificates are in use, from {pair.certificate}"
    lines = [line for line in server.log if line["message"].startswith("TLS:")]
    expired, used_good, early, used_early = [line["message"] for line in lines]
    assert [line["level"] for line in lines] == ["WARNING", "INFO", "WARNING", "INFO"]
    assert expired == f"TLS: {pair.certificate}: certificate has expired; clients will refuse to connect"
    # The reasons are OpenSSL's, and later versions of it say more.
    assert early.startswith(f"TLS: {pair.certificate}: certificate is not yet valid")
    assert early.endswith("; clients will refuse to connect")
    assert used_good == used_early == used
