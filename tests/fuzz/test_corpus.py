"""Findings of fuzzing, the seeds it started from, and random changes to them: every input is answered or refused."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator

import pytest

from tests.fuzz.judging import Finding, Target, judged, quiet
from tests.fuzz.mutation import mutated
from tests.fuzz.targets import CORPUS, NAMES, inputs, target

_RUNS = {"config": 60, "load": 60, "service": 200, "stream": 150}
"""Random inputs per target; 600 for the others. A run takes from 20 us to 5 ms."""


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with quiet():
        yield


@pytest.mark.parametrize("name", NAMES)
def test_corpus_is_answered_or_refused(name: str) -> None:
    assert inputs(name)
    for path in inputs(name):
        try:
            judged(target(name), path.read_bytes())
        except Exception as error:
            raise AssertionError(f"corpus/{name}/{path.name}") from error


@pytest.mark.parametrize("name", NAMES)
def test_random_changes_are_answered_or_refused(name: str) -> None:
    chance = random.Random(20_240_601)
    corpus = [path.read_bytes() for path in inputs(name)]
    for _ in range(_RUNS.get(name, 600)):
        data = mutated(name, chance, corpus)
        try:
            judged(target(name), data)
        except Exception as error:
            raise AssertionError(f"{name}: {data!r}") from error


def test_corpus_is_small_and_has_only_known_targets() -> None:
    assert {path.name for path in CORPUS.iterdir()} == set(NAMES)
    assert sum(path.stat().st_size for path in CORPUS.rglob("*")) < 200_000


def test_judging_reports_a_run_that_takes_too_much_memory() -> None:
    def run(data: bytes) -> None:
        bytes(10**6)

    with pytest.raises(Finding, match="greedy: 3 bytes took 10"):
        judged(Target("greedy", run), b"abc")


def test_judging_reports_a_run_that_takes_too_long_twice() -> None:
    times = iter([0.0, 2.5, 10.0, 11.0, 20.0, 22.5, 30.0, 33.0])
    slow = Target("slow", lambda data: None)
    judged(slow, b"abc", lambda: next(times))
    with pytest.raises(Finding, match=r"slow: 3 bytes took 3\.0 s"):
        judged(slow, b"abc", lambda: next(times))


def test_judging_blames_no_target_for_memory_that_others_take_meanwhile() -> None:
    others = iter([10**6])

    class Garbage:
        def __del__(self) -> None:
            for size in others:
                bytes(size)

    def run(data: bytes) -> None:
        garbage: list[object] = [Garbage()]
        garbage.append(garbage)
        del garbage
        gc.collect()

    judged(Target("modest", run), b"abc")


def test_judging_passes_on_exceptions_of_a_decoder() -> None:
    def run(data: bytes) -> None:
        raise KeyError(data)

    with pytest.raises(KeyError):
        judged(Target("faulty", run), b"abc")
