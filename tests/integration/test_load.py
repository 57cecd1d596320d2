"""`paceline load` on a real server: every kind of request, and figures that agree with what the server counted."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from click.testing import CliRunner

from paceline.clients.load.control import ControlClient
from paceline.clients.load.regions import in_shared_memory
from paceline.protos import inference_pb2 as pb
from paceline.protos.inference_pb2_grpc import GRPCInferenceServiceStub
from paceline.server.cli import main
from tests import decoder_models, models, state_models, text_models
from tests.decoder_models import TINY
from tests.fault.traffic import request
from tests.harness import REPO, ServerProcess, write_identity
from tests.nursery import Forked
from tests.polling import eventually

SUMS = """
max_batch_size: 8
sequence_batching {
  max_sequence_idle_microseconds: 60000000
  oldest { }
  state { input_name: "STATE" output_name: "STATE_OUT" }
}
"""


LIVE = 'paceline_sequences{model="sums",state="live",version="1"}'


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Models that echo, that add up sequences, and that generate after tokens and after texts."""
    folder = tmp_path_factory.mktemp("models")
    write_identity(folder)
    models.write(state_models.accumulator(dims=("batch", 1)), folder / "sums" / "1" / "model.onnx")
    (folder / "sums" / "config.pbtxt").write_text(SUMS)
    decoder_models.write(TINY, folder / "tiny" / "1")
    speaks = replace(TINY, vocabulary=320)
    text_models.write(text_models.byte_level(), decoder_models.write(speaks, folder / "speaks" / "1"))
    with ServerProcess(folder, args=["--allow-client-shm=true"]) as started:
        yield started


def loaded(server: ServerProcess, *arguments: str) -> Any:
    """What a load that ends well prints, as JSON."""
    result = CliRunner().invoke(main, ["load", "--server", server.target, "--format", "json", *arguments])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def succeeded(server: ServerProcess, model: str) -> float:
    """How many requests the server says that it has answered."""
    return server.metrics()[f'nv_inference_request_success{{model="{model}",version="1"}}']


@pytest.mark.parametrize("way", [(), ("--stream",), ("--shared-memory",), ("--connections", "3")], ids=" ".join)
def test_load_of_a_count_agrees_with_what_the_server_counted(server: ServerProcess, way: tuple[str, ...]) -> None:
    before = succeeded(server, "echo")
    found = loaded(server, "echo", "--clients", "6", "--processes", "2", "--count", "101", "--rows", "3", *way)
    assert (found["requests"], found["errors"]) == (101, {})
    # To learn how large its outputs are, each of the 64 different requests is sent once before.
    more = 64 if "--shared-memory" in way else 0
    eventually(
        lambda: succeeded(server, "echo") - before == 101 + more, "all requests, which are counted once answered"
    )
    assert 101 - 6 <= found["server"]["succeeded"] <= 101
    assert found["server"]["rows"] == 3 * found["server"]["succeeded"]
    assert found["server"]["failed"] == 0
    assert sum(found["server"]["batches_by_rows"].values()) == found["server"]["batches"] > 0
    assert found["server"]["means_ms"]["compute_infer"] > 0
    assert 0 < found["latency_ms"]["p50"] <= found["latency_ms"]["p99"] <= found["latency_ms"]["max"]


def regions(server: ServerProcess) -> list[Path]:
    """The files of the shared memory that the server knows."""
    with grpc.insecure_channel(server.target) as channel:
        stub: Any = GRPCInferenceServiceStub(channel)  # type: ignore[no-untyped-call]
        known = stub.SystemSharedMemoryStatus(pb.SystemSharedMemoryStatusRequest()).regions
    return [Path(f"/dev/shm{one.key}") for one in known.values()]


@pytest.mark.parametrize(("number", "count"), [(0, "40"), (signal.SIGINT, "9999"), (signal.SIGTERM, "9999")])
def test_load_in_shared_memory_leaves_none_behind(server: ServerProcess, number: int, count: str) -> None:
    answered = succeeded(server, "echo")
    load = ("load", "echo", "--server", server.target, "--rate", "20", "--count", count, "--distinct", "1")
    process = Forked("paceline", (*load, "--shared-memory"), {**os.environ}, REPO)
    # One request is sent before the load, to learn how large its outputs are.
    eventually(lambda: succeeded(server, "echo") > answered + 1, "requests of the load")
    (file,) = regions(server)
    assert file.exists()
    process.send_signal(number)
    with process.stderr as stderr:
        assert stderr.read() == ""
    assert process.wait(20) == (128 + number if number else 0)
    assert not regions(server)
    assert not file.exists()


class Interrupted(ControlClient):
    """A signal comes when the server has registered memory, and before it has said so."""

    file: Path

    def register(self, name: str, key: str, size_bytes: int) -> None:
        super().register(name, key, size_bytes)
        self.file = Path(f"/dev/shm{key}")
        assert self.file.exists()
        raise KeyboardInterrupt


def test_signal_while_memory_is_registered_leaves_none(server: ServerProcess) -> None:
    with Interrupted(server.target) as client, pytest.raises(KeyboardInterrupt):
        in_shared_memory(client, [request()]).__enter__()
    assert not regions(server)
    assert not client.file.exists()


def test_load_in_an_open_loop_sends_all_that_was_due(server: ServerProcess, tmp_path: Path) -> None:
    lines = [json.dumps({"at_s": number / 100}) for number in range(50)]
    (tmp_path / "arrivals.jsonl").write_text("\n".join(lines))
    found = loaded(server, "echo", "--arrivals", str(tmp_path / "arrivals.jsonl"), "--speed", "2", "--processes", "2")
    assert (found["requests"], found["errors"]) == (50, {})
    assert found["generator"]["lag_ms"]["p50"] > 0
    assert found["load"].endswith("arrivals.jsonl, 2 times as fast")


@pytest.mark.parametrize("way", [("--clients", "3"), ("--rate", "200"), ("--rate", "200", "--stream")], ids=" ".join)
def test_load_of_sequences_begins_and_ends_each(server: ServerProcess, way: tuple[str, ...]) -> None:
    before = succeeded(server, "sums")
    found = loaded(server, "sums", *way, "--sequence-length", "2..5", "--count", "20")
    assert found["errors"] == {}
    assert 40 <= found["requests"] <= 100
    eventually(lambda: succeeded(server, "sums") - before == found["requests"], "all steps")
    eventually(lambda: server.metrics()[LIVE] == 0, "the end of all sequences")


@pytest.mark.parametrize("way", [("--clients", "1"), ("--rate", "200", "--stream")], ids=" ".join)
def test_sequences_end_with_a_step_that_fails(server: ServerProcess, tmp_path: Path, way: tuple[str, ...]) -> None:
    # A step has one row.
    (tmp_path / "steps.jsonl").write_text('{"INPUT0": [[1]]}\n{"INPUT0": [[1], [2]]}\n')
    requests = ("--requests", str(tmp_path / "steps.jsonl"), "--sequence-length", "3", "--count", "4")
    found = loaded(server, "sums", *requests, *way)
    assert found["errors"]["INVALID_ARGUMENT"]["count"] == 4
    assert found["requests"] == 6
    eventually(lambda: server.metrics()[LIVE] == 0, "the end of all sequences")


@pytest.mark.parametrize("way", [("--seconds", "0.3"), ("--stream", "--rate", "20")], ids=" ".join)
def test_sequences_end_with_the_time_or_a_signal(server: ServerProcess, way: tuple[str, ...]) -> None:
    load = ("load", "sums", "--server", server.target, "--sequence-length", "999999", *way)
    process = Forked("paceline", load, {**os.environ}, REPO)
    if "--stream" in way:
        eventually(lambda: server.metrics()[LIVE] > 1, "sequences of the load")
        process.send_signal(signal.SIGINT)
    with process.stderr as stderr:
        assert stderr.read() == ""
    assert process.wait(20) == (130 if "--stream" in way else 0)
    # Those that stay are idle for too long after a minute.
    eventually(lambda: server.metrics()[LIVE] == 0, "the end of all sequences")


@pytest.mark.parametrize(
    ("model", "prompt"), [("tiny", ("--stream", "--input", "input_ids=[9,8,7]")), ("speaks", ("--text", "hello"))]
)
def test_load_of_generations_counts_their_tokens(server: ServerProcess, model: str, prompt: tuple[str, ...]) -> None:
    asked = [*prompt, "--parameter", "max_tokens=12", "--parameter", "min_tokens=12"]
    found = loaded(server, model, *asked, "--clients", "4", "--count", "8", "--assert", "token.p99<1000s")
    assert (found["requests"], found["errors"]) == (8, {})
    assert found["tokens_per_s"] * found["seconds"] == pytest.approx(96)
    assert found["first_answer_ms"]["max"] <= found["latency_ms"]["max"]
    assert found["per_token_ms"]["mean"] > 0


def test_load_until_windows_agree_ends_after_the_most(server: ServerProcess, tmp_path: Path) -> None:
    windows = ["--warmup", "0.2", "--window", "0.5", "--max-windows", "4", "--tolerance", "1e-9"]
    found = loaded(server, "echo", "--clients", "2", *windows, "--html", str(tmp_path / "page.html"))
    assert found["stable"] is False
    assert found["seconds"] == pytest.approx(1.5)
    assert found["doubts"][0].startswith("the windows don't agree")
    assert (
        found["latency_intervals_ms"]["p50"][0] <= found["latency_ms"]["p50"] <= found["latency_intervals_ms"]["p50"][1]
    )


def test_load_of_a_model_that_is_not_there_ends_with_status_1(server: ServerProcess) -> None:
    result = CliRunner().invoke(main, ["load", "nothing", "--server", server.target, "--count", "1"])
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("Error: NOT_FOUND")
