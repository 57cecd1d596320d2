"""Requests that a model answers as often as it likes: their answers, and their ends, whatever ends them."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import pytest

from paceline.backends.errors import ExecutionError, OutOfMemory, ProcessEndedBeforeBatch, ProcessError
from paceline.backends.open_request import ELSEWHERE, Answer, OpenRequest
from paceline.backends.python.backend import PythonBackend
from paceline.backends.python.decoupled import DecoupledInstance
from paceline.backends.spec import MISSING, ModelSpec, TensorSpec
from tests.open_puppet import SOURCE
from tests.polling import eventually
from tests.unit.backends.python_models import CPU, is_alive, model_source

SPEC = ModelSpec(
    (TensorSpec("x", "INT64", (1,)),), (TensorSpec("y", "INT64", (-1,)), TensorSpec("z", "BYTES", ())), batched=True
)
END = "the end"
Heard = int | str


class Asked(OpenRequest):
    """A request that has the model run `code`. What it hears isn't let go before the test says so."""

    __slots__ = ("answers", "heard")

    def __init__(self, code: str, *numbers: int) -> None:
        super().__init__((np.array(numbers or (1,), np.int64).reshape(-1, 1),), (0, 1), "an id", {"run": code})
        self.heard: SimpleQueue[tuple[Heard, bool]] = SimpleQueue()
        self.answers = 0

    def on_answer(self, answer: Answer, *, last: bool) -> None:
        if answer is None:
            heard: Heard = END
        elif isinstance(answer, ExecutionError):
            heard = str(answer)
        else:
            heard = -1 if answer[0] is MISSING else int(answer[0][0, 0])
        self.answers += 1
        self.heard.put((heard, last))

    def next(self) -> tuple[Heard, bool]:
        return self.heard.get(timeout=20)

    def all(self) -> list[Heard]:
        """All that it hears until its end."""
        told: list[Heard] = []
        last = False
        while not last:
            one, last = self.next()
            told.append(one)
        assert self.heard.empty()
        return told


@pytest.fixture
def instance(tmp_path: Path) -> Iterator[DecoupledInstance]:
    with opened(tmp_path, SOURCE) as instance:
        yield instance


@contextmanager
def opened(folder: Path, source: str) -> Iterator[DecoupledInstance]:
    (folder / "model.py").write_text(source)
    model = PythonBackend().open(model_source(folder / "model.py", decoupled=True), CPU)
    instance = model.instance(SPEC, CPU)
    assert isinstance(instance, DecoupledInstance)
    try:
        yield instance
    finally:
        instance.close()
        model.close()


def told(instance: DecoupledInstance, code: str) -> list[Heard]:
    """All that a request hears by which the model runs `code`."""
    asked = Asked(code)
    instance.execute_open([asked])
    return asked.all()


def test_answers_arrive_in_order_and_the_last_says_so(instance: DecoupledInstance) -> None:
    several, none, one = (
        Asked("for n in range(3): send(n)\nrequest.end()"),
        Asked("request.end()"),
        Asked("send(7, True)"),
    )
    done = instance.execute_open([several, none, one])
    assert all(one is ELSEWHERE for one in done.results)
    assert [several.all(), none.all(), one.all()] == [[0, 1, 2, END], [END], [7]]


def test_model_sees_what_each_request_brings(instance: DecoupledInstance) -> None:
    code = """
assert request.id == "an id" and request.outputs == ("y", "z") and list(request.parameters) == ["run"]
send(int(request.inputs["x"].sum()) + 100 * len(request.inputs["x"]) + 1000 * model.batch, True)
"""
    first, second = Asked(code, 1, 2), Asked(code, 3)
    instance.execute_open([first, second])
    assert (first.all(), second.all()) == ([2203], [2103])


def test_kept_request_is_answered_after_execute_on_a_thread(instance: DecoupledInstance) -> None:
    kept = Asked("model.kept.append(request)")
    instance.execute_open([kept])
    assert kept.heard.empty()
    release = "kept = model.kept.pop()\nthread(lambda: (kept.send({'y': [[5]]}), kept.end()))\nrequest.end()"
    assert told(instance, release) == [END]
    assert kept.all() == [5, END]


def test_process_that_fails_to_listen_ends_at_once(instance: DecoupledInstance) -> None:
    waits, unreadable = Asked("thread(lambda: [send(n) for n in range(100)])"), Asked("request.end()")
    instance.execute_open([waits])
    unreadable.inputs = ()
    # Its own thread, on which the model waits for room, would keep the process for ever.
    with pytest.raises(ProcessError, match="ended with exit status 1"):
        instance.execute_open([unreadable])


def test_error_of_execute_ends_what_has_not_ended(instance: DecoupledInstance) -> None:
    ended, answered = Asked("send(1, True)"), Asked("send(2); model.kept.append(request)")
    with pytest.raises(ExecutionError, match=r"^ValueError: no good$"):
        instance.execute_open([ended, answered, Asked("raise ValueError('no good')")])
    assert ended.all() == [1]
    assert answered.next() == (2, False)
    late = "try: model.kept.pop().end()\nexcept RuntimeError as error: request.fail(error)"
    assert told(instance, late) == ["the request has ended: there was a last answer, or execute raised an error"]
    with pytest.raises(OutOfMemory):
        instance.execute_open([Asked("raise MemoryError")])


@pytest.mark.parametrize("code", ["pass", "model.kept.append(request); model.kept.clear()"])
def test_dropped_request_fails_and_says_why(instance: DecoupledInstance, code: str) -> None:
    assert told(instance, code) == ["the model dropped the request without ending it"]


def test_errors_end_a_request_only_if_told_to(instance: DecoupledInstance) -> None:
    code = "request.fail('first', end=False); send(1); request.fail('second')"
    assert told(instance, code) == ["first", 1, "second"]


def test_outputs_may_be_left_out(instance: DecoupledInstance) -> None:
    asked = Asked("request.send({'z': ['text']}); request.send({}); request.end()")
    instance.execute_open([asked])
    assert asked.all() == [-1, -1, END]


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("request.send({'y': [[1.5]]}); model.kept.append(request)", "output 'y': expected INT64, got numpy's float64"),
        ("request.send({'y': [1]}); model.kept.append(request)", "output 'y': expected shape [-1, -1], got [1]"),
        ("request.fail('x' * 9)", "x" * 9),
    ],
)
def test_answer_that_does_not_fit_ends_its_request(instance: DecoupledInstance, code: str, text: str) -> None:
    assert told(instance, code) == [text]


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("request.send({'w': [1]})", "KeyError: send: expected some of the outputs ['y', 'z'], got 'w'"),
        ("request.send([1])", "TypeError: send: expected a dict of outputs by name, got list"),
        ("request.end(); request.end()", "RuntimeError: the request has ended"),
    ],
)
def test_misuse_is_raised_where_it_happens(instance: DecoupledInstance, code: str, text: str) -> None:
    with pytest.raises(ExecutionError) as error:
        instance.execute_open([Asked(code)])
    assert str(error.value).startswith(text)


SENDING = """
def run():
    for model.sent in range(1000):
        send(model.sent)
    request.end()
thread(run)
"""
SO_FAR = "send(model.sent, True)"


def test_send_waits_for_a_slow_reader(instance: DecoupledInstance) -> None:
    slow = Asked(SENDING)
    instance.execute_open([slow])
    for most in (16, 24, 32):
        eventually(lambda most=most: slow.answers == most, "as many answers as may be on their way")
        eventually(lambda most=most: told(instance, SO_FAR) == [most], "the thread that sends at the next one")
        assert slow.answers == most
        slow.sent(8)
    slow.cancel()


def test_large_answers_are_fewer_and_give_their_memory_back(instance: DecoupledInstance) -> None:
    half = "numpy = __import__('numpy'); half = {'y': numpy.zeros((1, 2**16), 'int64')}"
    slow = Asked(
        f"{half}\ndef run():\n    for model.sent in range(9): request.send(half)\n    request.end()\nthread(run)"
    )
    instance.execute_open([slow])
    for number in range(1, 9):
        assert slow.next() == (0, False)
        if number >= 2:
            eventually(lambda number=number: told(instance, SO_FAR) == [number], "waits once it has sent 1 MiB")
            slow.sent(1)
    slow.sent(1)
    assert [slow.next(), slow.next()] == [(0, False), (END, True)]


def test_cancelled_request_is_told_and_never_blocks(instance: DecoupledInstance) -> None:
    slow = Asked(f"{SENDING}model.kept.append(request)")
    instance.execute_open([slow])
    eventually(lambda: slow.answers == 16, "as many answers as may be on their way")
    assert told(instance, "send(int(model.kept[0].cancelled), True)") == [0]
    slow.cancel()
    eventually(lambda: told(instance, SO_FAR) == [999], "the model has sent all")
    assert told(instance, "send(int(model.kept[0].cancelled), True)") == [1]
    assert slow.answers == 16


def test_request_is_cancelled_while_execute_runs(instance: DecoupledInstance) -> None:
    endless = Asked("send(1)\nwhile not request.cancelled: pass")
    with ThreadPoolExecutor(1) as threads:
        execution = threads.submit(instance.execute_open, [endless])
        assert endless.next() == (1, False)
        endless.cancel()
        execution.result(20)
    assert told(instance, "send(2, True)") == [2]


def test_request_cancelled_beforehand_is_told_as_well(instance: DecoupledInstance) -> None:
    late = Asked("while not request.cancelled: pass")
    late.cancel()
    instance.execute_open([late])
    assert late.heard.empty()


def test_inputs_that_cannot_be_handed_over_leave_no_memory_taken(instance: DecoupledInstance) -> None:
    """The first one's are in memory already, when those of the second one turn out not to be bytes."""
    large, odd = Asked("request.end()", *range(2**16)), Asked("request.end()")
    odd.inputs = (np.array([[3]], object),)
    assert told(instance, "request.end()") == [END]
    process = instance._process
    assert process is not None
    eventually(lambda: told(instance, "request.end()") == [END] and not process._link.used_bytes, "all is given back")
    with pytest.raises(ExecutionError, match="inputs can't be handed to the model's process: "):
        instance.execute_open([large, odd])
    assert process._link.used_bytes == 0
    assert told(instance, "request.end()") == [END]


def test_killed_process_ends_requests_that_it_kept(instance: DecoupledInstance) -> None:
    kept = Asked("send(os.getpid()); model.kept.append(request)")
    instance.execute_open([kept])
    pid, _ = kept.next()
    assert isinstance(pid, int)
    os.kill(pid, signal.SIGKILL)
    assert kept.all() == ["the model's process was killed by SIGKILL"]
    assert not is_alive(pid)
    with pytest.raises(ProcessEndedBeforeBatch, match="was killed by SIGKILL, before it had begun this batch"):
        instance.execute_open([Asked("request.end()")])


def test_process_that_ends_during_a_batch_fails_it(instance: DecoupledInstance) -> None:
    kept, executing = Asked("model.kept.append(request)"), Asked("send(1); os._exit(3)")
    instance.execute_open([kept])
    with pytest.raises(ProcessError, match=r"^the model's process ended with exit status 3 while it executed") as error:
        instance.execute_open([executing])
    assert not isinstance(error.value, ProcessEndedBeforeBatch)
    assert kept.all() == ["the model's process ended with exit status 3"]
    assert executing.next() == (1, False)
    assert executing.heard.empty()


def test_closing_ends_requests_that_are_open(instance: DecoupledInstance) -> None:
    kept = Asked("model.kept.append(request)")
    instance.execute_open([kept])
    instance.close()
    assert kept.all() == ["the model's process ended with exit status 0"]


def test_fork_cannot_answer_requests(instance: DecoupledInstance) -> None:
    code = """
if not (child := os.fork()):
    try: send(1)
    except RuntimeError: os._exit(7)
    os._exit(0)
send(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), True)
"""
    assert told(instance, code) == [7]


def test_made_up_request_needs_no_end(instance: DecoupledInstance, tmp_path: Path) -> None:
    source = SOURCE.replace(
        "self.run(request)", "request.send({'y': [[3]]})\n            while not request.cancelled: pass"
    )
    with opened(tmp_path, source) as other:
        (result,) = other.execute_made_up([(np.array([[1]], np.int64),)]).results
        assert not isinstance(result, Exception)
        assert result[0].tolist() == [[3]]


def test_anything_returned_by_execute_is_refused(tmp_path: Path) -> None:
    refused = pytest.raises(ExecutionError, match=r"expected None from execute of a decoupled model.*, got int")
    with opened(tmp_path, SOURCE.replace("self.batch =", "return")) as instance, refused:
        instance.execute_open([Asked("")])


def test_coroutines_go_on_between_batches(tmp_path: Path) -> None:
    source = SOURCE.replace("    def execute", "    async def execute").replace(
        "self.run(request)", "await self.run(request)"
    )
    source = source.replace("    def run", "    async def run").replace(
        "        exec(", "        self.task = asyncio.create_task("
    )
    start = source.index("        self.task")
    source = (
        source[:start]
        + """        async def answer():
            for self.sent in range(1000):
                await request.room()
                send(self.sent)
            request.end()
        if request.parameters["run"] == "task":
            self.task = asyncio.create_task(answer())
        else:
            send(self.sent, True)
"""
    )
    with opened(tmp_path, source) as instance:
        slow = Asked("task")
        instance.execute_open([slow])
        eventually(lambda slow=slow: slow.answers == 16, "as many answers as may be on their way")
        assert told(instance, "") == [16], "other coroutines go on meanwhile"
        slow.sent(16)
        eventually(lambda slow=slow: slow.answers == 32, "as many more")
        slow.cancel()
