"""What batching decides, measured: `python -m bench.batching`.

Lives here: which studies there are, how long they take, where their results go. Must not: measure, simulate or draw.
Simulations depend on nothing but their seeds; what runs over gRPC depends on the machine and says so.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.batching import figures, idle, live, overload, sizes
from bench.machine import facts
from bench.report import table
from bench.steps import BenchError
from tests.harness import REPO

__all__ = ["STUDIES", "main"]

_OUT = REPO / "bench" / "results"


@dataclass(frozen=True, slots=True)
class Settings:
    """Virtual seconds, requests, batches and seeds of the simulations; rounds and seconds of the runs over gRPC."""

    overload: overload.Settings
    requests: int
    batches: int
    sizes_s: float
    seeds: int
    rounds: int
    seconds: float
    loads: tuple[float, ...]


FULL = Settings(overload.Settings(20.0, 3), 20_000, 400, 20.0, 3, 3, 2.5, (0.5, 1.0, 1.5, 2.0, 3.0))
QUICK = Settings(overload.Settings(4.0, 1), 3_000, 100, 10.0, 1, 1, 1.0, (1.0, 2.0))

Found = dict[str, Any]
"""A study's points, by name, ready for JSON."""


def _overload(settings: Settings, folder: Path | None) -> tuple[str, Found]:
    points = overload.measure(settings.overload)
    prepared = overload.Settings(settings.overload.seconds, settings.overload.seeds, warmup_s=20.0)
    first_use = overload.measure(prepared, (2.0, 3.0), (0.5, 1.0, 2.0), first_use=True)
    if folder is not None:
        figures.draw_overload(points, folder / "overload.svg")
    text = "\n\n".join(
        [
            "Overload, simulated: answers in time / capacity, by offered load",
            overload.text(points),
            "The same, 20 s after a start at which the first execution of each size took 20 batches longer",
            overload.text(first_use),
        ]
    )
    return text, {"points": _dicts(points), "first_use": _dicts(first_use)}


def _idle(settings: Settings, folder: Path | None) -> tuple[str, Found]:
    opened = idle.measure_open(settings.requests, settings.seeds)
    closed = idle.measure_closed(settings.batches, settings.seeds)
    if folder is not None:
        figures.draw_idle(opened, closed, folder / "release-when-idle.svg")
    text = "Rules for an idle instance, simulated: each over greedy\n\n" + idle.text([*opened, *closed])
    return text, {"open": _dicts(opened), "closed": _dicts(closed)}


def _sizes(settings: Settings, folder: Path | None) -> tuple[str, Found]:
    cold = sizes.measure_cold(settings.sizes_s, settings.seeds)
    cut = sizes.measure_cut(settings.sizes_s, settings.seeds)
    if folder is not None:
        figures.draw_sizes(cold, cut, folder / "batch-sizes.svg")
    text = "\n\n".join(
        [
            f"Cold start, simulated: {settings.sizes_s:g} s; each new size takes {sizes.FIRST_USE_NS // 10**6} ms more",
            sizes.text_cold(cold),
            "Stepped cost, simulated: cut down by cost over always padded up",
            sizes.text_cut(cut),
        ]
    )
    return text, {"cold": _dicts(cold), "cut": _dicts(cut)}


def _live_overload(settings: Settings, folder: Path | None) -> tuple[str, Found]:
    points = live.measure_overload(settings.rounds, settings.seconds, settings.loads)
    head = ["deadline_aware", *(f"{load:g} x" for load in settings.loads)]
    found = {(one.aware, one.load): one.goodput for one in points}
    rows = [[str(aware).lower(), *(f"{found[aware, load]:.2f}" for load in settings.loads)] for aware in (True, False)]
    what = f"{live.CAPACITY_PER_S:.0f} requests/s nominal, deadline {live.DEADLINE:g} full batches"
    return f"Overload over gRPC: answers in time / capacity ({what})\n\n{table([head, *rows])}", {
        "points": _dicts(points)
    }


def _live_shapes(settings: Settings, folder: Path | None) -> tuple[str, Found]:
    points = live.measure_shapes(settings.rounds, settings.seconds)
    head = ["model, shapes", "throughput / one shape (lowest - highest)", "rows/batch", "answers/s"]
    rows = [
        [
            f"{one.model}, {one.shapes}",
            f"{one.throughput.median:.2f} ({one.throughput.low:.2f} - {one.throughput.high:.2f})",
            f"{one.rows_per_batch:.1f}",
            f"{one.answers_per_s:,.0f}",
        ]
        for one in points
    ]
    return f"Mixed shapes over gRPC, 64 clients\n\n{table([head, *rows])}", {"points": _dicts(points)}


def _live_sizes(settings: Settings, folder: Path | None) -> tuple[str, Found]:
    points = live.measure_sizes(settings.rounds, 2 * settings.seconds)
    head = ["sizes", "rows/batch", "p50 ms", "p90 ms", "p99 ms", "answered"]
    rows = [
        [
            one.sizes,
            *(f"{value:.1f}" for value in (one.mean_rows, one.p50_ms, one.p90_ms, one.p99_ms)),
            f"{one.answered:.2f}",
        ]
        for one in points
    ]
    return f"Cold start over gRPC, {2 * settings.seconds:g} s at 500 requests/s\n\n{table([head, *rows])}", {
        "points": _dicts(points)
    }


STUDIES: Mapping[str, Callable[[Settings, Path | None], tuple[str, Found]]] = {
    "overload": _overload,
    "idle": _idle,
    "sizes": _sizes,
    "live-shapes": _live_shapes,
    "live-overload": _live_overload,
    "live-sizes": _live_sizes,
}


def _dicts(points: Sequence[Any]) -> list[dict[str, Any]]:
    return [asdict(one) for one in points]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.batching", description="Measure batching decisions.")
    parser.add_argument("studies", nargs="*", choices=[*STUDIES, []], help=f"default: all of {', '.join(STUDIES)}")
    parser.add_argument("--quick", action="store_true", help="short and noisy")
    parser.add_argument("--out", type=Path, default=_OUT, help="folder for the JSON (default: %(default)s)")
    parser.add_argument("--figures", type=Path, help="folder for figures of the simulations (default: none)")
    got = parser.parse_args(arguments)
    # SIGTERM raises an exception, so that every process and file of ours is cleaned up.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    whole: dict[str, Any] = {"machine": facts()}
    try:
        for name in got.studies or STUDIES:
            text, whole[name] = STUDIES[name](QUICK if got.quick else FULL, got.figures)
            print(f"{text}\n", flush=True)
    except BenchError as error:
        sys.exit(f"bench: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
    got.out.mkdir(parents=True, exist_ok=True)
    path = got.out / "batching.json"
    path.write_text(json.dumps(whole, indent=2) + "\n")
    print(path)
