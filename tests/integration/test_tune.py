"""`paceline tune` on real models: what it prints, what it writes, and which models and flags it refuses."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from paceline.server.cli import main
from paceline.server.engine import Engine
from tests import models


def tune(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["tune", *map(str, arguments)])


def test_written_configuration_serves_as_it_was_chosen(tmp_path: Path) -> None:
    (tmp_path / "m" / "1").mkdir(parents=True)
    file = models.write(models.mlp((64, 64, 8)), tmp_path / "m" / "1" / "model.onnx")
    result = tune(file, "--clients", 8, "--format", "json", "--out", tmp_path / "m" / "config.pbtxt")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["goal"]["clients"] == 8
    assert found["best"][0]["requests_per_s"] > 0
    assert found["best"][0]["measured_ms"]["1"] > 0

    async def served() -> tuple[int, int, int]:
        async with Engine(tmp_path / "m") as engine:
            one = engine.find("m", "")
            policy = one.batcher.policy
            return policy.max_batch_rows, policy.max_queue_delay_ns // 1_000, len(one.instances.runners)

    chosen = found["best"][0]
    assert asyncio.run(served()) == tuple(
        chosen[name] for name in ("max_batch_size", "max_queue_delay_microseconds", "instances")
    )


def test_target_that_cannot_be_met_is_told(tmp_path: Path) -> None:
    result = tune(models.write(models.mlp((64, 64, 8)), tmp_path / "m.onnx"), "--rate", 100, "--p99", "1us")
    assert result.exit_code == 1
    assert "100 requests/s with p99 within 0.001 ms can't be met here: at best, p99 is" in result.stdout
    assert "measuring 1 instance" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "expected one of --rate, --clients and --arrivals"),
        (("--rate", "10", "--clients", "3"), "expected one of --rate, --clients and --arrivals"),
        (("--rate", "10", "--p99", "20"), "expected a time such as 20ms, 0.5s or 800us, got '20'"),
        (("--rate", "10", "--out", "nowhere/config.pbtxt"), "expected a file that can be written"),
        (("--rate", "10", "--shape", "x"), "--shape"),
        (("--rate", "10"), "input 'INPUT0' has more free dimensions: give --shape INPUT0=1,N"),
    ],
)
def test_flags_that_cannot_be_used_are_refused(tmp_path: Path, arguments: tuple[str, ...], said: str) -> None:
    file = models.write(models.identity("FP32", ("batch", "length")), tmp_path / "m.onnx")
    result = tune(file, *arguments)
    assert result.exit_code == 2
    assert said in result.stderr


def test_requests_larger_than_any_batch_are_refused(tmp_path: Path) -> None:
    file = models.write(models.mlp((4, 4)), tmp_path / "m.onnx")
    result = tune(file, "--rate", 10, "--rows", 100)
    assert result.exit_code == 1
    assert "expected a batch of 1 to 32 rows, got 100" in result.stderr
