"""The command `infer` with a sequence from a file, and with models that answer more than once."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from click.testing import CliRunner, Result

from paceline.clients.cli import infer
from paceline.protos import inference_pb2 as pb
from tests.unit.clients.peer import Peer, echo, serving
from tests.unit.clients.sequence_peer import Sums, Talking, flags

Run = Callable[..., Result]


@pytest.fixture
def run(peer: Peer) -> Run:
    peer.takes(x=("FP32", [1]))
    peer.answer = Sums()
    return lambda *arguments, **more: CliRunner().invoke(infer, ["m", "--server", peer.target, *arguments], **more)


@pytest.fixture
def steps(tmp_path: Path) -> Path:
    path = tmp_path / "steps.jsonl"
    rest = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1], "data": [3]}]}
    path.write_text(f'{{"x": [1]}}\n\n{{"x": [2.5]}}\n{json.dumps(rest)}\n')
    return path


def sent(peer: Peer) -> list[pb.ModelInferRequest]:
    return [request for request in peer.requests if isinstance(request, pb.ModelInferRequest)]


def test_infer_sequence_prints_an_answer_for_each_line(run: Run, peer: Peer, steps: Path) -> None:
    result = run("--sequence", str(steps), "--format", "json")
    assert (result.exit_code, result.stderr) == (0, "")
    assert [json.loads(line)["outputs"][0]["data"] for line in result.stdout.splitlines()] == [[1], [3.5], [6.5]]
    assert list(map(flags, sent(peer))) == ["S", "", "E"]


def test_infer_sequence_of_stdin_has_the_given_id(run: Run, peer: Peer) -> None:
    for own_id in ("7", "seven"):
        result = run("--sequence", "-", "--sequence-id", own_id, input='{"x": [4]}')
        assert (result.exit_code, result.stdout) == (0, "m\nsum  FP32  [1]\n[4.]\n")
    number, text = (request.parameters["sequence_id"] for request in sent(peer))
    assert (number.int64_param, text.string_param) == (7, "seven")


def test_infer_sequence_sends_options_and_inputs_with_every_step(run: Run, peer: Peer, steps: Path) -> None:
    peer.takes(x=("FP32", [1]), rate=("INT64", []), b=("BF16", [1]))
    result = run(
        *("--sequence", str(steps), "--input", "rate=16000", "--random", "--parameter", "priority=1", "--output", "sum")
    )
    assert result.exit_code == 0, result.stderr
    for request in sent(peer):
        tensors = {tensor.name: tensor.datatype for tensor in request.inputs}
        assert tensors == {"x": "FP32", "rate": "INT64", "b": "BF16"}
        assert np.int64(16000).tobytes() in request.raw_input_contents
        assert (request.parameters["priority"].int64_param, request.outputs[0].name) == (1, "sum")


def test_infer_sequence_that_is_lost_ends_with_one_line(run: Run, peer: Peer, steps: Path) -> None:
    sums = Sums()

    def forgetful(request: pb.ModelInferRequest, context: grpc.ServicerContext) -> pb.ModelInferResponse:
        response = sums(request, context)
        sums.live.clear()
        return response

    peer.answer = forgetful
    result = run("--sequence", str(steps))
    assert result.exit_code == 1
    assert result.stdout == "m\nsum  FP32  [1]\n[1.]\n"
    assert result.stderr.startswith("Error: INVALID_ARGUMENT: --sequence, line 3: inference request for sequence")
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize("bad", ['{"x": ["a"]}', '{"x": 1'])
def test_infer_steps_before_an_unreadable_line_are_sent(run: Run, peer: Peer, bad: str) -> None:
    result = run("--sequence", "-", "--format", "json", input=f'{{"x": [1]}}\n{{"x": [2]}}\n{bad}\n{{"x": [3]}}')
    assert result.exit_code == 2
    assert result.stderr.startswith("Error: --sequence, line 3: ")
    assert [json.loads(line)["outputs"][0]["data"] for line in result.stdout.splitlines()] == [[1], [3]]
    assert list(map(flags, sent(peer))) == ["S", ""]


def test_infer_sequence_of_an_empty_file_sends_nothing(run: Run, peer: Peer) -> None:
    assert run("--sequence", "-", input="\n").exit_code == 0
    assert not sent(peer)


@pytest.mark.parametrize(
    ("arguments", "lines", "text"),
    [
        ((), "{", "--sequence, line 1: not JSON"),
        ((), "\n\n[1]", "--sequence, line 3: expected an object of names and values, got list"),
        ((), '{"x": [1, [2]]}', "--sequence, line 1: input 'x': "),
        ((), '{"x": -1e400}', "--sequence, line 1: -1e400: too large for FP64"),
        ((), '{"z": 1}', "--sequence, line 1: model 'm' has no input 'z'; it takes x"),
        (("--input", "x=1"), '{"x": 1}', "--sequence, line 1: input 'x' is given with --input too"),
        (("--sequence-id", "0"), '{"x": 1}', "id: expected a 64-bit signed integer other than 0, got 0"),
        (("--repeat", "2"), '{"x": 1}', "--sequence can't be combined with --repeat or --save"),
        (("--save", "out.npz"), '{"x": 1}', "--sequence can't be combined with --repeat or --save"),
    ],
)
def test_infer_unusable_sequence_is_one_line_and_exit_2(
    run: Run, peer: Peer, arguments: tuple[str, ...], lines: str, text: str
) -> None:
    result = run("--sequence", "-", *arguments, input=lines)
    assert result.exit_code == 2
    assert text in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert not sent(peer)


def test_infer_sequence_id_alone_is_refused(run: Run, peer: Peer) -> None:
    result = run("--sequence-id", "7", "--input", "x=1")
    assert (result.exit_code, result.stderr) == (2, "Error: --sequence-id needs --sequence\n")


@pytest.fixture
def talking() -> Iterator[Peer]:
    with serving(Talking()) as peer:
        peer.takes(x=("FP32", [1]))
        yield peer


def decoupled(peer: Peer, *arguments: str) -> Result:
    return CliRunner().invoke(infer, ["m", "--server", peer.target, "--input", "x=[1]", *arguments])


def test_infer_decoupled_model_prints_all_its_answers(talking: Peer) -> None:
    result = decoupled(talking, "--version", "2")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == 2 * "m version 3\nx  FP32  [1]\n[1.]\n"
    assert [request.model_version for request in sent(talking)] == ["2", "2"]


@pytest.mark.parametrize("arguments", [("--save", "out.npz"), ("--sequence", "-")])
def test_infer_decoupled_model_is_refused_where_one_answer_is_wanted(
    talking: Peer, tmp_path: Path, monkeypatch: Any, arguments: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    given = ["m", "--server", talking.target, *arguments]
    if arguments[0] == "--save":
        given += ["--input", "x=[1]"]
    result = CliRunner().invoke(infer, given, input='{"x": [1]}')
    assert result.exit_code == 1
    assert result.stderr.startswith("Error: UNIMPLEMENTED: ")
    assert "ModelInfer RPC doesn't support models with decoupled" in result.stderr


def test_infer_model_that_lacks_something_else_is_not_asked_again(talking: Peer) -> None:
    class Lacking(Peer):
        def ModelInfer(self, request: pb.ModelInferRequest, context: grpc.ServicerContext) -> pb.ModelInferResponse:
            self._note(request, context)
            context.abort(grpc.StatusCode.UNIMPLEMENTED, "not in this build")
            return echo(request, context)

    with serving(Lacking()) as peer:
        peer.takes(x=("FP32", [1]))
        result = decoupled(peer)
        assert (result.exit_code, result.stderr) == (1, "Error: UNIMPLEMENTED: not in this build\n")
        assert len(sent(peer)) == 1
