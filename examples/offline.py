"""What the examples of offline work share: running `paceline bulk`, and reading what it has written."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq


def bulk(*arguments: str | Path) -> None:
    """Show the command and run it, with its progress and summary. Raises CalledProcessError."""
    words = ["bulk", *map(str, arguments)]
    print("$ paceline", shlex.join(words), flush=True)
    subprocess.run([sys.executable, "-m", "paceline", *words], check=True)


def parts(out: Path) -> Iterator[pa.Table]:
    """The output's parts, which have the input's order."""
    assert (out / "_SUCCESS").is_file()
    for path in sorted(out.glob("part-*.parquet")):
        yield pq.read_table(path)


def at_fault(out: Path) -> list[dict[str, object]]:
    """The rows without outputs: `file`, `row` and `reason` of each."""
    lines = [line for path in sorted(out.glob("_bad/part-*.jsonl")) for line in path.read_text().splitlines()]
    return [json.loads(line) for line in lines]
