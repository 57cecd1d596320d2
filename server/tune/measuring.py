"""How long a model's executions take, by trying: by rows and their size, for each layout of instances and threads, all
of them busy.

Lives here: what is tried and for how long. Must not: open models, or judge.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from paceline.backends.base import DeviceKind
from paceline.backends.spec import Array
from paceline.clients.inputs import InputError
from paceline.server.engine import Engine
from paceline.server.models.defaults import Offline
from paceline.server.models.served_model import ServedModel
from paceline.server.requests.inner_request import InnerRequest
from paceline.server.tune.costs import Costs
from paceline.server.tune.curve import Curve, Curves

__all__ = ["Layout", "TuneError", "measure", "sizes_to_try"]

InputsOf = Callable[[int], Mapping[str, Array]]
"""Inputs of so many rows."""

_WINDOW_NS, _LONGEST_NS = 300_000_000, 2_000_000_000
_ENOUGH = 20
"""Executions of so many rows: as many as their window has, at least these, unless they take too long."""
_MOST_NS = 12_000_000_000
"""Nothing larger is tried after this, on a layout; if rows of several sizes are tried, after a share of it each."""
_LOSING, _MOST_LOSING = 0.7, 2
"""Larger batches aren't tried once so many in a row compute that much fewer rows a second than the best."""


class TuneError(InputError):
    """A model can't be tuned, or not so."""


@dataclass(frozen=True, slots=True)
class Layout:
    """`instances` that execute at the same time, asked for as `offline`, and what was measured of them: how long
    executions take on their own while all are busy, and what requests cost besides, by ascending numbers of requests
    that share a batch. `spins`: whether idle threads wait for work by spinning, if they may: with `allow_spinning`.
    `gpus`: on how many they are; 0: on CPUs. Each instance has `slots`, of which one computes at a time; of what an
    execution takes, the share `prepared` is spent while another slot computes."""

    offline: Offline
    instances: int
    curves: Curves
    costs: Sequence[Costs] = (Costs(),)
    spins: bool = False
    allow_spinning: bool = True
    gpus: int = 0
    slots: int = 1
    prepared: float = 0.0

    @property
    def count(self) -> int:
        """Of the instances, those on each device, as `instance_group.count` says it."""
        return self.instances // max(1, self.gpus)

    @property
    def curve(self) -> Curve:
        """Of rows of the typical size."""
        return self.curves.typical

    def rows_per_s(self, most_rows: int) -> float:
        """What all instances compute, in batches of the best size up to `most_rows`."""
        return self.instances * self.curve.rows_per_s(most_rows) / (1 - self.prepared)


def sizes_to_try(most_rows: int) -> list[int]:
    """Powers of two, and the largest."""
    return sorted({*(1 << power for power in range(most_rows.bit_length())), most_rows})


async def measure(
    engine: Engine,
    served: ServedModel,
    inputs_by_size: Mapping[int, InputsOf],
    typical_size: int,
    batches: Sequence[int],
    offline: Offline,
) -> Layout:
    """Try `batches` of so many rows, which ascend, of each size, on an engine for offline work: each request is an
    execution. Raises TuneError."""
    runners = served.instances.runners
    instances = len({*runners.values()})
    gpus = len({one.device for one in runners.values() if one.device.kind is not DeviceKind.CPU})
    curves, handling_ns, prepared = dict[int, Curve](), 0, 1.0
    for size, inputs_of in inputs_by_size.items():
        share_ns = _MOST_NS // len(inputs_by_size)
        curves[size], loop_ns, beside = await _curve(engine, served, inputs_of, batches, share_ns, instances)
        handling_ns, prepared = handling_ns or loop_ns, min(prepared, beside)
    return Layout(
        offline, instances, Curves(curves, typical_size), [Costs(loop_ns=handling_ns)],
        gpus=gpus, slots=len(runners) // instances, prepared=prepared,
    )  # fmt: skip


async def _curve(
    engine: Engine, served: ServedModel, inputs_of: InputsOf, batches: Sequence[int], most_ns: int, instances: int
) -> tuple[Curve, int, float]:
    """Of rows of one size, with the event loop's work for a request, and the share of executions that is spent while
    other slots of their instances compute."""
    began_ns = time.monotonic_ns()
    durations_ns: dict[int, Sequence[int]] = {}
    best = handling_ns = losing = spent_ns = busy_ns = 0.0

    async def again(rows: int) -> None:
        found, _, _ = await _executions(engine, served, inputs_of(rows))
        durations_ns[rows] = min(durations_ns[rows], found, key=lambda one: sum(one) / len(one))

    for rows in batches:
        found, whole_ns, loop_ns = await _executions(engine, served, inputs_of(rows))
        # Of the smallest: the work for a request itself, apart from its rows.
        handling_ns = handling_ns or loop_ns / len(found)
        durations_ns[rows] = found
        # Executions of an instance with one slot can't have taken longer than the window: then, both are equal.
        spent_ns += sum(found) / len(found)
        busy_ns += min(sum(found), whole_ns * instances) / len(found)
        per_s = rows * len(found) / max(1, sum(found))
        best = max(best, per_s)
        losing = losing + 1 if per_s < _LOSING * best else 0
        if losing == _MOST_LOSING:  # something else may have slowed them down
            await again(rows)
            if rows * 1e9 / max(1.0, Curve(durations_ns).mean_ns(rows)) < _LOSING * best:
                break
            losing = 0
        if time.monotonic_ns() - began_ns > most_ns:
            break
    for rows in Curve(durations_ns).doubtful:
        await again(rows)
    return Curve(durations_ns), int(handling_ns), 1 - busy_ns / max(1.0, spent_ns)


async def _executions(
    engine: Engine, served: ServedModel, inputs: Mapping[str, Array]
) -> tuple[Sequence[int], int, int]:
    """How long each of them took, in ascending order, all of them together, and the event loop's work for them."""
    # One more waits for each that executes, so that none is ever idle.
    at_once = 2 * len(served.instances.runners)
    await asyncio.gather(*(_executed_ns(engine, served, inputs) for _ in range(at_once)))  # first ones allocate
    used_ns, began_ns, found = time.thread_time_ns(), time.monotonic_ns(), list[int]()

    async def work() -> None:
        while (
            not found
            or (spent_ns := time.monotonic_ns() - began_ns) < _WINDOW_NS
            or (len(found) < _ENOUGH and spent_ns < _LONGEST_NS)
        ):
            found.append(await _executed_ns(engine, served, inputs))

    await asyncio.gather(*(work() for _ in range(at_once)))
    return sorted(found), time.monotonic_ns() - began_ns, time.thread_time_ns() - used_ns


async def _executed_ns(engine: Engine, served: ServedModel, inputs: Mapping[str, Array]) -> int:
    """How long one execution took, without waiting for its turn."""
    ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def on_end(request: InnerRequest) -> None:
        if ended.done():
            return
        if request.error is None:
            ended.set_result(sum(request.spent_ns))
        else:
            where = f"from model '{served.name}', measured with made-up inputs"
            ended.set_exception(TuneError(f"{request.error} ({where})"))

    engine.announce(served, inputs, {}, on_end)
    return await ended
