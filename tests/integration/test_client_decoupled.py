"""Answers of a decoupled model through our clients and the command, and what an iterator's end tells the model."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest
from click.testing import CliRunner

from paceline.clients import AsyncInferenceClient, InferenceClient, InferenceError, Unimplemented
from paceline.clients.cli import infer
from tests import open_puppet
from tests.harness import ServerProcess
from tests.polling import eventually_async

COUNT = "for n in range(3): send(n)\n"
X = {"x": np.array([[1]], np.int64)}
Ask = Callable[[str], AsyncGenerator[int, None]]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("models")
    open_puppet.write(folder)
    with ServerProcess(folder, args=("--allow-python-models=true",)) as started:
        yield started


@pytest.fixture(params=["blocking", "asyncio", "asyncio over streams"])
async def ask(request: pytest.FixtureRequest, server: ServerProcess) -> AsyncIterator[Ask]:
    """Yields what asks the model to run code, and yields its answers."""
    if request.param == "blocking":
        with InferenceClient(server.target, timeout_s=30) as client:

            async def answers(code: str) -> AsyncGenerator[int, None]:
                with contextlib.closing(client.stream_infer("m", X, parameters={"run": code})) as found:
                    while (one := await asyncio.to_thread(next, found, None)) is not None:
                        yield int(one["y"][0, 0])

            yield answers
        return
    transport = "stream" if "streams" in request.param else "call"
    async with AsyncInferenceClient(server.target, timeout_s=30, transport=transport) as made:  # type: ignore[arg-type]

        async def async_answers(code: str) -> AsyncGenerator[int, None]:
            async with contextlib.aclosing(made.stream_infer("m", X, parameters={"run": code})) as found:
                async for one in found:
                    yield int(one["y"][0, 0])

        yield async_answers


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (f"{COUNT}request.end()", [0, 1, 2]),
        (f"{COUNT}send(9, True)", [0, 1, 2, 9]),
        ("request.end()", []),
        ("for n in range(2_000): send(n)\nrequest.end()", list(range(2_000))),
    ],
    ids=["end afterwards", "end with the last", "none", "many"],
)
async def test_all_answers_come_in_order_whatever_ends_them(ask: Ask, code: str, expected: list[int]) -> None:
    assert [each async for each in ask(code)] == expected


async def test_error_of_the_model_is_raised_after_its_answers(ask: Ask) -> None:
    answers = ask(f"{COUNT}request.fail('no more')")
    assert [await anext(answers) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(InferenceError, match="no more") as raised:
        await anext(answers)
    assert raised.value.status is grpc.StatusCode.INTERNAL


async def test_closed_iterator_tells_the_model_that_nobody_waits(ask: Ask, tmp_path: Path) -> None:
    mark = tmp_path / "cancelled"
    endless = f"while not request.cancelled: send(1)\nrequest.end()\npathlib.Path({str(mark)!r}).touch()"
    async with contextlib.aclosing(ask(f"thread(lambda: exec({endless!r}, globals() | locals()))")) as answers:
        for _ in range(100):
            assert await anext(answers) == 1
    await eventually_async(mark.exists, "the model's end")


def test_infer_command_prints_all_answers_of_the_model(server: ServerProcess) -> None:
    given = ["m", "--server", server.target, "--input", "x=[[1]]", "--parameter", f"run={COUNT}request.end()"]
    result = CliRunner().invoke(infer, given)
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == "".join(f"m version 1\ny  INT64  [1, 1]\n[[{number}]]\n" for number in range(3))


def test_one_answer_of_a_decoupled_model_is_unimplemented(server: ServerProcess) -> None:
    with InferenceClient(server.target) as client, pytest.raises(Unimplemented, match="decoupled transaction policy"):
        client.infer("m", X)
