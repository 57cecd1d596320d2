"""What instances tell of their generations, as the numbers that metrics show."""

from __future__ import annotations

from paceline.backends.generation_totals import GENERATION_BOUNDS_NS, GenerationTotals

MS = 1_000_000


def test_times_begin_at_arrival_and_go_from_token_to_token() -> None:
    totals = GenerationTotals()
    watch = totals.watch(lambda: 0.5)
    watch.entered(1, prompt_tokens=5, arrived_ns=0)
    watch.entered(2, prompt_tokens=7, arrived_ns=10 * MS)
    watch.chose([1], 30 * MS)
    watch.chose([1, 2], 40 * MS)
    assert (totals.prompt_tokens, totals.generation_tokens) == (12, 3)
    assert (sum(totals.first_token.counts), totals.first_token.total_ns) == (2, 60 * MS)
    assert (sum(totals.next_token.counts), totals.next_token.total_ns) == (1, 10 * MS)
    assert totals.next_token.counts[GENERATION_BOUNDS_NS.index(10 * MS)] == 1


def test_generation_that_was_not_told_of_counts_nothing() -> None:
    totals = GenerationTotals()
    watch = totals.watch(lambda: 0.0)
    watch.chose([1], 30 * MS)
    watch.left(1)
    assert (totals.prompt_tokens, totals.generation_tokens, totals.running) == (0, 0, 0)


def test_prompt_that_was_not_computed_is_not_counted() -> None:
    totals = GenerationTotals()
    watch = totals.watch(lambda: 0.0)
    watch.entered(1, prompt_tokens=5, arrived_ns=0)
    assert totals.running == 1
    watch.left(1)
    assert (totals.prompt_tokens, sum(totals.first_token.counts), totals.running) == (0, 0, 0)


def test_instances_that_have_ended_run_nothing() -> None:
    totals = GenerationTotals()
    one, other = totals.watch(lambda: 0.5), totals.watch(lambda: 0.25)
    for watch in (one, other):
        watch.entered(1, prompt_tokens=5, arrived_ns=0)
    assert (totals.running, totals.cache_usage) == (2, 0.375)
    one.end()
    assert (totals.running, totals.cache_usage) == (1, 0.25)
    other.end()
    assert (totals.running, totals.cache_usage) == (0, 0.0)


def test_merge_adds_what_was_counted_but_not_what_runs() -> None:
    totals, sums = GenerationTotals(), GenerationTotals()
    watch = totals.watch(lambda: 0.5)
    watch.entered(1, prompt_tokens=5, arrived_ns=0)
    watch.chose([1], 3 * MS)
    watch.chose([1], 5 * MS)
    watch.put_out(2)
    totals.on_finish("stop", 7 * MS)
    for _ in range(2):
        sums.merge(totals)
    assert (sums.prompt_tokens, sums.generation_tokens, sums.preemptions, sums.running) == (10, 4, 4, 0)
    assert (sums.first_token.total_ns, sums.next_token.total_ns, sums.whole.total_ns) == (6 * MS, 4 * MS, 14 * MS)
    assert sums.finished == {"length": 0, "stop": 2}
