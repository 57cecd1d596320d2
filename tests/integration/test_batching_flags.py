"""Batching of models without a configuration, set by flags and environment variables in several servers' units."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from paceline.clients import InferenceClient
from paceline.clients.errors import DeadlineExceeded, InvalidArgument
from paceline.server.cli import main
from tests import models
from tests.harness import ServerProcess, write_identity
from tests.wire import rows_of_floats


def refusal(*arguments: str, **environment: str) -> str:
    """The output of a start that fails before anything is served."""
    outcome = CliRunner().invoke(main, ["serve", "models", *arguments], env=environment)
    assert outcome.exit_code == 2
    return outcome.output


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A model without a configuration, and one with."""
    models.write(models.identity(), tmp_path / "bare" / "1" / "model.onnx")
    write_identity(tmp_path, "configured", extra="dynamic_batching { }")
    return tmp_path


def loaded(server: ServerProcess, model: str) -> str:
    """What the log says about the model's batching of equal lengths."""
    start = f"model '{model}' version 1 loaded in "
    (line,) = [line["message"] for line in server.log if line["message"].startswith(start)]
    return str(line).partition(": ")[2].partition(";")[0]


def test_flags_in_tritons_units_apply_only_to_the_model_without_configuration(repository: Path) -> None:
    flags = ["--max-batch-size", "5", "--max-queue-delay-microseconds", "2500"]
    with ServerProcess(repository, args=flags) as server:
        assert loaded(server, "bare") == "batches of up to 5 rows, delay 2500 us"
        assert loaded(server, "configured") == "batches of up to 8 rows, delay 0 us"
        with InferenceClient(server.target) as client, pytest.raises(InvalidArgument, match="1 to 5 rows, got 6"):
            client.infer("bare", {"INPUT0": rows_of_floats(6, 3)})


def test_flags_in_kserves_units_delay_and_bound_the_wait(repository: Path) -> None:
    """A single request would wait a minute for more requests, but the timeout is a twentieth of a second."""
    flags = ["--max-batchsize", "6", "--max-latency", "60000", "--timeout", "0.05"]
    with ServerProcess(repository, args=flags) as server:
        assert loaded(server, "bare") == "batches of up to 6 rows, delay 60000000 us"
        with InferenceClient(server.target) as client:
            with pytest.raises(DeadlineExceeded, match="Request timeout expired"):
                client.infer("bare", {"INPUT0": rows_of_floats(1, 3)})
            full = rows_of_floats(6, 3)
            assert client.infer("bare", {"INPUT0": full})["OUTPUT0"].tolist() == full.tolist()
            one = rows_of_floats(1, 16)
            assert client.infer("configured", {"INPUT0": one})["OUTPUT0"].tolist() == one.tolist()


def test_flags_in_mlservers_units_may_come_from_the_environment(repository: Path) -> None:
    environment = {"PACELINE_MAX_BATCH_TIME": "0.0125", "PACELINE_MAX_BATCH_SIZE": "7"}
    with ServerProcess(repository, env=environment) as server:
        assert loaded(server, "bare") == "batches of up to 7 rows, delay 12500 us"


def test_defaults_of_the_flags_are_32_rows_and_no_delay(repository: Path) -> None:
    with ServerProcess(repository) as server:
        assert loaded(server, "bare") == "batches of up to 32 rows, delay 0 us"


@pytest.mark.parametrize(
    ("arguments", "environment"),
    [
        (["--max-latency", "1", "--max-batch-time", "1"], {}),
        (["--max-latency", "0", "--max-queue-delay-microseconds", "0"], {}),
        (["--max-batch-time", "1"], {"PACELINE_MAX_LATENCY": "1"}),
    ],
)
def test_flags_that_give_the_delay_in_two_units_are_refused(arguments: list[str], environment: dict[str, str]) -> None:
    assert "expected one of --max-queue-delay-microseconds, --max-latency and --max-batch-time, got several" in refusal(
        *arguments, **environment
    )


@pytest.mark.parametrize("flag", ["--max-latency", "--max-batch-time", "--timeout", "--exit-timeout-secs"])
@pytest.mark.parametrize("value", ["nan", "inf", "-1", "soon"])
def test_invalid_durations_are_refused_and_the_flag_is_named(flag: str, value: str) -> None:
    said = refusal(f"{flag}={value}")
    assert f"Invalid value for '{flag}': " in said
    assert value in said


@pytest.mark.parametrize("value", ["0", "-1", "many", "1.5"])
def test_invalid_numbers_of_rows_are_refused_and_the_flag_is_named(value: str) -> None:
    assert "Invalid value for '--max-batch-size' / '--max-batchsize': " in refusal(f"--max-batchsize={value}")
