"""`paceline load` as click runs it, with its process, against a scripted peer."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from click.testing import CliRunner, Result

from paceline.clients.load.command import load
from paceline.protos import inference_pb2 as pb
from tests.ports import free_port
from tests.unit.clients.peer import Peer, echo, refuse, serving
from tests.unit.clients.sequence_peer import Talking, answer, final

Run = Callable[..., Result]


@pytest.fixture
def run(peer: Peer) -> Run:
    peer.takes(x=("FP32", [-1, 2]))
    return lambda *arguments: CliRunner().invoke(load, ["m", "--server", peer.target, *arguments])


def sent(peer: Peer) -> list[pb.ModelInferRequest]:
    return [one for one in peer.requests if isinstance(one, pb.ModelInferRequest)]


def test_page_that_cannot_be_written_is_named(run: Run) -> None:
    result = run("--count", "1", "--html", "/dev/full")
    said = "Error: --html /dev/full can't be written: No space left on device\n"
    assert (result.exit_code, result.stderr) == (2, said)
    assert "errors        0 of 1 requests" in result.stdout


class Forgetful(Peer):
    """Knows nothing of shared memory any more, as one that was started anew, or has ended."""

    def SystemSharedMemoryRegister(
        self, request: pb.SystemSharedMemoryRegisterRequest, context: grpc.ServicerContext
    ) -> pb.SystemSharedMemoryRegisterResponse:
        return pb.SystemSharedMemoryRegisterResponse()


def test_figures_are_told_though_the_server_has_gone() -> None:
    with serving(Forgetful()) as peer:
        peer.takes(x=("FP32", [-1, 2]))
        result = CliRunner().invoke(load, ["m", "--server", peer.target, "--count", "1", "--shared-memory"])
    assert (result.exit_code, result.stderr) == (0, "")
    assert "errors        0 of 1 requests" in result.stdout


class Decoupled(Forgetful):
    """Answers as often as the request has rows, and says that it is done only if it is asked to."""

    def ModelStreamInfer(
        self, requests: Iterator[pb.ModelInferRequest], context: grpc.ServicerContext
    ) -> Iterator[pb.ModelStreamInferResponse]:
        for request in requests:
            for _ in range(request.inputs[0].shape[0]):
                yield answer(request)
            if request.parameters["triton_enable_empty_final_response"].bool_param:
                yield final(pb.ModelStreamInferResponse(infer_response={"id": request.id}))


@pytest.mark.parametrize("rows", [1, 3])
def test_outputs_of_many_answers_have_room_in_shared_memory(rows: int) -> None:
    with serving(Decoupled()) as peer:
        peer.takes(x=("FP32", [-1, 2]))
        flags = ("--count", "1", "--stream", "--shared-memory", "--rows", str(rows))
        result = CliRunner().invoke(load, ["m", "--server", peer.target, *flags])
    assert (result.exit_code, result.stderr) == (0, "")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_making_up_many_requests_is_shown(peer: Peer) -> None:
    peer.takes(x=("FP32", [-1, 2]))
    with redirect_stderr(Terminal()) as terminal, pytest.raises(SystemExit, match="0"):
        load.main(["m", "--server", peer.target, "--count", "1", "--distinct", "2000"])
    assert terminal.getvalue().startswith("\r1000 requests prepared\x1b[K\r2000 requests prepared\x1b[K\r\x1b[K")


def test_load_of_a_count_prints_its_figures(run: Run, peer: Peer) -> None:
    result = run("--count", "20", "--clients", "3", "--rows", "2", "--parameter", "priority=2", "--output", "x")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.startswith(f"m on {peer.target}: 3 clients\n\nmeasured      20 requests in ")
    assert "errors        0 of 20 requests" in result.stdout
    assert len(sent(peer)) == 20
    assert {tuple(one.inputs[0].shape) for one in sent(peer)} == {(2, 2)}
    assert {one.parameters["priority"].int64_param for one in sent(peer)} == {2}
    assert {one.outputs[0].name for one in sent(peer)} == {"x"}
    assert len({one.raw_input_contents[0] for one in sent(peer)}) == 20


def test_same_seed_sends_the_same_requests(run: Run, peer: Peer) -> None:
    found = []
    for seed in ("1", "1", "2"):
        peer.requests.clear()
        assert run("--count", "5", "--seed", seed).exit_code == 0
        found.append([one.raw_input_contents[0] for one in sent(peer)])
    assert found[0] == found[1] != found[2]


def test_given_inputs_and_requests_of_a_file_are_sent(run: Run, peer: Peer, tmp_path: Path) -> None:
    peer.takes(x=("FP32", [-1, 2]), y=("INT64", [1]))
    lines = [json.dumps({"x": [[number, number]]}) for number in range(3)]
    (tmp_path / "requests.jsonl").write_text("\n".join(lines))
    assert run("--requests", str(tmp_path / "requests.jsonl"), "--input", "y=[5]", "--count", "6").exit_code == 0
    found = [np.frombuffer(one.raw_input_contents[1], "<f4")[0] for one in sent(peer)]
    assert found == [0, 1, 2, 0, 1, 2]
    assert {one.raw_input_contents[0] for one in sent(peer)} == {(5).to_bytes(8, "little")}


def test_unusable_request_of_a_file_is_named_by_its_line(run: Run, tmp_path: Path) -> None:
    (tmp_path / "requests.jsonl").write_text('{"x": [[1, 2]]}\n{"x": [[1, "a"]]}\n')
    result = run("--requests", str(tmp_path / "requests.jsonl"), "--count", "2")
    assert (result.exit_code, result.stderr) == (
        2,
        "Error: --requests, line 2: input 'x': FP32 takes numbers, got 'a'\n",
    )


def test_model_with_states_is_loaded_with_sequences(run: Run, peer: Peer) -> None:
    said = "inference request to model 'm' must specify a non-zero or non-empty correlation ID"
    peer.answer = refuse(grpc.StatusCode.INVALID_ARGUMENT, said)
    assert run("--count", "1").stderr.endswith(f"{said} (send sequences, as with --sequence-length 5..20)\n")


def test_stream_that_fails_with_few_words_gets_advice() -> None:
    def script(request: pb.ModelInferRequest, context: grpc.ServicerContext) -> Iterator[pb.ModelStreamInferResponse]:
        raise KeyError(request.model_name)  # as some servers do, which then say no more than that
        yield

    with serving(Talking()) as peer:
        assert isinstance(peer, Talking)
        peer.takes(x=("FP32", [-1, 2]))
        peer.script = script
        result = CliRunner().invoke(load, ["m", "--server", peer.target, "--count", "1", "--stream"])
    assert "every request failed: UNKNOWN: " in result.stderr
    assert "try without --stream)" in result.stderr


def test_recorded_arrivals_have_their_shapes(run: Run, peer: Peer, tmp_path: Path) -> None:
    lines = [json.dumps({"at_s": at_s, "shapes": {"x": [rows, 2]}}) for at_s, rows in ((7, 3), (7.05, 1), (7.1, 3))]
    (tmp_path / "arrivals.jsonl").write_text("\n".join(lines))
    result = run("--arrivals", str(tmp_path / "arrivals.jsonl"), "--format", "json")
    assert result.exit_code == 0, result.stderr
    # In any order: they go together if the process that sends them stands still.
    assert sorted(one.inputs[0].shape[0] for one in sent(peer)) == [1, 3, 3]
    found = json.loads(result.stdout)
    assert (found["requests"], found["errors"]) == (3, {})
    assert found["generator"]["lag_ms"] is not None


def test_assertion_that_fails_ends_with_status_1(run: Run) -> None:
    held = run("--count", "3", "--assert", "errors==0", "--assert", "requests>=3")
    assert held.exit_code == 0
    assert "holds  requests>=3  (got 3)" in held.stdout
    failed = run("--count", "3", "--assert", "errors==0", "--assert", "requests>3")
    assert failed.exit_code == 1
    assert "FAILS  requests>3  (got 3)" in failed.stdout


def test_errors_are_told_with_a_reason_on_one_line(run: Run, peer: Peer) -> None:
    peer.answer = refuse(grpc.StatusCode.INVALID_ARGUMENT, "bad\n\x1b[2Jthing")
    result = run("--count", "2", "--assert", "errors==0")
    assert result.exit_code == 1
    assert "INVALID_ARGUMENT 2, after " in result.stdout
    assert ": bad ?[2Jthing\n" in result.stdout


def test_load_of_which_all_fails_ends_with_status_1(run: Run, peer: Peer) -> None:
    peer.answer = refuse(grpc.StatusCode.INVALID_ARGUMENT)
    # A second of these errors ends it. Three windows would take fifteen.
    result = run("--clients", "4", "--warmup", "0", "--window", "5", "--max-windows", "3")
    assert (result.exit_code, result.stderr) == (1, "Error: every request failed: INVALID_ARGUMENT: scripted\n")
    assert "windows" not in result.stdout
    over_streams = run("--count", "2", "--stream")  # which the peer doesn't have
    assert over_streams.exit_code == 1
    assert "every request failed: the server has no ModelStreamInfer" in over_streams.stderr


def test_recording_whose_begin_fails_is_sent_all(run: Run, peer: Peer, tmp_path: Path) -> None:
    # A second of these errors ends a load that goes round.
    answers = chain(repeat(refuse(grpc.StatusCode.INVALID_ARGUMENT), 11), repeat(echo))
    peer.answer = lambda request, context: next(answers)(request, context)
    lines = [json.dumps({"at_s": tenth / 10}) for tenth in (*range(11), 14)]
    (tmp_path / "arrivals.jsonl").write_text("\n".join(lines))
    result = run("--arrivals", str(tmp_path / "arrivals.jsonl"), "--assert", "requests==12", "--assert", "errors==11")
    assert result.exit_code == 0, result.output


def test_page_is_written_beside_the_output(run: Run, tmp_path: Path) -> None:
    result = run("--count", "5", "--html", str(tmp_path / "page.html"), "--format", "json")
    assert json.loads(result.stdout)["requests"] == 5
    assert (tmp_path / "page.html").read_text(encoding="utf-8").startswith("<!doctype html>")


def test_page_is_written_though_nobody_reads_the_output(peer: Peer, tmp_path: Path) -> None:
    peer.takes(x=("FP32", [-1, 2]))
    reading, writing = os.pipe()
    os.close(reading)
    arguments = ["m", "--server", peer.target, "--count", "5", "--html", str(tmp_path / "page.html")]
    with pytest.raises(BrokenPipeError), os.fdopen(writing, "w") as out, redirect_stdout(out):
        load.main(arguments, standalone_mode=False)
    assert (tmp_path / "page.html").read_text(encoding="utf-8").startswith("<!doctype html>")


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (["--clients", "2", "--rate", "5"], "--clients, --rate and --arrivals: expected one of them"),
        (["--constant"], "--constant needs --rate"),
        (["--speed", "2"], "--speed needs --arrivals"),
        (["--seconds", "1", "--count", "1"], "--seconds can't be combined with --count"),
        (["--count", "1", "--warmup", "1"], "--warmup can't be combined"),
        (["--processes", "2"], "--processes 2: expected at most as many as there are clients"),
        (["--text", "a", "--input", "x=[1]"], "--text can't be combined"),
        (["--text", "a"], "model 'm' has no input 'text_input'; it has x"),
        (["--shared-memory", "--sequence-length", "2"], "--shared-memory can't be combined"),
        (["--sequence-length", "5..2"], "expected a number like 10, or a range like 5..20"),
        (["--html", "/proc/page.html"], "expected a file that can be written"),
        (["--assert", "p99<20"], "expected a time with its unit"),
        (["--input", "z=[1]"], "has no input 'z'"),
        (["--shape", "x=1,2,3..2"], "expected NAME=1,2,3"),
        (["--warmup", "nan"], "expected a number of seconds, got nan"),
        (["--rate", "nan"], "--rate: expected a number, got nan"),
        (["--rate", "inf"], "is not in the range"),
        (["--rate", "1e-300"], "is not in the range"),
        (["--rate", "9", "--processes", "9999999"], "is not in the range"),
        (["--connections", "9999999"], "is not in the range"),
        (["--distinct", "9999999999"], "is not in the range"),
        (["--tolerance", "nan"], "--tolerance: expected a number, got nan"),
        (["--seconds", "0.0001"], "is not in the range"),
        (["--clients", "100000000"], "is not in the range"),
        (["--html", ""], "expected a file that can be written"),
    ],
)
def test_options_that_cannot_be_used_are_refused_before_anything_is_sent(
    run: Run, peer: Peer, arguments: list[str], fault: str
) -> None:
    result = run(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert fault in " ".join(result.stderr.split())
    assert sent(peer) == []


@pytest.mark.parametrize(("text", "fault"), [("{", "not JSON"), ("", "no arrivals"), ('{"at_s": "x"}', "at_s")])
def test_arrivals_that_are_none_are_refused(run: Run, tmp_path: Path, text: str, fault: str) -> None:
    (tmp_path / "arrivals.jsonl").write_text(text)
    result = run("--arrivals", str(tmp_path / "arrivals.jsonl"))
    assert result.exit_code == 2
    assert fault in result.stderr


def test_no_deadline_at_all_is_none_that_has_passed(run: Run) -> None:
    result = run("--count", "1", "--timeout", "inf", "--assert", "errors==0")
    assert result.exit_code == 0, result.stdout


def test_file_that_is_no_text_is_told_so(run: Run, tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    result = run("--arrivals", str(tmp_path / "binary"))
    assert result.exit_code == 2
    assert result.stderr.startswith("Error: expected a file of text in UTF-8: ")


def test_room_for_outputs_is_measured_over_streams() -> None:
    class Sharing(Talking):
        def SystemSharedMemoryRegister(self, request: Any, context: grpc.ServicerContext) -> Any:
            self.size_bytes = request.byte_size
            return pb.SystemSharedMemoryRegisterResponse()

        def SystemSharedMemoryUnregister(self, request: Any, context: grpc.ServicerContext) -> Any:
            return pb.SystemSharedMemoryUnregisterResponse()

    def script(request: pb.ModelInferRequest, context: grpc.ServicerContext) -> Iterator[pb.ModelStreamInferResponse]:
        for size, message in ((8, answer(request)), (4, final(answer(request)))):
            message.infer_response.outputs.add(name="empty", datatype="FP32", shape=[0])
            message.infer_response.raw_output_contents[:] = [bytes(size)] * len(request.raw_input_contents) + [b""]
            yield message

    with serving(Sharing()) as peer:
        assert isinstance(peer, Sharing)
        peer.takes(x=("FP32", [-1, 2]))
        peer.script = script
        options = ["--stream", "--shared-memory", "--count", "3", "--distinct", "1", "--assert", "errors==0"]
        result = CliRunner().invoke(load, ["m", "--server", peer.target, *options])
    assert result.exit_code == 0, result.output
    _, *loaded = sent(peer)
    places = [
        [one.parameters[f"shared_memory_{key}"].int64_param for key in ("offset", "byte_size")]
        for request in loaded
        for one in request.outputs
    ]
    assert places == [[8, 8], [16, 0]] * 3
    assert peer.size_bytes > 16  # servers refuse an offset that isn't within the region


def test_server_that_tells_nothing_is_soon_waited_for_no_more() -> None:
    class Quiet(Peer):
        def ModelStatistics(self, request: pb.ModelStatisticsRequest, context: grpc.ServicerContext) -> Any:
            self._note(request, context)
            context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "as if it took too long")

    with serving(Quiet()) as peer:
        peer.takes(x=("FP32", [-1, 2]))
        result = CliRunner().invoke(load, ["m", "--server", peer.target, "--count", "3"])
    assert result.exit_code == 0
    assert "\nserver        tells no statistics\n" in result.stdout
    asked = [(type(one), left_s) for one, left_s in zip(peer.requests, peer.time_left_s, strict=True)]
    bounds_s = [(kind, left_s) for kind, left_s in asked if kind is not pb.ModelInferRequest]
    assert [kind for kind, _ in bounds_s] == [pb.ModelMetadataRequest, pb.ModelStatisticsRequest]
    assert all(left_s is not None and left_s < most_s for (_, left_s), most_s in zip(bounds_s, (11, 6), strict=True))


def test_server_that_is_not_there_is_told_in_one_line() -> None:
    result = CliRunner().invoke(load, ["m", "--server", f"127.0.0.1:{free_port()}", "--count", "1"])
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("Error: UNAVAILABLE")
    assert len(result.stderr.splitlines()) == 1
