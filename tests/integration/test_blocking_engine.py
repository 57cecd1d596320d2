"""An engine for threads: they share its batches, and each request blocks its own."""

from __future__ import annotations

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import paceline
from paceline import BlockingEngine
from tests import decoder_models
from tests.decoder_models import TINY
from tests.integration.engines import PROMPT, blocking_engine, row
from tests.integration.serving import echo_model
from tests.polling import eventually


def test_threads_share_batches_of_a_blocking_engine(tmp_path: Path) -> None:
    with blocking_engine(tmp_path, model := echo_model()) as engine, ThreadPoolExecutor(9) as threads:
        model.gate.close()
        first = threads.submit(engine.infer, row(0))
        model.gate.wait_entered(1)
        others = [threads.submit(engine.infer, row(value)) for value in range(1, 9)]
        batcher = engine._engine._running.repository.get("m", "").batcher
        eventually(lambda: batcher.waiting_requests == 8, "waiting")
        model.gate.open()
        assert [one.result()["x"][0, 0] for one in (first, *others)] == [*range(9)]
        assert model.batches == [(1,), (1,) * 8]
        assert [one["x"].tolist() for one in engine.stream(row(1))] == [[[1, 1]]]
        assert engine.models == ["m"]
        assert engine.describe("m").name == "m"


def test_blocking_engine_ends_with_its_block(tmp_path: Path) -> None:
    before = threading.active_count()
    with blocking_engine(tmp_path, echo_model()) as engine:
        engine.infer(row(1))
        with pytest.raises(paceline.NotFound):
            engine.infer(row(1), model="nosuch")
    assert threading.active_count() == before
    with pytest.raises(RuntimeError, match="expected a running engine"):
        engine.infer(row(1))
    with pytest.raises(paceline.StartError), BlockingEngine(tmp_path / "nosuch"):
        raise AssertionError("it started")
    assert threading.active_count() == before


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_forked_process_is_refused(tmp_path: Path) -> None:
    with blocking_engine(tmp_path, echo_model()) as engine:
        if not (child := os.fork()):
            signal.alarm(10)  # a request would wait for a thread that isn't there
            try:
                engine.infer(row(1))
            except RuntimeError as error:
                os._exit(0 if "forked" in str(error) else 2)
            finally:
                os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
        assert engine.infer(row(2))["x"][0, 0] == 2


def test_stream_that_is_dropped_ends_on_whatever_thread_finds_that(tmp_path: Path) -> None:
    decoder_models.write(TINY, tmp_path / "m" / "1")
    asked: dict[str, Any] = {"parameters": {"max_tokens": 500, "ignore_eos": True}}
    with BlockingEngine(tmp_path) as engine, ThreadPoolExecutor(1) as threads:
        opened = engine._engine._running.repository.get("m", "").open_requests
        held: list[Any] = [engine.stream({"input_ids": PROMPT}, **asked)]
        next(held[0])
        assert engine._loop is not None
        engine._loop.call_soon_threadsafe(held.clear)  # as a garbage collection there does
        eventually(lambda: not (held or opened), "withdrawn")
        assert threads.submit(engine.infer, {"input_ids": PROMPT}).result(20)["output_ids"].size
        left = engine.stream({"input_ids": PROMPT}, parameters={"max_tokens": 4})
        next(left)
        with pytest.raises(RuntimeError, match="started already"):
            engine.__enter__()
    left.close()
