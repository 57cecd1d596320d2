"""A model on servers, with one setting or another: what loads meet there, and what requests cost.

Lives here: configurations to serve, which loads say what requests cost. Must not: start servers, or choose.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from google.protobuf import text_format

from paceline.protos import model_config_pb2 as pb
from paceline.server.tune.choosing import Goal, Setting
from paceline.server.tune.config_file import changes_of, config_text
from paceline.server.tune.contents import LoadContents
from paceline.server.tune.live import WARMUP_S, Live, LiveServer, serving
from paceline.server.tune.measuring import TuneError
from paceline.server.tune.simulation import Costs

__all__ = ["Trials"]

_MANY_CLIENTS = 16
_ALONE_S, _BUSY_S, _MARGIN_S = 1.5, 3.0, 5.0
_LEAST_TIMEOUT_S = 5.0
_BUSY = 0.7
"""Costs of requests are measured with at most this share of the load that can be served."""


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
        requests = math.ceil(goal.rate * (seconds + _MARGIN_S))
        arrivals = goal.arrivals(self._seed + 1, requests, seconds + WARMUP_S)
        if goal.rate and goal.p99_ns:  # what takes much longer needn't be waited for
            timeout_s = max(_LEAST_TIMEOUT_S, 2 * goal.p99_ns / 1e9)
            return server.load(seconds, arrivals=arrivals, timeout_s=timeout_s)
        return server.load(seconds, clients=goal.clients, arrivals=arrivals)

    def costs(self, server: LiveServer, goal: Goal, seconds: float) -> Costs:
        """What requests cost besides their execution, from loads on the model as it is `now`, of `seconds` at most: the
        one of `goal`, if that isn't too much, and the one of a single client. Of that, what is left when all else is
        known is on the way."""
        layout = self._now.layout
        alone = server.load(min(_ALONE_S, seconds), clients=1)
        if not alone.latencies.count:
            raise TuneError("the model is served, but answers none of a client's requests")
        if goal.rate:
            most = _BUSY * self._now.most_per_s(goal.mean_rows)
            # At random: a recording may have nothing within seconds, the more so if it is slower than it was.
            busy = self.load(server, replace(goal, rate=min(goal.rate, most), recorded=None), min(_BUSY_S, seconds))
        else:
            busy = server.load(min(_BUSY_S, seconds), clients=goal.clients or _MANY_CLIENTS)
        first = self._load.contents[0]
        executed_ns = min(layout.curve.cost(first.rows, 0.5), alone.executed_ns or math.inf)
        left_ns = (alone.latencies.percentile_ns(50) or 0.0) - executed_ns - busy.loop_ns - busy.sender_ns
        return Costs(busy.loop_ns, busy.sender_ns, max(0, round(left_ns)))
