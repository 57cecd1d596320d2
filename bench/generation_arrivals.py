"""Generations at random times: how long the first token takes, by how much of the capacity is asked for.

Lives here: the loads, what they are compared with, the ratio, a figure. Must not: assert. The capacity is what 32
clients get in a closed loop over streams, in each round anew; then requests come at random times (Poisson, the same in
each run) at shares of it. The aim, at 0.7 of it: a prompt's own prefill and three steps. `prefill_ms` is that of a
prompt of the mean length by the session alone, `step_ms` what a step of a full batch takes there.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import generation_requests, generations
from bench.figures import COLORS, pyplot, save
from bench.generations import FIXED, Part, Report, direct, serving
from bench.load import open_loop
from bench.report import Rounds
from bench.stats import spread
from bench.steps import BenchError
from tests.harness import ServerProcess

__all__ = ["SHARES", "draw", "main", "measure"]

SHARES = (0.3, 0.5, 0.7, 0.9)
_AIMED = 0.7
_STEPS = 3
_LABELS = ("first token, median", "first token, p99", "from token to token, median")
_WARMUP_S = 2.0
_DEADLINE_S = 60.0
_TOLD = (
    *(f"{name}_p{percent}_ms" for name in ("first", "token") for percent in (50, 90, 99)),
    "lag_p99_ms",
    "cores",
    "answers",
    "tokens",
)


def measure(part: Part, rounds: int, seconds: float, report: Report, shares: Sequence[float] = SHARES) -> None:
    """All rounds; each share of each is reported. Raises BenchError."""
    asked, full = part.asked(), part.full_batch()
    with serving(part, asked) as (server, folder, paths):
        for number in range(rounds):
            step_ms = 1e3 * part.clients / direct(part, folder, [full], seconds / 2)["tokens_per_s"]
            alone = [generation_requests.Wanted(full[0].prompt, 1)]
            prefill_ms = 1e3 / direct(part, folder, [alone], seconds / 2)["tokens_per_s"]
            capacity = generations.closed_load(server, paths, seconds)["tokens_per_s"]
            mean_tokens = statistics.mean(one.tokens for own in asked for one in own)
            for share in shares[::-1] if number % 2 else shares:
                found = _open(server, paths, share * capacity / mean_tokens, seconds, number)
                aim_ms = prefill_ms + _STEPS * step_ms
                report(
                    {
                        "share": share,
                        "prefill_ms": prefill_ms,
                        "step_ms": step_ms,
                        "capacity_per_s": capacity,
                        "first_of_aim": found["first_p50_ms"] / aim_ms,
                        **found,
                    }
                )


def _open(server: ServerProcess, paths: Sequence[Path], rate: float, seconds: float, seed: int) -> dict[str, Any]:
    messages = [one for path in paths for one in generation_requests.read_messages(path)]
    warmup_s = min(_WARMUP_S, seconds)
    found = open_loop(server.target, messages, rate, _DEADLINE_S, seconds, warmup_s, seed=seed, stream=True)
    if found["errors"] or not found["ok"]:
        raise BenchError(f"{found['ok']} answers, errors {found['errors']}")
    return {key: found[key] for key in _TOLD}


def draw(rounds: Sequence[dict[str, Any]], path: Path) -> None:
    """The time to the first token over the share of the capacity, and what is aimed at."""
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(6.4, 3.2))
    shares = sorted({one["share"] for one in rounds})
    for color, key, label in zip(COLORS, ("first_p50_ms", "first_p99_ms", "token_p50_ms"), _LABELS, strict=False):
        found = [spread([one[key] for one in rounds if one["share"] == share]) for share in shares]
        axes.plot(shares, [one.median for one in found], "o-", markersize=3, color=color, label=label)
        axes.fill_between(shares, [one.low for one in found], [one.high for one in found], color=color, alpha=0.15)
    aim = spread([one["prefill_ms"] + _STEPS * one["step_ms"] for one in rounds])
    axes.axhline(aim.median, color="black", linewidth=0.8, linestyle=":", label="a prefill and three steps")
    axes.set(xlabel="load, share of what 32 clients get in a closed loop", ylabel="ms", yscale="log")
    axes.legend(fontsize=7, frameon=False)
    save(figure, path)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.generation_arrivals", description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5, help="medians are reported (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=20.0, help="per load (default: %(default)s)")
    parser.add_argument("--figure", type=Path, help="where to draw")
    got = parser.parse_args(arguments)
    rounds = Rounds()
    measure(FIXED, got.rounds, got.seconds, rounds.add)
    keys = ("first_of_aim", "first_p50_ms", "first_p99_ms", "prefill_ms", "step_ms", "lag_p99_ms")
    aimed = Rounds(one for one in rounds if one["share"] == _AIMED)
    print(f"\nAt {_AIMED}:\n\n{aimed.medians(keys)}", flush=True)
    if got.figure:
        draw(rounds, got.figure)


if __name__ == "__main__":
    main()
