"""Our client and its commands against servers that require TLS, certificates and tokens, in real processes."""

from __future__ import annotations

import asyncio
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from click.testing import CliRunner

from paceline.clients import AsyncInferenceClient, InferenceClient, Tls, Unauthenticated, Unavailable
from paceline.server.cli import main
from paceline.server.rpc.credentials import line_of
from tests.certificates import Authority, Pair
from tests.harness import REPO, ServerProcess, run_command, write_identity

TOKEN, WRONG = "tok-5e1f-good", "tok-77aa-wrong"
ROW = {"INPUT0": np.ones((1, 16), np.float32)}
ASK = ("infer", "echo", "--random")


@dataclass(frozen=True)
class World:
    """A server with mutual TLS and tokens, and the files that callers may have."""

    target: str
    folder: Path
    ours: Authority
    others: Authority
    own: Pair

    @property
    def trust(self) -> tuple[str, ...]:
        return ("--tls-ca", str(self.ours.roots))

    def shows(self, pair: Pair) -> tuple[str, ...]:
        return ("--tls-cert", str(pair.certificate), "--tls-key", str(pair.key))

    @property
    def all_of_it(self) -> tuple[str, ...]:
        return (*self.trust, *self.shows(self.own), "--token-file", str(self.folder / "token"))


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("world")
    ours, others = Authority(folder), Authority(folder, "others")
    pair, own = ours.sign("server"), ours.sign("client")
    (folder / "tokens").write_text(line_of("edge", TOKEN))
    (folder / "token").write_text(f"{TOKEN}\n")
    (folder / "wrong").write_text(WRONG)
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


def paceline(*args: str, env: dict[str, str] | None = None) -> tuple[int, str, str]:
    # The usual 3 s of `health` are short for a machine that is busy with something else.
    patience = ("--timeout", "60") if "health" in args else ()
    done = run_command(*args, *patience, env=env)
    return done.returncode, done.stdout.strip(), done.stderr.strip()


# ---- The library -----------------------------------------------------------------------------------------------------


def tls_of(world: World) -> Tls:
    return Tls(ca=world.ours.roots, certificate=world.own.certificate, key=world.own.key)


@pytest.mark.parametrize("more", [{}, {"transport": "stream"}, {"coalesce": 4}], ids=["call", "stream", "coalesce"])
async def test_clients_take_tls_and_a_token(world: World, more: dict[str, Any]) -> None:
    async with AsyncInferenceClient(world.target, tls=tls_of(world), token=TOKEN, **more) as client:
        assert (await client.infer("echo", ROW))["OUTPUT0"].tolist() == ROW["INPUT0"].tolist()
    async with AsyncInferenceClient(world.target, tls=tls_of(world), token=WRONG, **more) as client:
        with pytest.raises(Unauthenticated):
            await client.infer("echo", ROW)


def test_blocking_client_takes_tls_and_a_token(world: World) -> None:
    with InferenceClient(world.target, tls=tls_of(world), token=TOKEN) as client:
        assert client.infer("echo", ROW)["OUTPUT0"].shape == (1, 16)
    with (
        InferenceClient(world.target, tls=Tls(ca=world.others.roots)) as client,
        pytest.raises(Unavailable, match="CERTIFICATE_VERIFY_FAILED"),
    ):
        client.health()


def test_server_name_is_verified_and_can_be_set(world: World) -> None:
    pair = (world.own.certificate, world.own.key)
    with InferenceClient(world.target, tls=Tls(world.ours.roots, *pair, server_name="localhost")) as client:
        assert client.health() == "SERVING"
    with (
        InferenceClient(world.target, tls=Tls(world.ours.roots, *pair, server_name="elsewhere.example")) as client,
        pytest.raises(Unavailable, match="Hostname Verification"),
    ):
        client.health()


def test_public_authorities_do_not_verify_our_certificate(world: World) -> None:
    with InferenceClient(world.target, tls=True) as client, pytest.raises(Unavailable, match="VERIFY_FAILED"):
        client.health()


@pytest.mark.parametrize("fault", ["missing ca", "bad ca", "missing key", "other key", "locked key"])
async def test_unusable_files_are_named_when_the_client_opens(tmp_path: Path, fault: str) -> None:
    ours = Authority(tmp_path)
    pair, ca = ours.sign("client"), tmp_path / "ca.crt"
    ca.write_bytes(ours.roots.read_bytes())
    what, _, which = fault.partition(" ")
    path = {"ca": ca, "key": pair.key}[which]
    ours.spoil(path, what, pair)
    tls = Tls(ca, pair.certificate, pair.key)
    with pytest.raises(ValueError, match=path.name), InferenceClient("127.0.0.1:1", tls=tls):
        pass
    with pytest.raises(ValueError, match=path.name):
        await AsyncInferenceClient("127.0.0.1:1", tls=tls).server_live()


def test_contradictory_arguments_are_refused_at_once() -> None:
    with pytest.raises(ValueError, match="only one of them"):
        Tls(certificate="c.crt")
    with pytest.raises(ValueError, match="one of tls and credentials"):
        InferenceClient("127.0.0.1:1", tls=True, credentials=grpc.ssl_channel_credentials())


@pytest.mark.parametrize("token", ["", "two words", "line\nbreak", "é", "ab==cd"])
def test_invalid_token_is_refused_without_being_shown(token: str) -> None:
    with pytest.raises(ValueError, match="token: expected letters") as refusal:
        InferenceClient("127.0.0.1:1", token=token)
    assert not token or token not in str(refusal.value)


# ---- `paceline infer` and `paceline health` --------------------------------------------------------------------------


def test_infer_takes_files(world: World) -> None:
    status, said, complained = paceline(*ASK, "--server", world.target, *world.all_of_it)
    assert (status, complained) == (0, "")
    assert said.startswith("echo version 1")


@pytest.mark.parametrize("way", [(), ("--stream",)], ids=" ".join)
def test_processes_of_a_load_take_files(world: World, way: tuple[str, ...]) -> None:
    ask = ("load", "echo", "--count", "10", "--clients", "2", "--processes", "2", "--assert", "errors==0", *way)
    code, out, err = paceline(*ask, "--server", world.target, *world.all_of_it)
    assert (code, err) == (0, "")
    assert "errors        0 of 10 requests" in out
    assert TOKEN not in out


def test_infer_takes_everything_from_the_environment(world: World) -> None:
    env = {
        "PACELINE_CLIENT_TLS_CA": str(world.ours.roots),
        "PACELINE_CLIENT_TLS_CERT": str(world.own.certificate),
        "PACELINE_CLIENT_TLS_KEY": str(world.own.key),
        "PACELINE_CLIENT_TLS_SERVER_NAME": "localhost",
        "PACELINE_CLIENT_TOKEN": TOKEN,
    }
    assert paceline(*ASK, "--server", world.target, env=env)[0] == 0
    # What HEALTHCHECK runs, whose arguments are fixed.
    assert paceline("health", env={**env, "PACELINE_HEALTH_SERVER": world.target}) == (0, "SERVING", "")
    # The file takes precedence, as flags do.
    status, _, complained = paceline(
        *ASK, "--server", world.target, "--token-file", str(world.folder / "wrong"), env=env
    )
    assert (status, complained.split(":")[:2]) == (1, ["Error", " UNAUTHENTICATED"])


@pytest.mark.parametrize("ask", [("describe", "echo"), ("models",)], ids=lambda ask: ask[0])
def test_what_a_server_has_is_told_to_those_with_a_token(world: World, ask: tuple[str, ...]) -> None:
    where = ("--server", world.target, *world.trust, *world.shows(world.own))
    status, said, _ = paceline(*ask, *where, "--token-file", str(world.folder / "token"))
    assert status == 0
    assert "echo" in said
    status, said, complained = paceline(*ask, *where)
    assert (status, said) == (1, "")
    assert complained.startswith("Error: UNAUTHENTICATED: ")


def test_health_needs_a_certificate_but_no_token(world: World) -> None:
    where = ("health", "--server", world.target)
    assert paceline(*where, *world.trust, *world.shows(world.own)) == (0, "SERVING", "")
    for own in ((), world.shows(world.others.sign("stranger"))):
        status, said, complained = paceline(*where, *world.trust, *own)
        assert (status, said) == (1, "")
        assert complained.startswith("Error: UNAVAILABLE: ")
        assert complained.endswith("require another client certificate? --tls-cert, --tls-key)")
        assert "\n" not in complained


@pytest.mark.parametrize("command", ["infer", "health"])
def test_untrusted_server_is_one_line_and_exit_1(world: World, command: str) -> None:
    ask = ASK if command == "infer" else ("health",)
    for args, words in (
        (("--tls-ca", str(world.others.roots)), "CERTIFICATE_VERIFY_FAILED"),
        (("--tls",), "CERTIFICATE_VERIFY_FAILED"),
        ((*world.trust, "--tls-server-name", "elsewhere.example"), "Hostname Verification Check failed"),
        ((), "does the server speak TLS? --tls, --tls-ca"),
    ):
        status, said, complained = paceline(*ask, "--server", world.target, *args)
        assert (status, said) == (1, "")
        assert words in complained
        assert "\n" not in complained


def test_expired_certificate_is_one_line_and_exit_1_until_it_is_replaced(tmp_path: Path) -> None:
    ours = Authority(tmp_path)
    pair = ours.sign_expired("server")
    write_identity(tmp_path / "models")
    args = ["--grpc-use-ssl=true", f"--grpc-server-cert={pair.certificate}", f"--grpc-server-key={pair.key}"]
    with ServerProcess(tmp_path / "models", args=args) as server:
        ask = ("health", "--server", server.target, "--tls-ca", str(ours.roots))
        status, _, complained = paceline(*ask)
        pair.replace(ours.sign("good"))
        assert paceline(*ask) == (0, "SERVING", "")
    assert status == 1
    assert "certificate has expired" in complained
    assert "\n" not in complained


def test_error_says_that_the_server_does_not_speak_tls(tmp_path: Path) -> None:
    write_identity(tmp_path)
    with ServerProcess(tmp_path) as server:
        status, _, complained = paceline("health", "--server", server.target, "--tls")
    assert status == 1
    assert complained.endswith("(the server doesn't speak TLS)")
    assert "\n" not in complained


def test_wrong_token_is_one_line_and_exit_1_and_is_not_shown(world: World) -> None:
    args = (*world.trust, *world.shows(world.own), "--token-file", str(world.folder / "wrong"))
    status, said, complained = paceline(*ASK, "--server", world.target, *args)
    assert (status, said) == (1, "")
    assert complained == (
        "Error: UNAUTHENTICATED: expected the header 'authorization: Bearer TOKEN' with a token that this server knows"
    )


@pytest.mark.parametrize("command", ["infer", "describe", "models", "health", "top"])
@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--tls-ca", "missing.crt"), "TLS: missing.crt: No such file or directory"),
        (("--tls-ca", "README.md"), "TLS: expected certificates as PEM in README.md"),
        (("--tls-cert", "missing.crt"), "--tls-cert and --tls-key: expected both, got one"),
        (("--tls-key", "missing.key"), "--tls-cert and --tls-key: expected both, got one"),
        (("--tls-cert", "README.md", "--tls-key", "README.md"), "TLS: expected a certificate in README.md"),
        (("--token-file", "missing"), "--token-file missing: No such file or directory"),
        (("--token-file", "README.md"), "README.md: expected a token and nothing else"),
    ],
)
def test_unusable_files_are_one_line_and_exit_2(
    command: str, args: tuple[str, ...], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this process, since no server is asked."""
    monkeypatch.chdir(REPO)
    ended = CliRunner().invoke(main, [command, *(("echo",) if command in ("infer", "describe") else ()), *args])
    assert (ended.exit_code, ended.stdout) == (2, "")
    assert ended.stderr.startswith(f"Error: {words}")
    assert ended.stderr.count("\n") == 1


def test_invalid_token_in_the_environment_is_exit_2_and_is_not_shown() -> None:
    status, _, complained = paceline("health", env={"PACELINE_CLIENT_TOKEN": "two words"})
    assert status == 2
    assert complained.startswith("Error: PACELINE_CLIENT_TOKEN: token: expected letters")
    assert "two words" not in complained


def test_no_option_takes_a_token(world: World) -> None:
    assert paceline("health", "--token", TOKEN)[0] == 2
    assert "all users of a machine can read arguments" in " ".join(paceline("infer", "--help")[1].split())


# ---- `paceline top` --------------------------------------------------------------------------------------------------


@contextmanager
def https_proxy(pair: Pair, roots: Path, port: int) -> Iterator[tuple[int, list[str | None]]]:
    """A server in front of the metrics on `port`, for clients with a certificate: it redirects those with the token to
    `port` itself. Yields its own port and the tokens that it received."""
    seen: list[str | None] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append(self.headers.get("Authorization"))
            good = seen[-1] == f"Bearer {TOKEN}"
            self.send_response(307 if good else 401)
            self.send_header("Location", f"http://127.0.0.1:{port}/metrics")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pair.certificate, pair.key)
    context.load_verify_locations(roots)
    context.verify_mode = ssl.CERT_REQUIRED
    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server.server_port, seen
        server.shutdown()
        thread.join()


@contextmanager
def plain_metrics() -> Iterator[tuple[int, list[str | None]]]:
    """Metrics of a server without models. Yields the port and the tokens that it received."""
    seen: list[str | None] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append(self.headers.get("Authorization"))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"# TYPE paceline_ready gauge\npaceline_ready 1\n")

        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server.server_port, seen
        server.shutdown()
        thread.join()


async def test_top_speaks_tls_and_sends_its_token_nowhere_else(world: World) -> None:
    proxy = world.ours.sign("proxy")
    once = ("top", "--once", "--interval", "0.1", "--metrics")
    with plain_metrics() as (port, elsewhere), https_proxy(proxy, world.ours.roots, port) as (front, seen):
        where = f"127.0.0.1:{front}"
        status, said, complained = await asyncio.to_thread(paceline, *once, where, *world.all_of_it)
        assert (status, complained) == (0, "")
        assert said.startswith("ready, ")
        assert seen == [f"Bearer {TOKEN}"] * 2
        assert elsewhere == [None] * 2
        for args, words in (
            ((*world.trust, *world.shows(world.own)), "HTTP status 401"),
            ((*world.trust, *world.shows(world.own), "--tls-server-name", "elsewhere.example"), "elsewhere.example"),
            (("--tls-ca", str(world.others.roots)), "CERTIFICATE_VERIFY_FAILED"),
            (("--tls",), "CERTIFICATE_VERIFY_FAILED"),
        ):
            status, said, complained = await asyncio.to_thread(paceline, *once, where, *args)
            assert (status, said) == (1, "")
            assert words in complained
            assert "\n" not in complained


def test_top_refuses_a_plain_http_url_together_with_tls() -> None:
    status, _, complained = paceline("top", "--once", "--tls", "--metrics", "http://127.0.0.1:1/metrics")
    assert status == 2
    assert "expected an https URL" in complained
