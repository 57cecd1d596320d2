"""The whole benchmark: `python -m bench`.

Lives here: what is measured in which order, and the rounds. Must not: measure (steps) or format (report). Rounds repeat
all steps, neighbours in a list being compared with each other; every other round goes backwards, so that what warms up
or wears out in the course of time strikes both sides.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import models, report
from bench.machine import facts
from bench.stats import Sample
from bench.steps import BenchError, Direct, EchoProcess, Load, Step, Subject, run_module
from tests.harness import REPO, ServerProcess

__all__ = ["main"]

_OUT = REPO / "bench" / "results" / "latest.json"


@dataclass(frozen=True, slots=True)
class Settings:
    """How long: so many rounds, seconds per step, seconds of warm-up before it, seconds per micro benchmark."""

    rounds: int
    seconds: float
    warmup_s: float
    micro_s: float


FULL = Settings(rounds=5, seconds=2.5, warmup_s=0.5, micro_s=0.5)
QUICK = Settings(rounds=2, seconds=0.8, warmup_s=0.3, micro_s=0.1)


def steps(made: models.Bench, product: Subject, echo: Subject) -> list[Step]:
    """Everything that is measured in a round."""
    tiny, mlp, unbatched = (made.requests[name] for name in ("tiny", "mlp", "mlp_unbatched"))
    return [
        Load("tiny 64 product", product, tiny, 64, "tiny"),
        Load("tiny 64 echo", echo, tiny, 64),
        Load("tiny 1 product", product, tiny, 1, "tiny"),
        Load("tiny 1 echo", echo, tiny, 1),
        Load("mlp 64 unbatched", product, unbatched, 64, "mlp_unbatched"),
        Load("mlp 64 product", product, mlp, 64, "mlp"),
        Direct("mlp 64 direct", made.mlp, 64),
        Load("mlp 16 product", product, mlp, 16, "mlp"),
        Direct("mlp 16 direct", made.mlp, 16),
    ]


def measure(wanted: Sequence[Step], settings: Settings) -> list[dict[str, Sample]]:
    """All steps, round by round."""
    rounds: list[dict[str, Sample]] = []
    for number in range(settings.rounds):
        print(f"round {number + 1} of {settings.rounds}", file=sys.stderr, flush=True)
        order = reversed(wanted) if number % 2 else wanted
        rounds.append({step.name: step.measure(settings.seconds, settings.warmup_s) for step in order})
    return rounds


def run(settings: Settings) -> tuple[str, dict[str, Any]]:
    """Measure everything; the report for people and the one for programs. Leaves no process and no file behind."""
    machine = facts()
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        made = models.build(Path(folder))
        with ServerProcess(made.repository) as product, EchoProcess() as echo:
            series = report.series_of(measure(steps(made, product, echo), settings))
        print("session.run, queue and stacking alone", file=sys.stderr, flush=True)
        direct = run_module("direct", str(made.mlp), "--seconds", str(settings.micro_s), timeout_s=120)
        micro = run_module("micro", "--seconds", str(settings.micro_s), timeout_s=120)
    more = {"machine": machine, "direct_rows_per_s": direct, "micro": micro}
    return report.text(series, machine, direct, micro), report.whole(series, more)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench", description="Measure the product against what bounds it.")
    parser.add_argument("--quick", action="store_true", help="a glance in less than a minute; noisy")
    parser.add_argument("--out", type=Path, default=_OUT, help="where the JSON report goes (default: %(default)s)")
    got = parser.parse_args(arguments)
    # The orderly way out, on which every process and file of ours goes, is that of an exception.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        people, programs = run(QUICK if got.quick else FULL)
    except BenchError as error:
        sys.exit(f"bench: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
    got.out.parent.mkdir(parents=True, exist_ok=True)
    got.out.write_text(json.dumps(programs, indent=2) + "\n")
    print(f"{people}\n\n{got.out}")


if __name__ == "__main__":
    main()
