"""A model on servers, with one setting or another: what loads meet there, and what requests cost.

Lives here: configurations to serve, which loads say what requests cost. Must not: start servers, or choose.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
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
from paceline.server.tune.live import WARMUP_S, Live, LiveServer, serving
from paceline.server.tune.measuring import Layout, TuneError
from paceline.server.tuning import new_loop

__all__ = ["Trials"]

_MANY_CLIENTS = 16
_ALONE_S, _BUSY_S, _MARGIN_S = 1.5, 3.0, 5.0
_LEAST_TIMEOUT_S = 5.0
_BUSY = 0.7
"""Layouts are calibrated with at most this share of the load that they can serve, by what is known before."""
_LEAST_SAVED = 0.2
"""Batches a request: where many clients don't share more, what a batch costs is part of what a request does."""


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
        text = config_text(self._config, setting, changes_of(self._now, setting), ())
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

    def batch_ns(self, seconds: float) -> int:
        """What a batch costs the server's event loop: by what a request costs it alone and among many, which share
        batches, as the model is served now. Raises TuneError."""
        with self.server(self._now) as server:
            alone, many = [server.load(min(_ALONE_S, seconds), clients=clients) for clients in (1, _MANY_CLIENTS)]
        if not alone.latencies.count:
            raise TuneError("the model is served, but answers none of a client's requests")
        saved = alone.batches_per_request - many.batches_per_request
        return round(max(0, alone.loop_ns - many.loop_ns) / saved) if saved > _LEAST_SAVED else 0

    def calibrated(self, layout: Layout, goal: Goal, batch_ns: int, seconds: float) -> Layout:
        """`layout` with what executions and requests take beside the load of `goal`, or as much as isn't too much."""
        # With batches as large as may be, which wait for nothing.
        setting = max(settings_of([layout], self._now.policy, goal), key=lambda one: one.policy.max_batch_rows)
        if goal.rate:
            most = _BUSY * setting.most_per_s(goal.mean_rows)
            # At random: a recording may have nothing within seconds, the more so if it is slower than it was.
            goal = replace(goal, rate=min(goal.rate, most), recorded=None)
        elif not goal.clients:
            goal = replace(goal, clients=_MANY_CLIENTS)
        seconds = min(_BUSY_S, seconds)
        with self.server(setting) as server:
            live = self.load(server, goal, seconds)
        found = calibrated(setting, goal, self._arrivals(goal, seconds), live, batch_ns, min(WARMUP_S, seconds))
        with asyncio.Runner(loop_factory=new_loop) as runner:
            return runner.run(found)
