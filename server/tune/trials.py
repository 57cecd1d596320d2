"""A model on servers, with one setting or another: what loads meet there, and what requests cost.

Lives here: configurations to serve, which loads say what requests cost. Must not: start servers, or choose.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from google.protobuf import text_format

from paceline.clients.load.arrivals import Arrivals
from paceline.protos import model_config_pb2 as pb
from paceline.server.tune.calibrating import calibrated
from paceline.server.tune.choosing import Goal, Setting, settings_of
from paceline.server.tune.config_file import changes_of, config_text
from paceline.server.tune.contents import LoadContents
from paceline.server.tune.costs import Costs, alike, joined
from paceline.server.tune.live import FEWEST, MUCH_OTHERS, WARMUP_S, Live, LiveServer, serving
from paceline.server.tune.measuring import Layout
from paceline.server.tuning import new_loop

__all__ = ["Trials"]

_MANY_CLIENTS = 16
_BUSY_S, _MARGIN_S = 3.0, 5.0
_LEAST_TIMEOUT_S = 5.0
_BUSY = 0.7
"""Layouts are calibrated with at most this share of the load that they can serve, by what is known before."""


class Trials:
    """The model at `model`, whose own configuration is `config`, and which is served as `now` today."""

    def __init__(
        self,
        model: Path,
        config: pb.ModelConfig,
        load: LoadContents,
        now: Setting,
        seed: int,
        allow_python_models: bool,
    ) -> None:
        self._model, self._config, self._load, self._now, self._seed = model, config, load, now, seed
        self._flags = ["--allow-python-models=true"] if allow_python_models else []

    @contextmanager
    def server(self, setting: Setting) -> Iterator[LiveServer]:
        """The model as it is served with `setting`. Raises TuneError, also for what fails within."""
        text = config_text(self._config, setting, changes_of(self._config, self._now, setting), ())
        config = text_format.Parse(text, pb.ModelConfig())
        with serving(self._model, config, self._load.requests, self._flags) as server:
            yield server

    def load(self, server: LiveServer, goal: Goal, seconds: float) -> Live:
        """What the load of `goal` meets."""
        arrivals = self._arrivals(goal, seconds)
        if goal.rate and goal.p99_ns:  # what takes much longer needn't be waited for
            timeout_s = max(_LEAST_TIMEOUT_S, 2 * goal.p99_ns / 1e9)
            return server.load(seconds, arrivals=arrivals, timeout_s=timeout_s)
        return server.load(seconds, clients=goal.clients, arrivals=arrivals)

    def _arrivals(self, goal: Goal, seconds: float) -> Arrivals | None:
        return goal.arrivals(self._seed + 1, math.ceil(goal.rate * (seconds + _MARGIN_S)), seconds + WARMUP_S)

    def beside_clients(self, layout: Layout, goal: Goal, seconds: float) -> Layout:
        """`layout` with what executions and requests take beside the clients of `goal`, or many, if it has none: they
        fill whatever batches may have, small ones, or large."""
        at_once = self._at_once(layout, goal)
        clients = Goal(clients=goal.clients or _MANY_CLIENTS, contents=goal.contents)
        costs: Sequence[Costs] = ()
        for place in sorted({0, len(at_once) // 2, len(at_once) - 1}):

            def among(given: Costs, known: Sequence[Costs] = costs) -> Sequence[Costs]:
                return joined([*known, given])

            costs = self._costs(at_once[place], clients, seconds, among)
        return replace(layout, costs=costs)

    def beside_rate(self, layout: Layout, goal: Goal, seconds: float) -> Layout:
        """`layout`, of which it is known what clients cost, with what the rate of `goal` costs, or as much of it as
        isn't too much."""
        setting = self._at_once(layout, goal)[-1]
        # At random: a recording may have nothing within seconds, the more so if it is slower than it was.
        rate = min(goal.rate, _BUSY * setting.most_per_s(goal.mean_rows))

        def among(given: Costs) -> Sequence[Costs]:
            # With smaller batches, requests cost more, with larger ones less. But only clients come all at once, and
            # wait for each other.
            others = [replace(one, waits=given.waits) for one in layout.costs if not alike(one, given)]
            return joined([given, *others])

        costs = self._costs(setting, replace(goal, rate=rate, recorded=None), seconds, among)
        return replace(layout, costs=costs)

    def _at_once(self, layout: Layout, goal: Goal) -> list[Setting]:
        """Settings that wait for nothing, the one with the largest batches last."""
        found = settings_of([layout], self._now.policy, goal)
        return [one for one in found if not one.policy.max_queue_delay_ns]

    def _costs(
        self, setting: Setting, goal: Goal, seconds: float, among: Callable[[Costs], Sequence[Costs]]
    ) -> Sequence[Costs]:
        """Measured while others have little of the machine, if that comes about."""
        seconds = min(max(_BUSY_S, FEWEST / goal.rate) if goal.rate else _BUSY_S, seconds)
        with self.server(setting) as server:
            live = self.load(server, goal, seconds)
            if live.others > MUCH_OTHERS:
                live = min(live, self.load(server, goal, seconds), key=lambda one: one.others)
        found = calibrated(setting, goal, self._arrivals(goal, seconds), live, min(WARMUP_S, seconds), among)
        with asyncio.Runner(loop_factory=new_loop) as runner:
            return runner.run(found)
