from __future__ import annotations

import asyncio
import ctypes
import logging
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import pytest

from paceline.scheduler.runner import Outcome, TaskRunner, ThreadLost, ThreadRunner
from paceline.scheduler.testing import Results
from tests.rlimits import without_threads


async def run_on(runner: ThreadRunner[str, str] | TaskRunner[str, str], payloads: Sequence[str]) -> Outcome[str]:
    done: asyncio.Future[Outcome[str]] = asyncio.get_running_loop().create_future()
    runner.run(payloads, len(payloads), done.set_result)
    return await asyncio.wait_for(done, 60)


async def test_run_executes_on_its_own_thread_and_answers_on_the_loop() -> None:
    threads: list[str] = []

    def execute(payloads: Sequence[str], padded_rows: int) -> Results[str]:
        threads.append(threading.current_thread().name)
        return Results([payload.upper() for payload in payloads])

    runner: ThreadRunner[str, str] = ThreadRunner("instance-0", execute)
    runner.start()
    outcome = await run_on(runner, ["a", "b"])
    runner.stop()
    assert outcome.executed is not None
    assert outcome.executed.results == ["A", "B"]
    assert outcome.started_ns <= outcome.finished_ns
    assert threads == ["instance-0"]


@pytest.mark.parametrize("error", [ValueError("broken"), KeyboardInterrupt(), SystemExit(3), MemoryError()])
async def test_thread_reports_whatever_an_execution_raises_and_lives(error: BaseException) -> None:
    def execute(payloads: Sequence[str], padded_rows: int) -> Results[str]:
        if payloads == ["bad"]:
            raise error
        return Results(payloads)

    runner: ThreadRunner[str, str] = ThreadRunner("instance-0", execute)
    runner.start()
    assert (await run_on(runner, ["bad"])).error is error
    assert (await run_on(runner, ["good"])).error is None
    runner.stop()


def kill(threads: set[threading.Thread]) -> None:
    """Have the interpreter raise SystemExit in the thread "doomed" that isn't among `threads`, wherever it is."""
    (thread,) = (one for one in set(threading.enumerate()) - threads if one.name == "doomed")
    assert thread.ident is not None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit))


async def test_thread_that_dies_between_batches_is_replaced_and_the_batch_it_had_taken_fails(
    caplog: pytest.LogCaptureFixture,
) -> None:
    runner: ThreadRunner[str, str] = ThreadRunner("doomed", lambda payloads, rows: Results(payloads))
    errors: list[str] = []
    while not errors:  # now and then it dies before it waits, without a batch
        before = set(threading.enumerate())
        runner.start()
        assert (await run_on(runner, ["before"])).error is None
        kill(before)
        with caplog.at_level(logging.ERROR, "paceline.scheduler"):
            outcome = await run_on(runner, ["taken"])
        assert caplog.records[-1].getMessage() == "an instance's thread died and is replaced: doomed"
        assert (await run_on(runner, ["after"])).executed == Results(["after"])
        runner.stop()
        errors += [str(outcome.error)] if outcome.error else []
        runner = ThreadRunner("doomed", lambda payloads, rows: Results(payloads))
    assert errors == ["the instance's thread died: SystemExit()"]


async def test_batches_of_a_dead_thread_fail_until_another_can_be_started() -> None:
    runner: ThreadRunner[str, str] = ThreadRunner("doomed", lambda payloads, rows: Results(payloads))
    before = set(threading.enumerate())
    runner.start()
    assert (await run_on(runner, ["before"])).error is None
    kill(before)
    with without_threads():
        taken, ahead = await asyncio.gather(run_on(runner, ["taken"]), run_on(runner, ["handed over ahead"]))
        assert isinstance(taken.error, RuntimeError)
        for outcome in (taken, ahead, await run_on(runner, ["next"])):
            assert str(outcome.error).endswith("no other can be started: can't start new thread")
            assert isinstance(outcome.error, ThreadLost) or outcome is taken
    assert (await run_on(runner, ["after"])).executed == Results(["after"])
    runner.stop()


async def test_batch_that_a_dead_thread_may_have_executed_does_not_count_as_not_begun() -> None:
    class Doomed(ThreadRunner[str, str]):
        def _run_one(self, payloads: Sequence[str], padded_rows: int) -> Outcome[str]:
            super()._run_one(payloads, padded_rows)
            raise SystemExit

    executed: list[Sequence[str]] = []

    def execute(payloads: Sequence[str], padded_rows: int) -> Results[str]:
        executed.append(payloads)
        return Results(payloads)

    runner = Doomed("doomed", execute)
    runner.start()
    with without_threads():
        taken, ahead = await asyncio.gather(run_on(runner, ["taken"]), run_on(runner, ["handed over ahead"]))
    assert executed == [["taken"]]
    assert (type(taken.error), type(ahead.error)) == (RuntimeError, ThreadLost)
    runner.stop()


async def test_batch_of_a_thread_that_dies_while_stopping_ends_too() -> None:
    errors: list[str] = []
    while not errors:  # as above
        runner: ThreadRunner[str, str] = ThreadRunner("doomed", lambda payloads, rows: Results(payloads))
        before = set(threading.enumerate())
        runner.start()
        assert (await run_on(runner, ["before"])).error is None
        kill(before)
        ending = asyncio.ensure_future(run_on(runner, ["taken"]))
        await asyncio.sleep(0)
        runner.stop()
        outcome = await ending
        errors += [str(outcome.error)] if outcome.error else []
    assert errors == ["the instance's thread died: SystemExit()"]


async def test_run_with_wrong_number_of_results_is_an_error_for_all() -> None:
    runner: ThreadRunner[str, str] = ThreadRunner("instance-0", lambda payloads, rows: Results(["only one"]))
    runner.start()
    outcome = await run_on(runner, ["a", "b"])
    runner.stop()
    assert "1 results for 2 requests" in str(outcome.error)


async def test_stop_ends_the_thread() -> None:
    runner: ThreadRunner[str, str] = ThreadRunner("stopping", lambda payloads, rows: Results(payloads))
    runner.start()
    thread = next(thread for thread in threading.enumerate() if thread.name == "stopping")
    runner.stop()
    await asyncio.to_thread(thread.join, 60)
    assert not thread.is_alive()


class Payload:
    """Anything that a weak reference can refer to."""


async def test_thread_keeps_no_payload_once_the_loop_learns_of_the_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    wake, kept = loop.call_soon_threadsafe, []

    def call_soon_threadsafe(*arguments: Any, **options: Any) -> asyncio.Handle:
        kept.append(reference() is not None)
        return wake(*arguments, **options)

    let_go = threading.Event()

    def execute(payloads: Sequence[Payload], padded_rows: int) -> Results[str]:
        assert let_go.wait(30)
        return Results(["done"] * len(payloads))

    runner: ThreadRunner[Payload, str] = ThreadRunner("instance-0", execute)
    runner.start()
    payload = Payload()
    reference = weakref.ref(payload)
    done: asyncio.Future[Outcome[str]] = loop.create_future()
    monkeypatch.setattr(loop, "call_soon_threadsafe", call_soon_threadsafe)
    runner.run([payload], 1, done.set_result)
    del payload
    let_go.set()
    await asyncio.wait_for(done, 60)
    runner.stop()
    assert kept == [False]


async def test_task_runs_on_the_loop_without_blocking_others() -> None:
    gate = asyncio.Event()

    async def execute(payloads: Sequence[str], padded_rows: int) -> Results[str]:
        await gate.wait()
        return Results([f"{payload}{padded_rows}" for payload in payloads])

    runner: TaskRunner[str, str] = TaskRunner(execute)
    runner.start()
    running = asyncio.create_task(run_on(runner, ["a", "b"]))
    await asyncio.sleep(0)
    gate.set()
    outcome = await running
    assert outcome.executed is not None
    assert outcome.executed.results == ["a2", "b2"]
    assert outcome.started_ns <= outcome.finished_ns


@pytest.mark.parametrize("error", [ValueError("broken"), KeyboardInterrupt(), SystemExit(3), MemoryError()])
async def test_task_reports_whatever_an_execution_raises_and_the_next_one_runs(error: BaseException) -> None:
    async def execute(payloads: Sequence[str], padded_rows: int) -> Results[str]:
        if payloads == ["bad"]:
            raise error
        return Results(["one"])

    runner: TaskRunner[str, str] = TaskRunner(execute)
    runner.start()
    assert (await run_on(runner, ["bad"])).error is error
    assert (await run_on(runner, ["good"])).error is None
    assert "1 results for 2 requests" in str((await run_on(runner, ["a", "b"])).error)


@pytest.mark.parametrize("turns", [1, 2], ids=["before it began", "while it runs"])
async def test_stop_cancels_a_task_and_its_outcome_is_reported(turns: int) -> None:
    async def execute(payloads: Sequence[str], padded_rows: int) -> Results[str]:
        await asyncio.Event().wait()
        raise AssertionError("nobody sets it")

    runner: TaskRunner[str, str] = TaskRunner(execute)
    runner.start()
    running = asyncio.create_task(run_on(runner, ["a"]))
    for _ in range(turns):
        await asyncio.sleep(0)
    runner.stop()
    assert isinstance((await running).error, asyncio.CancelledError)


async def test_called_off_task_reports_it_and_the_next_one_runs() -> None:
    async def execute(payloads: Sequence[str], padded_rows: int) -> Results[str]:
        if payloads == ["long"]:
            await asyncio.Event().wait()
        return Results(payloads)

    runner: TaskRunner[str, str] = TaskRunner(execute)
    runner.start()
    running = asyncio.create_task(run_on(runner, ["long"]))
    await asyncio.sleep(0)
    runner.call_off()
    assert isinstance((await running).error, asyncio.CancelledError)
    assert (await run_on(runner, ["next"])).error is None
    runner.call_off()  # nothing runs
    assert (await run_on(runner, ["next"])).error is None


async def test_finished_task_keeps_nothing_until_the_next_one() -> None:
    class Tensors(str):
        """A weak reference to these shows when they are gone."""

    async def execute(payloads: Sequence[str], padded_rows: int) -> Results[str]:
        return Results([Tensors("answer")])

    runner: TaskRunner[str, str] = TaskRunner(execute)
    runner.start()
    payload = Tensors("request")
    outcome = await run_on(runner, [payload])
    assert outcome.executed is not None
    kept = [weakref.ref(payload), weakref.ref(outcome.executed.results[0])]
    del payload, outcome
    await asyncio.sleep(0)  # from Python 3.12 on, the loop iteration that woke this up keeps the outcome until it ends
    assert [one() for one in kept] == [None, None]


async def test_call_off_does_not_stop_a_thread() -> None:
    runner: ThreadRunner[str, str] = ThreadRunner("instance-0", lambda payloads, rows: Results(payloads))
    runner.start()
    running = asyncio.create_task(run_on(runner, ["a"]))
    await asyncio.sleep(0)
    runner.call_off()
    assert (await running).error is None
    runner.stop()
