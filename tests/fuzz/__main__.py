"""The long run: `python -m tests.fuzz [--seconds N] [TARGET…]`, by coverage if atheris is installed, else at random.

Findings are stored in the folder that `--out` names (`.fuzz` by default), as `<target>/finding-…`; add them to the
corpus, with the fix. Inputs that coverage kept are stored there too, and the next run begins with them.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import random
import subprocess
import sys
import time
from pathlib import Path

from tests.fuzz.judging import awake_s, judged, quiet
from tests.fuzz.mutation import mutated
from tests.fuzz.targets import CORPUS, NAMES, inputs, target

_HANG_S = 25


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"of {', '.join(NAMES)}; by default all")
    parser.add_argument("--seconds", type=int, default=600, help="for all targets together")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path(".fuzz"))
    given = parser.parse_args()
    names = given.targets or list(NAMES)
    by_coverage = importlib.util.find_spec("atheris") is not None
    if not by_coverage:
        print("no atheris here: inputs are changed by chance, without a look at what they reach", flush=True)
    fuzz = _by_coverage if by_coverage else _by_chance
    share_s = max(1, given.seconds // len(names))
    failed = [name for name in names if not fuzz(name, share_s, given.seed, given.out / name)]
    print(f"findings in: {', '.join(failed)}" if failed else "no findings")
    return 1 if failed else 0


def _by_coverage(name: str, seconds: int, seed: int, out: Path) -> bool:
    """Have atheris run one target in a separate process, which a finding ends."""
    out.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "tests.fuzz.coverage", name, str(out), str(CORPUS / name)]
    flags = [f"-max_total_time={seconds}", f"-seed={seed}", f"-timeout={_HANG_S}", "-max_len=4096", "-verbosity=1"]
    flags += [f"-artifact_prefix={out}/finding-", "-rss_limit_mb=4096", "-print_final_stats=1"]
    print(f"{name}: {seconds} s", flush=True)
    return subprocess.run([*command, *flags], check=False).returncode == 0


def _by_chance(name: str, seconds: int, seed: int, out: Path) -> bool:
    chance, one = random.Random(seed), target(name)
    corpus = [path.read_bytes() for path in inputs(name)]
    until_s, runs = time.monotonic() + seconds, 0
    while time.monotonic() < until_s:
        data = mutated(name, chance, corpus)
        try:
            with quiet():
                judged(one, data, awake_s)
        except Exception as error:  # noqa: BLE001 - a finding, whatever it is
            out.mkdir(parents=True, exist_ok=True)
            where = out / f"finding-{hashlib.sha1(data).hexdigest()}"
            where.write_bytes(data)
            print(f"{name}: {type(error).__name__}: {error}: {where}", flush=True)
            return False
        runs += 1
    print(f"{name}: {runs} runs", flush=True)
    return True


if __name__ == "__main__":
    sys.exit(main())
