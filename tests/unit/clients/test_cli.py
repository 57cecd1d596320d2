"""The command `infer`, run as click runs it, against a scripted peer."""

from __future__ import annotations

import io
import json
import math
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import grpc
import numpy as np
import pytest
from click.testing import CliRunner, Result

from paceline.clients.cli import infer
from paceline.clients.report import progress_line
from paceline.protos import inference_pb2 as pb
from tests.harness import REPO
from tests.unit.clients.peer import Peer, echo, refuse

Run = Callable[..., Result]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def run(peer: Peer) -> Run:
    peer.takes(x=("FP32", [-1, 2]))
    return lambda *arguments: CliRunner().invoke(infer, ["m", "--server", peer.target, *arguments])


def sent(peer: Peer) -> pb.ModelInferRequest:
    (request,) = (each for each in peer.requests if isinstance(each, pb.ModelInferRequest))
    return request


def test_infer_json_text_prints_a_table(run: Run) -> None:
    result = run("--input", "x=[[1, 2.5]]")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == "m version 3\nx  FP32  [1, 2]\n[[1.  2.5]]\n"


def test_infer_each_kind_of_file_is_sent(run: Run, peer: Peer, tmp_path: Path) -> None:
    array = np.array([[1, 2], [3, 4]])
    np.save(tmp_path / "x.npy", array)
    np.savez(tmp_path / "x.npz", x=array)
    rest = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [2, 2], "data": [1, 2, 3, 4]}]}
    for name, document in {"list.json": array.tolist(), "plain.json": {"x": array.tolist()}, "rest.json": rest}.items():
        (tmp_path / name).write_text(json.dumps(document))
    for argument in ("x={}/x.npy", "{}/x.npz", "x={}/list.json", "{}/plain.json", "{}/rest.json"):
        peer.requests.clear()
        result = run("--input", argument.format(tmp_path))
        assert result.exit_code == 0, result.stderr
        assert sent(peer).inputs[0].datatype == "FP32"
        assert sent(peer).raw_input_contents[0] == array.astype("<f4").tobytes()


def test_infer_json_format_prints_the_rest_form(run: Run, peer: Peer) -> None:
    peer.takes(x=("FP32", [-1]), t=("BYTES", [-1]), b=("BF16", [-1]))
    result = run(
        "--input", "x=[1.5, NaN, -Infinity]", "--input", 't=["h\u00e9"]', "--input", "b=[2]", "--format", "json"
    )
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout) == {
        "model_name": "m",
        "model_version": "3",
        "id": "",
        "parameters": {},
        "outputs": [
            {"name": "x", "datatype": "FP32", "shape": [3], "data": [1.5, "NaN", "-Infinity"]},
            {"name": "t", "datatype": "BYTES", "shape": [1], "data": ["h\u00e9"]},
            {"name": "b", "datatype": "BF16", "shape": [1], "data": [2.0]},
        ],
    }


def test_infer_options_reach_the_server(run: Run, peer: Peer) -> None:
    deep, long = "[" * 100_000, "9" * 5_000
    result = run(
        *("--parameter", f"deep={deep}", "--parameter", f"long={long}"),
        *("--input", "x=[[1, 2]]", "--version", "4", "--output", "x", "--output", "y", "--timeout", "500"),
        *("--parameter", "priority=1", "--parameter", "tag=a=b", "--parameter", "on=true", "--parameter", "list=[1]"),
    )
    assert result.exit_code == 0, result.stderr
    request = sent(peer)
    assert request.model_version == "4"
    assert [output.name for output in request.outputs] == ["x", "y"]
    assert request.parameters["priority"].int64_param == 1
    assert request.parameters["tag"].string_param == "a=b"
    assert request.parameters["on"].bool_param is True
    assert request.parameters["list"].string_param == "[1]"
    assert request.parameters["deep"].string_param == deep
    assert request.parameters["long"].string_param == long
    assert 100 < min(left_s or 0 for left_s in peer.time_left_s) < 1000


def test_infer_answers_id_and_parameters_are_printed(run: Run, peer: Peer) -> None:
    def answer(request: pb.ModelInferRequest, context: grpc.ServicerContext) -> pb.ModelInferResponse:
        response = echo(request, context)
        response.id = "r7"
        response.parameters["rows"].int64_param = 4
        return response

    peer.answer = answer
    assert run("--input", "x=[[1, 2]]").stdout.splitlines()[:3] == ["m version 3", "id r7", "rows = 4"]


def test_infer_model_without_inputs_needs_none(run: Run, peer: Peer) -> None:
    peer.takes()
    result = run()
    assert (result.exit_code, result.stderr) == (0, "")
    assert not sent(peer).inputs


@pytest.mark.parametrize("shape", ["2000,2", "1,1000", "1,3,224,224", "4,4,4,4,4"])
def test_infer_long_output_is_a_few_values_unless_asked_for_all(run: Run, peer: Peer, shape: str) -> None:
    peer.takes(x=("INT32", [-1, -1]))
    few = run("--random", "--shape", f"x={shape}").stdout
    assert "..." in few
    assert len(few.splitlines()) < 12
    every = run("--random", "--shape", f"x={shape}", "--full").stdout
    assert "..." not in every
    assert len(every.split("\n", 2)[2].replace("[", " ").replace("]", " ").split()) == math.prod(
        map(int, shape.split(","))
    )


def test_infer_repeated_shows_progress_on_a_terminal_only(run: Run) -> None:
    assert run("--random", "--repeat", "3").stderr == ""
    terminal = Terminal()
    with progress_line(terminal, 8) as report:
        report(2, 10**9)
        report(8, 2 * 10**9)
    assert terminal.getvalue() == "\r2 of 8  2.0 requests/s\x1b[K\r8 of 8  4.0 requests/s\x1b[K\r\x1b[K"


def test_infer_random_uses_rows_shape_and_seed(run: Run, peer: Peer) -> None:
    peer.takes(x=("FP32", [-1, 2]), y=("INT64", [-1, -1]))
    outputs = {run("--random", "--rows", "3", "--shape", "y=1,4", "--seed", "7").stdout for _ in range(2)}
    assert len(outputs) == 1
    assert [list(tensor.shape) for tensor in peer.requests[-1].inputs] == [[3, 2], [1, 4]]


def test_infer_save_writes_an_archive_for_numpy(run: Run, peer: Peer, tmp_path: Path) -> None:
    peer.takes(file=("FP32", [-1]), t=("BYTES", [-1]))
    path = tmp_path / "out.npz"
    result = run("--input", "file=[1.5]", "--input", 't=["a", "bcd"]', "--save", str(path))
    assert result.exit_code == 0, result.stderr
    with np.load(path) as saved:
        np.testing.assert_array_equal(saved["file"], np.array([1.5], np.float32))
        assert saved["t"].tolist() == [b"a", b"bcd"]


@pytest.mark.parametrize("target", ["missing/out.npz", "out.npz"])
def test_infer_failed_save_is_one_line_and_exit_2(run: Run, peer: Peer, tmp_path: Path, target: str) -> None:
    peer.takes(t=("BYTES", [-1]))
    result = run("--input", 't=["a\\u0000"]', "--save", str(tmp_path / target))
    assert result.exit_code == 2
    assert len(result.stderr.splitlines()) == 1
    assert not (tmp_path / target).exists()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((), "no input: give --input or --random; model 'm' takes x FP32 [-1, 2], as in --input 'x=[[0, 0]]'\n"),
        (("--input", "x=[["), "input 'x': neither"),
        (("--input", "z=1"), "model 'm' has no input 'z'; it takes x"),
        (("--input", 'x="a"'), "input 'x': FP32 takes numbers"),
        (("--input", "x=1e300"), "input 'x': FP32 can't hold"),
        (("--input", "x=[1, -1e400]"), "-1e400: too large for FP64"),
        (("--random", "--save", "missing/out.npz"), "--save missing/out.npz: expected a file that can be written"),
        (("--input", "none.npz"), "none.npz: No such file"),
        (("--input", "x=1", "--rows", "2"), "need --random"),
        (("--random", "--shape", "x=a"), "--shape 'x=a'"),
        (("--random", "--shape", "y=1"), "--shape y: model 'm' has no such input, or it is already given; left to"),
        (("--random", "--shape", "x=1000000000,100000000"), "Unable to allocate"),
        (("--random", "--parameter", "k"), "--parameter 'k': expected KEY=VALUE"),
        (("--random", "--parameter", f"k={2**64}"), "parameter 'k'"),
        (("--random", "--repeat", "2", "--save", "o.npz"), "--save can't be combined"),
        (("--random", "--save", "o.txt"), "--save o.txt: expected a name that ends in .npz, the one format there is"),
        (("--random", "--concurrency", "2"), "--concurrency needs --repeat"),
        (("--sequence", "/proc/self/exe"), "expected a file of text in UTF-8"),
        (("--random", "--timeout", "nan"), "--timeout: expected a number of seconds, got nan"),
    ],
)
def test_infer_unusable_arguments_are_one_line_and_exit_2(
    run: Run, peer: Peer, arguments: tuple[str, ...], text: str
) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert len(result.stderr.splitlines()) == 1
    assert text in result.stderr
    assert result.stdout == ""
    assert not any(isinstance(request, pb.ModelInferRequest) for request in peer.requests)


def test_infer_error_of_the_server_is_one_line_and_exit_1(run: Run, peer: Peer) -> None:
    peer.answer = refuse(grpc.StatusCode.NOT_FOUND, "no model\n  'm'")
    result = run("--random")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == "Error: NOT_FOUND: no model 'm'\n"


@pytest.mark.parametrize(
    ("said", "hint"),
    [
        ("input 'x': expected a leading batch dimension, got shape []", "as in --input 'x=[[0, 0]]'"),
        ("must specify a non-zero or non-empty correlation ID", "give the steps of a sequence with --sequence"),
    ],
)
def test_infer_refusal_is_followed_by_what_to_do(run: Run, peer: Peer, said: str, hint: str) -> None:
    peer.answer = refuse(grpc.StatusCode.INVALID_ARGUMENT, said)
    assert f"{said} ({hint}" in run("--input", "x=1").stderr


def test_infer_control_characters_from_the_server_are_replaced(run: Run, peer: Peer) -> None:
    evil = "a\x1b[2J\r\x9b1m\u2028"

    def answer(request: pb.ModelInferRequest, context: grpc.ServicerContext) -> pb.ModelInferResponse:
        response = echo(request, context)
        response.model_name = response.id = response.outputs[0].name = evil
        response.parameters[evil].string_param = evil
        return response

    peer.answer = answer
    said = run("--random").stdout
    assert all(line.isprintable() for line in said.splitlines())
    assert said.count("a?[2J??1m?") == 5
    peer.answer = refuse(grpc.StatusCode.NOT_FOUND, evil)
    result = run("--random")
    assert result.stderr == "Error: NOT_FOUND: a?[2J ?1m\n"


def test_infer_with_a_closed_output_pipe_ends_without_a_message(peer: Peer) -> None:
    ours, theirs = os.pipe()
    os.close(ours)
    command = [sys.executable, "-m", "paceline", "infer", "m", "--server", peer.target]
    with open(theirs, "w") as pipe:
        done = subprocess.run(command, cwd=REPO, stdout=pipe, stderr=subprocess.PIPE, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (1, b"")


def test_infer_without_a_server_is_unavailable(run: Run) -> None:
    result = run("--random", "--server", "unix:/nonexistent/socket")
    assert result.exit_code == 1
    assert result.stderr.startswith("Error: UNAVAILABLE: ")
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize("timeout", ["inf", "1e10", "1e300"])
def test_infer_huge_timeout_is_no_bound(run: Run, timeout: str) -> None:
    assert run("--random", "--timeout", timeout).exit_code == 0


def test_infer_beyond_its_timeout_is_deadline_exceeded(run: Run, peer: Peer) -> None:
    over = threading.Event()

    def stalled(request: pb.ModelInferRequest, context: grpc.ServicerContext) -> pb.ModelInferResponse:
        context.add_callback(over.set)
        over.wait(60)
        return pb.ModelInferResponse()

    peer.answer = stalled
    assert run("--random", "--timeout", "0.2").stderr.startswith("Error: DEADLINE_EXCEEDED: ")


def test_infer_contradictory_answer_is_one_line(run: Run, peer: Peer) -> None:
    peer.answer = lambda request, context: pb.ModelInferResponse(model_name="m", raw_output_contents=[b""])
    result = run("--random")
    assert (result.exit_code, result.stderr) == (1, "Error: model 'm' answered with 0 outputs and data for 1\n")


def test_infer_repeat_prints_a_summary(run: Run, peer: Peer) -> None:
    result = run("--random", "--repeat", "20", "--concurrency", "4")
    assert result.exit_code == 0, result.stderr
    assert result.stdout.startswith("ok 20  errors 0  ")
    assert all(word in result.stdout for word in (" requests/s", "p50 ", "p90 ", "p99 "))
    assert sum(isinstance(request, pb.ModelInferRequest) for request in peer.requests) == 20


def test_infer_repeat_concurrency_has_so_many_requests_in_flight(run: Run, peer: Peer) -> None:
    # Each answer needs three requests in flight at once.
    together = threading.Barrier(3, timeout=30)

    def answer(request: pb.ModelInferRequest, context: grpc.ServicerContext) -> pb.ModelInferResponse:
        together.wait()
        return echo(request, context)

    peer.answer = answer
    assert run("--random", "--repeat", "6", "--concurrency", "3").stdout.startswith("ok 6  errors 0  ")


def test_infer_repeat_counts_errors_by_status_and_exits_1(run: Run, peer: Peer) -> None:
    numbers = iter(range(4))

    def answer(request: pb.ModelInferRequest, context: grpc.ServicerContext) -> pb.ModelInferResponse:
        odd = next(numbers) % 2
        return refuse(grpc.StatusCode.RESOURCE_EXHAUSTED)(request, context) if odd else echo(request, context)

    peer.answer = answer
    result = run("--random", "--repeat", "4", "--format", "json")
    assert result.exit_code == 1
    summary = json.loads(result.stdout)
    assert (summary["ok"], summary["errors"]) == (2, {"RESOURCE_EXHAUSTED": 2})
    assert summary["requests_per_second"] > 0
    assert 0 < summary["p50_ms"] <= summary["p90_ms"] <= summary["p99_ms"]


def test_infer_repeat_with_only_errors_has_no_percentiles(run: Run, peer: Peer) -> None:
    peer.answer = refuse(grpc.StatusCode.UNAVAILABLE)
    result = run("--random", "--repeat", "2")
    assert result.exit_code == 1
    assert result.stdout.startswith("ok 0  errors 2  UNAVAILABLE 2  0.0 requests/s")
    assert "p50" not in result.stdout


def test_infer_help_names_every_option() -> None:
    text = CliRunner().invoke(infer, ["--help"]).stdout
    for option in infer.params:
        assert option.opts[0] in text or option.name == "model"
