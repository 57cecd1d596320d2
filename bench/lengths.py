"""Texts of different lengths: what filling them up to share batches is worth on one thread.

Lives here: the loads, the best that could be had, the ratios, a figure. Must not: assert. A server has one encoder
twice, with its lengths found and with `paceline.pad` off, so that everything else is equal. The best that could be
had: all texts are known, sorted by length, and run in batches of the best size, in a process without a server.

1. `closed`: 64 callers, texts of log-normal lengths. Texts per second, over the best and over equal lengths alone.
2. `open`: half of the texts have up to 32 words and half 200 or more, at 60 % of what callers in a closed loop got.
   The median latency of the short ones over that of the long ones.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

from bench import text_model
from bench.figures import COLORS, pyplot, save
from bench.load import closed, open_loop
from bench.report import Rounds
from bench.sessions import open_session
from bench.stats import spread
from bench.steps import run_module
from tests.harness import ServerProcess

__all__ = ["CLIENTS", "TEXTS", "main", "measure", "packed_per_s", "requests_of", "texts_per_s"]

CLIENTS = 64
TEXTS = 128
_SIZES = (1, 2, 4, 8, 16, 32)
_SHARE = 0.6
_DEADLINE_S = 30.0


def packed_per_s(file: Path, sizes: Sequence[int], seconds: float) -> dict[int, float]:
    """Texts per second of one thread, by rows of a batch: sorted by length, nothing but `session.run`. Each size is
    measured over all texts, again and again until `seconds` have passed."""
    session = open_session(file)
    found, ordered = {}, sorted(sizes)
    for rows in _SIZES:
        batches = [text_model.feeds(ordered[at : at + rows]) for at in range(0, len(ordered), rows)]
        session.run(None, batches[-1])
        began, texts = time.perf_counter(), 0
        while not texts or time.perf_counter() - began < seconds:
            for batch in batches:
                session.run(None, batch)
            texts += len(ordered)
        found[rows] = texts / (time.perf_counter() - began)
    return found


def measure(seconds: float, sizes: text_model.Sizes) -> dict[str, Any]:
    """One round of everything. Raises BenchError for errors of requests."""
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as name:
        folder = Path(name)
        file, repository = text_model.write(folder, sizes), folder / "models"
        for model in ("pads", "exact"):
            text_model.add(model, file, repository, pads=model == "pads")
        mixed, random = text_model.lengths(TEXTS), Random(1)
        short = [random.randint(8, 32) for _ in range(TEXTS // 2)]
        long = [random.randint(200, 256) for _ in range(TEXTS // 2)]
        found: dict[str, Any] = {
            "packed": run_module("lengths", "--packed", str(file), "--seconds", str(seconds / 4), timeout_s=600)
        }
        with ServerProcess(repository, args=["--model-control-mode=none"], fresh=True) as server:
            for model in ("pads", "exact"):
                found[model] = texts_per_s(server.target, requests_of(folder, model, mixed), seconds)
            in_turn = [size for pair in zip(short, long, strict=True) for size in pair]
            both = texts_per_s(server.target, requests_of(folder, "pads", in_turn), seconds)
            rate = _SHARE * both / 2
            with ThreadPoolExecutor() as pool:
                running = {}
                for kind, texts in (("short", short), ("long", long)):
                    requests = requests_of(folder, "pads", texts)
                    times = rate, _DEADLINE_S, 2 * seconds, 1.0
                    running[kind] = pool.submit(open_loop, server.target, requests, *times)
                found |= {kind: load.result()["p50_ms"] for kind, load in running.items()}
            found["padding"] = {
                name: value for name, value in server.metrics().items() if "elements" in name or "growth" in name
            }
    best = max(found["packed"].values())
    return found | {
        "of_best": found["pads"] / best,
        "of_exact": found["pads"] / found["exact"],
        "short_of_long": found["short"] / found["long"],
    }


def requests_of(folder: Path, model: str, sizes: Sequence[int]) -> tuple[Path, ...]:
    """Files in `folder`, each with a text of one of these numbers of words."""
    paths = []
    for number, size in enumerate(sizes):
        paths.append(folder / f"{model}-{size}-{number}")
        paths[-1].write_bytes(text_model.request(model, size))
    return tuple(paths)


def texts_per_s(target: str, requests: Sequence[Path], seconds: float, processes: int = 1) -> float:
    """Of 64 callers who send these texts in turn. Raises BenchError."""
    found = closed(target, requests, CLIENTS, seconds, min(3.0, seconds), processes=processes)
    return float(found["requests_per_s"])


def draw(rounds: Sequence[dict[str, Any]], path: Path) -> None:
    """Texts per second of all that is compared, with the best and the worst round."""
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(6.4, 2.6))
    packed = [max(one["packed"].values()) for one in rounds]
    bars = (
        ("equal lengths share batches", [one["exact"] for one in rounds]),
        ("different lengths share batches", [one["pads"] for one in rounds]),
        ("all texts known, sorted, no server", packed),
    )
    for place, (label, values) in enumerate(bars):
        found = spread(values)
        error = [[found.median - found.low], [found.high - found.median]]
        axes.barh(place, found.median, xerr=error, color=COLORS[place], height=0.6)
        axes.annotate(f"{found.median:.0f}", (found.median, place), xytext=(12, -3), textcoords="offset points")
        axes.annotate(label, (0, place), xytext=(6, 12), textcoords="offset points", fontsize=8)
    axes.set(xlabel="texts per second, one thread", yticks=[], xlim=(0, 1.2 * max(packed)), ylim=(-0.5, 2.7))
    save(figure, path)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.lengths", description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3, help="the median is reported (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=8.0, help="per load (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="a tiny model: check that everything works")
    parser.add_argument("--packed", type=Path, metavar="MODEL", help="only the best that could be had, as JSON")
    parser.add_argument("--figure", type=Path, help="where to draw")
    got = parser.parse_args(arguments)
    if got.packed:
        print(json.dumps(packed_per_s(got.packed, text_model.lengths(4 * TEXTS), got.seconds)))
        return
    rounds = Rounds()
    for _ in range(got.rounds):
        rounds.add(measure(got.seconds, text_model.QUICK if got.quick else text_model.FULL))
    print(f"\n{rounds.medians(('of_best', 'of_exact', 'short_of_long'))}", flush=True)
    if got.figure:
        draw(rounds, got.figure)


if __name__ == "__main__":
    main()
