"""Servers that listen on a Unix socket: who may connect, what is replaced, and what clients make of it."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as triton
from click.testing import CliRunner

from paceline.clients import AsyncInferenceClient, InferenceClient, Tls
from paceline.server.addresses import SocketFile
from paceline.server.app import Server
from paceline.server.cli import main
from paceline.server.config import Settings
from paceline.server.errors import StartError
from paceline.server.models.upstream_settings import UpstreamSettings
from paceline.server.rpc.tls import TlsFiles
from tests.certificates import Authority
from tests.harness import ServerProcess, write_identity

ROW = {"INPUT0": np.arange(16, dtype=np.float32)[None]}


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose path is short enough for sockets."""
    return tmp_path_factory.mktemp("s")


@pytest.fixture
def path(folder: Path) -> Path:
    return folder / "p.sock"


def settings(repository: Path, path: Path, **more: object) -> Settings:
    write_identity(repository)
    return Settings(paths=(repository,), **{"grpc_address": f"unix:{path}", "metrics_port": 0, **more})  # type: ignore[arg-type]


@asynccontextmanager
async def running(settings: Settings) -> AsyncIterator[Server]:
    server = Server(settings)
    await server.start()
    try:
        yield server
    finally:
        await server.stop(1)


def leave_stale_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))


async def infers(target: str) -> bool:
    async with AsyncInferenceClient(target) as client:
        return np.array_equal((await client.infer("echo", ROW))["OUTPUT0"], ROW["INPUT0"])


@pytest.mark.parametrize("prefix", ["unix:", "unix://"])
async def test_both_forms_of_a_path_lead_to_the_socket(tmp_path: Path, path: Path, prefix: str) -> None:
    async with running(settings(tmp_path, path, grpc_address=f"{prefix}{path}")):
        assert await infers(f"unix:{path}")
        assert await infers(f"unix://{path}")


async def test_relative_path_is_one_from_the_working_folder(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    async with running(settings(tmp_path, folder, grpc_address="unix:p.sock")):
        assert await infers("unix:p.sock")
        assert await infers(f"unix:{folder}/p.sock")


async def test_path_with_unusual_letters_is_written_in_percent(tmp_path: Path, folder: Path) -> None:
    async with running(settings(tmp_path, folder, grpc_address=f"unix:{folder}/a%20%C3%A9.sock")):
        assert [file.name for file in folder.iterdir()] == ["a é.sock"]
        assert await infers(f"unix:{folder}/a%20%C3%A9.sock")


@pytest.mark.parametrize("mode", [0o600, 0o666])
async def test_socket_has_its_mode_and_nothing_else_is_left(tmp_path: Path, path: Path, mode: int) -> None:
    async with running(settings(tmp_path, path, grpc_socket_mode=mode)):
        assert stat.S_IMODE(path.stat().st_mode) == mode
        assert list(path.parent.iterdir()) == [path]
    assert list(path.parent.iterdir()) == []


def test_socket_appears_with_its_mode_from_a_private_folder(path: Path) -> None:
    file = SocketFile(str(path), 0o640)
    with socket.socket(socket.AF_UNIX) as bound, file.appearing() as target:
        bound.bind(target.removeprefix("unix:"))
        private = Path(target.removeprefix("unix:")).parent
        assert stat.S_IMODE(private.stat().st_mode) == 0o700
        assert not path.exists()
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


async def test_stale_socket_is_replaced_by_the_new_one(tmp_path: Path, path: Path) -> None:
    leave_stale_socket(path)
    async with running(settings(tmp_path, path)):
        assert await infers(f"unix:{path}")


async def test_live_socket_stays_and_the_error_names_it(tmp_path: Path, path: Path) -> None:
    async with running(settings(tmp_path, path)):
        second = Server(settings(tmp_path / "second", path))
        with pytest.raises(StartError, match=f"gRPC can't listen on unix:{path}: another process listens there"):
            await second.start()
        assert await infers(f"unix:{path}")


def test_socket_that_another_server_has_opened_meanwhile_stays(path: Path) -> None:
    leave_stale_socket(path)

    def open_too_late(live: socket.socket) -> None:
        with socket.socket(socket.AF_UNIX) as late, SocketFile(str(path), 0o600).appearing() as target:
            late.bind(target.removeprefix("unix:"))
            path.unlink()
            live.bind(str(path))
            live.listen()

    with socket.socket(socket.AF_UNIX) as live, socket.socket(socket.AF_UNIX) as caller:
        with pytest.raises(StartError, match="another process listens there"):
            open_too_late(live)
        caller.connect(str(path))
    assert list(path.parent.iterdir()) == [path]


async def test_file_that_is_no_socket_is_never_replaced(tmp_path: Path, path: Path) -> None:
    path.write_text("mine")
    with pytest.raises(StartError, match=f"unix:{path}: a file is there that is no socket"):
        await Server(settings(tmp_path, path)).start()
    assert path.read_text() == "mine"


async def test_missing_folder_of_the_socket_is_reported_before_loading(tmp_path: Path, folder: Path) -> None:
    server = Server(settings(tmp_path, folder / "gone" / "p.sock"))
    with pytest.raises(StartError, match=r"gone/p\.sock: No such file or directory"):
        await server.start()
    assert not server.repository.models


async def test_stopping_server_leaves_the_socket_of_its_successor(tmp_path: Path, path: Path) -> None:
    async with running(settings(tmp_path, path)):
        path.unlink()
        leave_stale_socket(path)
    assert path.exists()


@pytest.mark.parametrize("options", [{}, {"transport": "stream"}, {"coalesce": 4}])
async def test_asyncio_client_infers_over_the_socket(tmp_path: Path, path: Path, options: dict[str, object]) -> None:
    async with running(settings(tmp_path, path)), AsyncInferenceClient(f"unix:{path}", **options) as client:  # type: ignore[arg-type]
        assert np.array_equal((await client.infer("echo", ROW))["OUTPUT0"], ROW["INPUT0"])


async def test_certificate_for_localhost_is_valid_on_a_socket(tmp_path: Path, path: Path) -> None:
    authority = Authority(tmp_path)
    pair = authority.sign("server")
    async with (
        running(settings(tmp_path / "models", path, tls=TlsFiles(pair.certificate, pair.key))),
        AsyncInferenceClient(f"unix:{path}", tls=Tls(ca=authority.roots)) as client,
    ):
        assert await client.server_ready()


async def test_upstream_may_be_on_a_unix_socket(tmp_path: Path, path: Path) -> None:
    async with running(settings(tmp_path, path)):
        proxy = Settings(
            paths=(),
            grpc_address="127.0.0.1",
            grpc_port=0,
            metrics_port=None,
            upstream=UpstreamSettings(f"unix:{path}"),
        )
        async with running(proxy) as in_front:
            assert await infers(f"127.0.0.1:{in_front.grpc_port}")


def test_process_on_a_socket_serves_every_kind_of_client(tmp_path: Path, path: Path) -> None:
    write_identity(tmp_path)
    target = f"unix:{path}"
    with ServerProcess(tmp_path, listen=("--grpc-address", target)) as server:
        ready = next(record["message"] for record in server.log if record["message"].startswith("ready"))
        assert ready == f"ready: gRPC on {target}, metrics on port {server.metrics_port}"
        with InferenceClient(target) as client:
            assert np.array_equal(client.infer("echo", ROW)["OUTPUT0"], ROW["INPUT0"])
        tensor = triton.InferInput("INPUT0", [1, 16], "FP32")
        tensor.set_data_from_numpy(ROW["INPUT0"])
        with triton.InferenceServerClient(target) as of_triton:
            assert np.array_equal(of_triton.infer("echo", [tensor]).as_numpy("OUTPUT0"), ROW["INPUT0"])
        for command in (["health"], ["infer", "echo", "--random"]):
            result = CliRunner().invoke(main, [*command, "--server", target])
            assert result.exit_code == 0, result.output
        assert server.metrics()["paceline_ready"] == 1
        assert server.terminate() == 0
    assert not path.exists()


def test_socket_of_a_killed_server_is_replaced_at_the_next_start(tmp_path: Path, path: Path) -> None:
    write_identity(tmp_path)
    for _ in range(2):
        with ServerProcess(tmp_path, listen=("--grpc-address", f"unix:{path}")) as server:
            with InferenceClient(f"unix:{path}") as client:
                assert client.server_ready()
            server.kill()
        assert path.exists()


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to become another user")
def test_other_users_may_not_connect_by_default(tmp_path: Path, path: Path) -> None:
    path.parent.chmod(0o755)
    write_identity(tmp_path)
    with ServerProcess(tmp_path, listen=("--grpc-address", f"unix:{path}")):
        refused = os.fork()
        if refused == 0:
            os.setuid(65_534)
            with socket.socket(socket.AF_UNIX) as caller:
                os._exit(caller.connect_ex(str(path)))
        assert os.waitstatus_to_exitcode(os.waitpid(refused, 0)[1]) != 0
