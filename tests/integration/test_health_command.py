"""`paceline health`, what a container's HEALTHCHECK runs, against a real server."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from paceline.server.cli import main
from tests.harness import REPO, ServerProcess, run_command, write_identity
from tests.nursery import Forked

LIVENESS = ("--service", "liveness")


def health(target: str, *args: str, env: dict[str, str] | None = None) -> tuple[int, str, str]:
    where = () if env else ("--server", target)
    done = run_command("health", "--timeout", "60", *where, *args, env=env)
    return done.returncode, done.stdout.strip(), done.stderr.strip()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    repository = tmp_path_factory.mktemp("repository")
    write_identity(repository)
    with ServerProcess(repository) as server:
        yield server


def test_health_of_a_ready_server_is_0(server: ServerProcess) -> None:
    assert health(server.target) == (0, "SERVING", "")
    assert health(server.target, *LIVENESS) == (0, "SERVING", "")
    assert health(server.target, env={"PACELINE_HEALTH_SERVER": server.target}) == (0, "SERVING", "")
    status, _, said = health(server.target, "--service", "nope")
    assert status == 1
    assert "unknown service 'nope'" in said


def test_health_of_a_server_that_lacks_a_model_is_1_and_names_it(tmp_path: Path) -> None:
    write_identity(tmp_path, "good")
    (tmp_path / "bad").mkdir()
    with ServerProcess(tmp_path) as server:
        status, said, complained = health(server.target)
        assert (status, said) == (1, "NOT_SERVING")
        assert complained.startswith("model 'bad' is UNAVAILABLE: no version to load: expected folders named by")
        assert "\n" not in complained
        assert health(server.target, *LIVENESS) == (0, "SERVING", "")


@pytest.mark.parametrize("service", [(), LIVENESS], ids=["readiness", "liveness"])
def test_health_without_a_server_is_1_with_one_line(service: tuple[str, ...]) -> None:
    status, said, complained = health("127.0.0.1:1", "--timeout", "5", *service)
    assert (status, said) == (1, "")
    assert complained.startswith("Error: ")
    assert "\n" not in complained


def test_ports_taken_for_each_other_are_recognised(server: ServerProcess) -> None:
    status, _, complained = health(f"127.0.0.1:{server.metrics_port}")
    assert status == 1
    assert complained.endswith("(this looks like an HTTP port; gRPC is usually on 8001)")
    result = CliRunner().invoke(main, ["top", "--once", "--metrics", server.target])
    assert result.exit_code == 1
    assert result.stderr.endswith(": this looks like a gRPC port; metrics are usually on 8002\n")


@pytest.mark.parametrize("command", ["health", "models", "describe echo", "infer --help"])
def test_what_cannot_be_printed_is_1(server: ServerProcess, command: str) -> None:
    with Path("/dev/full").open("w") as full:
        process = Forked(
            "paceline", (*command.split(), "--server", server.target), dict(os.environ), REPO, full.fileno()
        )
        with process.stderr as stderr:
            said = stderr.read()
    assert (process.wait(60), said) == (1, "Error: stdout can't be written: No space left on device\n")


def test_health_with_an_invalid_timeout_is_2_with_one_line() -> None:
    expected = "Error: --timeout: expected a number of seconds, got nan"
    assert health("127.0.0.1:1", "--timeout", "nan") == (2, "", expected)
