"""The command `infer` with --text and --stream, against a scripted peer."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import grpc
import pytest
from click.testing import CliRunner, Result

from paceline.clients.cli import infer
from paceline.protos import inference_pb2 as pb
from tests.harness import REPO
from tests.unit.clients.peer import serving
from tests.unit.clients.sequence_peer import Talking, answer, final
from tests.unit.clients.test_generate import VLLM, message, sent

Run = Callable[..., Result]
STORY = ("Onc", "e\x1b[2J\tup", "on\n\u3000a time")


@pytest.fixture
def peer() -> Iterator[Talking]:
    with serving(Talking()) as served:
        assert isinstance(served, Talking)
        first, second, last = (part.encode() for part in STORY)
        served.script = lambda request, context: iter(
            [
                message(text_output=first, output_ids=1),
                message(text_output=second, output_ids=2),
                final(message({"finish_reason": "stop"}, text_output=last)),
            ]
        )
        served.takes(**VLLM)
        yield served


@pytest.fixture
def run(peer: Talking) -> Run:
    return lambda *arguments: CliRunner().invoke(infer, ["m", "--server", peer.target, *arguments])


@pytest.mark.parametrize("more", [[], ["--stream"]], ids=["whole", "stream"])
def test_text_is_printed_without_what_moves_the_cursor(run: Run, peer: Talking, more: list[str]) -> None:
    result = run("--text", "Tell", "--parameter", 'stop=["x", "y"]', "--parameter", "max_tokens=5", *more)
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == "Once?[2J\tupon\n\u3000a time\n"
    inputs, _ = sent(peer)
    assert inputs["text_input"] == ("BYTES", "Tell")
    assert json.loads(inputs["sampling_parameters"][1]) == {"stop": ["x", "y"], "max_tokens": 5}


def test_text_in_json_is_a_line_for_each_answer(run: Run) -> None:
    whole = run("--text", "Tell", "--format", "json")
    assert json.loads(whole.stdout) == {"text": "".join(STORY), "token_ids": [1, 2], "finish_reason": "stop"}
    each = [json.loads(line) for line in run("--text", "Tell", "--format", "json", "--stream").stdout.splitlines()]
    assert [one["text"] for one in each] == [*STORY]
    assert [one["finish_reason"] for one in each] == [None, None, "stop"]


def test_stream_prints_each_answer_of_any_model(run: Run, peer: Talking) -> None:
    peer.takes(x=("FP32", [-1]))
    peer.script = lambda request, context: iter([answer(request), final(answer(request))])
    result = run("--input", "x=[1.5]", "--stream", "--format", "json")
    assert [json.loads(line)["outputs"][0]["data"] for line in result.stdout.splitlines()] == [[1.5], [1.5]]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--text", "a", "--input", "x=[1]"], "--text can't be combined with --input"),
        (["--text", "a", "--repeat", "2"], "--text can't be combined with"),
        (["--text", "a", "--parameter", "stop=[[1]]", "--parameter", "model=b"], "--parameter: "),
        (["--input", "x=[1]", "--stream", "--repeat", "2"], "--stream can't be combined with"),
    ],
)
def test_options_that_contradict_each_other_are_refused(run: Run, arguments: list[str], text: str) -> None:
    result = run(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert text in result.stderr
    assert result.stderr.count("\n") == 1


def test_error_after_some_text_is_on_a_line_of_its_own(run: Run, peer: Talking) -> None:
    failed = pb.ModelStreamInferResponse(error_message="no more")
    peer.script = lambda request, context: iter([message(text_output=b"Once"), failed])
    result = run("--text", "Tell", "--stream")
    assert (result.exit_code, result.stdout) == (1, "Once\n")
    assert "no more" in result.stderr


def test_interrupt_ends_the_generation_on_the_server(peer: Talking) -> None:
    ended = threading.Event()

    def endless(request: pb.ModelInferRequest, context: grpc.ServicerContext) -> Iterator[pb.ModelStreamInferResponse]:
        context.add_callback(ended.set)
        yield message(text_output=b"Once\n")
        ended.wait(60)

    peer.script = endless
    # A job in the background of a shell ignores interrupts, and so does what it starts.
    listening = "import runpy, signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    command = [sys.executable, "-c", f"{listening}runpy.run_module('paceline', run_name='__main__')"]
    command += ["infer", "m", "--server", peer.target, "--text", "Tell", "--stream"]
    with subprocess.Popen(command, cwd=REPO, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "Once\n"
        process.send_signal(signal.SIGINT)
        assert ended.wait(60)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 130
        assert not errors
