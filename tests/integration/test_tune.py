"""`paceline tune` on real models: what it prints, what it writes, and which models and flags it refuses."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from paceline.clients.errors import NotFound
from paceline.clients.inputs import TypedInputs
from paceline.clients.options import ConnectionOptions
from paceline.clients.sync import InferenceClient
from paceline.protos import model_config_pb2 as pb
from paceline.server.cli import main
from paceline.server.engine import Engine
from paceline.server.tune.live import FEWEST, MUCH_OTHERS, serving
from paceline.server.tune.measuring import TuneError
from paceline.server.tune.observing import observed
from tests import models
from tests.harness import ServerProcess
from tests.unit.backends.length_models import encoder

PYTHON = """
class Model:
    inputs = {"x": ("FP32", [-1, 1])}
    outputs = {"y": ("FP32", [-1, 1])}

    def execute(self, inputs):
        return {"y": inputs["x"]}
"""
LOADS = "--rate, --clients, --arrivals, --from-server and --max-throughput"


def tune(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["tune", "--requests", "400", *map(str, arguments)])


def small(folder: Path, most_rows: int) -> Path:
    """A model of which little has to be tried."""
    models.write(models.mlp((64, 64, 8)), folder / "m" / "1" / "model.onnx")
    (folder / "m" / "config.pbtxt").write_text(f"max_batch_size: {most_rows} dynamic_batching {{ }}")
    return folder / "m"


def test_written_configuration_serves_as_it_was_chosen(tmp_path: Path) -> None:
    (tmp_path / "m" / "1").mkdir(parents=True)
    file = models.write(models.mlp((64, 64, 8)), tmp_path / "m" / "1" / "model.onnx")
    result = tune(file, "--clients", 8, "--no-verify", "--format", "json", "--out", tmp_path / "m" / "config.pbtxt")
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
    assert found["model"] == "model"
    assert asyncio.run(served()) == tuple(
        chosen[name] for name in ("max_batch_size", "max_queue_delay_microseconds", "instances")
    )


def test_target_that_cannot_be_met_is_told(tmp_path: Path) -> None:
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "1" / "model.py").write_text(PYTHON)
    flags = ("--rate", 100, "--p99", "1us", "--no-verify", "--allow-python-models")
    result = tune(tmp_path / "m", *flags)
    assert result.exit_code == 1, result.output
    assert "100 requests/s with p99 within 0.001 ms can't be met here: with the best setting, p99 is" in result.stdout
    assert "With less load it wouldn't, either, by prediction." in result.stdout
    assert "measuring the configured instances" in result.stderr
    assert "threads" not in result.stderr  # those are ONNX Runtime's


def test_best_settings_are_tried_on_servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Meant for another server, as these have no metrics; a repository of one model stands for that.
    monkeypatch.setenv("PACELINE_STATUS_PAGE", "true")
    small(tmp_path, 1)
    # One row at a time leaves nothing to choose but the layout.
    out = tmp_path / "config.pbtxt"
    result = tune(tmp_path, "--clients", 2, "--seconds", 0.2, "--format", "json", "--out", out)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    doubts = any(one["live"]["doubts"] for one in (found["now"], *found["best"][:3]))
    assert ("When tried, " in out.read_text()) == doubts
    for one in found["best"]:
        assert not one["failure"]
        assert one["live"]["clients"] == 2
        assert one["live"]["requests_per_s"] > 0
        assert one["live"]["rows_per_batch"] == 1
        (costs,) = one["costs"]
        # So short a time has nearly as many answers at its ends, of executions before or after it, as within.
        assert costs["requests_per_batch"] == pytest.approx(1, rel=0.5)
        assert costs["server_us"] > 0
        assert costs["sender_us"] > 0
    assert "trying the best settings on a server" in result.stderr


def test_executions_that_were_slowed_down_are_measured_again(tmp_path: Path) -> None:
    (tmp_path / "m" / "1").mkdir(parents=True)
    # The first ones of 2 and of 4 rows: so many that larger batches would seem to lose.
    slow = "        rows = len(inputs['x'])\n        seen[rows] += 1\n"
    slow += "        time.sleep(0.05 if rows in (2, 4) and seen[rows] <= 12 else 0.002)\n        return"
    seen = "import collections, time\nseen = collections.Counter()\n"
    (tmp_path / "m" / "1" / "model.py").write_text(seen + PYTHON.replace("        return", slow))
    (tmp_path / "m" / "config.pbtxt").write_text('backend: "python" max_batch_size: 8')
    result = tune(tmp_path / "m", "--clients", 1, "--no-verify", "--allow-python-models", "--format", "json")
    assert result.exit_code == 0, result.output
    measured_ms = json.loads(result.stdout)["best"][0]["measured_ms"]
    assert list(measured_ms) == ["1", "2", "4", "8"]
    assert max(measured_ms.values()) < 20


def test_slow_executions_are_waited_for(tmp_path: Path) -> None:
    (tmp_path / "m" / "1").mkdir(parents=True)
    slow = PYTHON.replace("        return", "        time.sleep(0.05)\n        return")
    (tmp_path / "m" / "1" / "model.py").write_text(f"import time\n{slow}")
    request = TypedInputs({"x": np.zeros((1, 1), np.float32)}, {"x": "FP32"})
    config = pb.ModelConfig(backend="python", max_batch_size=1)
    with serving(tmp_path / "m", config, [request], ["--allow-python-models=true"]) as server:
        live = server.load(0.2, clients=1)
    assert live.latencies.count >= FEWEST
    assert live.seconds == pytest.approx(0.2 * round(live.seconds / 0.2))
    assert live.throughput <= 20
    assert any("others had" in doubt for doubt in live.doubts) == (live.others > MUCH_OTHERS)


def test_most_that_can_be_served_is_found(tmp_path: Path) -> None:
    # Texts, which nothing else here has.
    models.write(models.identity("BYTES", ("batch", 1)), tmp_path / "m" / "1" / "model.onnx")
    (tmp_path / "m" / "config.pbtxt").write_text("max_batch_size: 2 dynamic_batching { }")
    result = tune(tmp_path / "m", "--max-throughput", "--p99", "1s", "--no-verify", "--format", "json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["goal"]["most"]
    assert found["best"][0]["most"] > found["goal"]["rate"]


def test_load_of_a_running_server_is_read(tmp_path: Path) -> None:
    models.write(models.mlp((4, 4)), tmp_path / "m" / "1" / "model.onnx")
    over = threading.Event()
    with ServerProcess(tmp_path) as server, ThreadPoolExecutor() as pool, InferenceClient(server.target) as client:
        with pytest.raises(TuneError, match="answered no request for 'm'"):
            observed(server.target, ConnectionOptions(), "m", 0.0)
        with pytest.raises(NotFound, match="'other'"):
            observed(server.target, ConnectionOptions(), "other", 0.0)
        answered = threading.Event()

        def ask() -> None:
            while not over.is_set():
                client.infer("m", {"INPUT0": np.zeros((3, 4), np.float32)})
                answered.set()

        asking = pool.submit(ask)
        assert answered.wait(30)
        found, nothing = None, ""
        for between_s in (0.2, 2.0, 20.0):  # longer if the machine stood still meanwhile
            try:
                found = observed(server.target, ConnectionOptions(), "m", between_s)
                break
            except TuneError as error:
                nothing = str(error)
        over.set()
        asking.result()
    assert found is not None, nothing
    assert found.per_s > 0
    assert found.rows == 3


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "expected one of --rate, --clients, --arrivals, --from-server and --max-throughput"),
        (
            ("--rate", "10", "--clients", "3"),
            "expected one of --rate, --clients, --arrivals, --from-server and --max-throughput",
        ),
        (("--rate", "nan"), "--rate: expected a number, got nan"),
        (("--rate", "1e300"), "is not in the range"),
        (("--rate", "1e-300"), "is not in the range"),
        (("--clients", "9999999"), "is not in the range"),
        (("--rate", "10", "--requests", "9999999999"), "is not in the range"),
        (("--rate", "10", "--p99", "9" * 400 + "s"), "expected a time such as 20ms, 0.5s or 800us"),
        (("--arrivals", os.devnull), "no arrivals"),
        (("--rate", "10", "--p99", "20"), "expected a time such as 20ms, 0.5s or 800us, got '20'"),
        (("--rate", "10", "--out", "nowhere/config.pbtxt"), "expected a file that can be written"),
        (("--rate", "10", "--out", ""), "--out .: expected a file that can be written"),
        (("--rate", "10", "--html", ""), "--html .: expected a file that can be written"),
        (("--rate", "10", "--shape", "x"), "--shape"),
        (
            ("--rate", "0.1", "--shape", "INPUT0=1,4"),
            "got 0.1 a second in --seconds 5: give --seconds 100, or --no-verify",
        ),
        (("--rate", "0.001", "--shape", "INPUT0=1,4"), "got 0.001 a second in --seconds 5: give --no-verify, as"),
        (("--rate", "10"), "input 'INPUT0' has more free dimensions: give --shape INPUT0=1,N"),
    ],
)
def test_flags_that_cannot_be_used_are_refused(tmp_path: Path, arguments: tuple[str, ...], said: str) -> None:
    file = models.write(models.identity("FP32", ("batch", "length")), tmp_path / "m.onnx")
    result = tune(file, *arguments)
    assert result.exit_code == 2
    assert said in result.stderr


def test_recorded_texts_of_any_length_are_tuned_for(tmp_path: Path) -> None:
    (tmp_path / "m" / "1").mkdir(parents=True)
    models.write(encoder("pooled"), tmp_path / "m" / "1" / "model.onnx")
    (tmp_path / "m" / "config.pbtxt").write_text("max_batch_size: 2 dynamic_batching {}")
    recorded = [
        {"at_s": number / 20, "shapes": dict.fromkeys(("ids", "mask"), (1, 4 + number))} for number in range(30)
    ]
    (tmp_path / "arrivals").write_text("\n".join(map(json.dumps, recorded)))
    page = tmp_path / "page.html"
    result = tune(
        tmp_path / "m", "--arrivals", tmp_path / "arrivals", "--no-verify", "--format", "json", "--html", page
    )
    assert result.exit_code == 0, result.output
    goal = json.loads(result.stdout)["goal"]
    assert (goal["recorded"], goal["rate"], goal["rows"]) == (30, pytest.approx(20), 1)
    assert "A row&#x27;s size goes from 4 to 33 elements." in page.read_text()


def test_folder_of_models_and_shapes_of_others_are_refused(tmp_path: Path) -> None:
    for name in ("a", "b"):
        models.write(models.mlp((4, 4)), tmp_path / name / "1" / "model.onnx")
    for arguments, said in (
        ((tmp_path,), "expected one model, got a, b"),
        ((tmp_path / "a", "--shape", "INPUT0=1,5"), "expected [-1, 4], got [1, 5]"),
    ):
        result = tune(*arguments, "--rate", 10)
        assert result.exit_code == 2
        assert said in result.stderr


def test_ensemble_alone_names_what_can_be_tuned(tmp_path: Path) -> None:
    (tmp_path / "e" / "1").mkdir(parents=True)
    (tmp_path / "e" / "config.pbtxt").write_text(
        'platform: "ensemble" ensemble_scheduling { step { model_name: "a" } }'
    )
    result = tune(tmp_path / "e", "--rate", 10)
    assert result.exit_code == 2
    assert "model 'e' can't be tuned: it is an ensemble; tune the models of its steps: a\n" in result.stderr


@pytest.mark.parametrize(
    ("content", "flags", "said"),
    [
        (None, ("--rate", 10), "no version to load"),
        (b"junk", ("--rate", 10), "failed to load"),
        (b"junk", ("--from-server", "127.0.0.1:1"), "failed to connect"),
    ],
)
def test_what_cannot_be_tuned_is_no_answer(
    tmp_path: Path, content: bytes | None, flags: tuple[object, ...], said: str
) -> None:
    (tmp_path / "m" / "1").mkdir(parents=True)
    if content is not None:
        (tmp_path / "m" / "1" / "model.onnx").write_bytes(content)
    result = tune(tmp_path / "m", *flags)
    assert result.exit_code == 2  # 1 says that the load can't be served as asked for
    assert said in result.stderr.splitlines()[-1]


def test_requests_larger_than_any_batch_are_refused(tmp_path: Path) -> None:
    file = models.write(models.mlp((4, 4)), tmp_path / "m.onnx")
    for rows in (100, 100_000_000_000):
        result = tune(file, "--rate", 10, "--rows", rows)
        assert result.exit_code == 2
        # `--from-server` may be where the number is from.
        assert f"Error: the load's requests: expected a batch of 1 to 32 rows, got {rows}\n" in result.stderr
    result = tune(file, "--rate", 10, "--shape", "INPUT0=100,4")
    assert result.exit_code == 2
    assert "expected a batch of 1 to 32 rows, got 100" in result.stderr


def test_failure_while_measuring_is_the_models_own(tmp_path: Path) -> None:
    # Integers up to 9 are made up, and the table has four places.
    result = tune(models.write(models.gather(), tmp_path / "m.onnx"), "--rate", 10)
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1].startswith("Error: onnx runtime error")
    assert result.stderr.endswith("(from model 'm', measured with made-up inputs)\n")
