"""The page of what tuning has found: whole, and with nothing from elsewhere."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import cache

from paceline.clients.load.histogram import Histogram
from paceline.protos import model_config_pb2 as pb
from paceline.scheduler.policy import BatchPolicy
from paceline.server.models.defaults import Offline
from paceline.server.tune import choosing
from paceline.server.tune.choosing import Choice, Goal, Needs, Setting, choose, settings_of
from paceline.server.tune.config_file import changes_of
from paceline.server.tune.curve import Curve, Curves
from paceline.server.tune.live import Live
from paceline.server.tune.measuring import Layout
from paceline.server.tune.page import page
from paceline.server.tune.report import Tuned
from tests.pages import Page

MS = 1_000_000
SEED, REQUESTS = 1, 300


def layout(instances: int) -> Layout:
    curves = {size: Curve({rows: [(5 + rows * size // 10) * MS] for rows in (1, 2, 4)}) for size in (10, 40)}
    return Layout(Offline(instances if instances > 1 else 0), instances, Curves(curves, 10))


LAYOUTS = [layout(1), layout(2)]
NOW = Setting(LAYOUTS[0], BatchPolicy(max_batch_rows=2, max_queue_delay_ns=9 * MS))


async def tuned(goal: Goal) -> Tuned:
    choice = await choose(NOW, settings_of(LAYOUTS, NOW.policy, goal), goal, SEED, requests=REQUESTS)
    chosen = choice.best[0].setting
    back = await choosing.set_back(chosen, NOW, goal, SEED, REQUESTS)
    return Tuned("<script>alert(1)</script>", goal, choice, changes_of(pb.ModelConfig(), NOW, chosen), SEED, back)


@cache
def found() -> Tuned:
    return asyncio.run(tuned(Goal(rate=150, p99_ns=80 * MS)))


def test_page_of_settings_needs_nothing_from_elsewhere() -> None:
    text = page(found(), 'name: "<m>"')
    parsed = Page(text)
    assert parsed.open == []
    assert parsed.elsewhere == []
    assert "script" not in parsed.tags
    assert "url(" not in text
    assert "nan" not in text.lower()
    assert parsed.tags.count("svg") == 7
    assert "name: &quot;&lt;m&gt;&quot;" in text
    assert all(f"{name} as now" in text for name in found().set_back)


def test_each_change_is_set_back_alone() -> None:
    best, set_back = found().choice.best[0], found().set_back
    chosen = best.setting
    assert set_back["instances and threads"].setting == replace(chosen, layout=NOW.layout)
    assert set_back["instances and threads"].p99_ns > best.p99_ns
    delayed = set_back["wait for more requests"].setting.policy
    assert delayed == replace(chosen.policy, max_queue_delay_ns=9 * MS)
    # What allowed sizes are worth isn't simulated, and they don't fit other largest batches.
    filled = replace(chosen, policy=replace(chosen.policy, batch_sizes=(chosen.policy.max_batch_rows,)))
    again = asyncio.run(choosing.set_back(filled, NOW, found().goal, SEED, 50))
    assert {name: one.setting for name, one in again.items()} == {name: one.setting for name, one in set_back.items()}


def test_what_would_help_is_of_the_models_devices() -> None:
    best = replace(found().choice.best[0], is_met=False)
    for gpus, said in (
        (0, "2 times the CPUs, or executions that are 3 times as fast: a smaller model, a faster CPU or a GPU."),
        (1, "2 times the GPUs, or executions that are 3 times as fast: a smaller model or a faster GPU."),
    ):
        setting = replace(best.setting, layout=replace(best.setting.layout, gpus=gpus))
        choice = Choice(best, [replace(best, setting=setting)], 1, needs=Needs(2, 3))
        assert replace(found(), choice=choice).verdict().endswith(said)


def test_page_of_a_goal_that_cannot_be_met_is_whole() -> None:
    for goal in (Goal(rate=5_000, p99_ns=20 * MS), Goal(clients=4)):
        text = page(asyncio.run(tuned(goal)), "")
        assert Page(text).open == []
        assert ">inf" not in text


def test_what_was_tried_stands_beside_its_prediction() -> None:
    was = found()
    best, second, *others = was.choice.best
    live = Live(
        150.0, 149.5, Histogram.of([12 * MS] * 100), 0, {1: 3, 2: 1}, 0, 0, 0, 5.0, doubts=("requests were sent late",)
    )
    less = replace(second, live=live, load=was.goal.at(100))
    choice = replace(was.choice, best=[replace(best, live=live, load=was.goal), less, *others])
    shown = " ".join(Page(page(replace(was, choice=choice), "")).texts)
    p50, p99 = (f"{(best.found.latencies.percentile_ns(share) or 0) / 1e6:.3g} ms" for share in (50, 99))
    per_s, rows = f"{best.found.throughput:.4g}", f"{best.found.rows_per_batch:.3g}"
    assert f"best 150 {per_s} 149.5 {p50} 12 ms {p99} 12 ms {rows} 1.25" in shown
    assert "When tried, requests were sent late: best, second." in shown
    assert "second 100 - 149.5 - 12 ms - 12 ms - 1.25" in shown
