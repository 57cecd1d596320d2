"""Serve magika's model, classify the files of a folder with many concurrent clients, check every answer.

    python -m examples.magika.demo [FOLDER]

Each file is one request of one row, as if from a different user; the server batches them. The model's answer over gRPC
is compared, file by file, with the answer of the package magika. The last line has the result.
"""

from __future__ import annotations

import asyncio
import sys
import sysconfig
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import click
from magika import Magika

from examples.magika.build import build
from examples.magika.features import features
from examples.serving import CLIENTS, batch_sizes, clients, serving, show_batches
from paceline.clients import AsyncInferenceClient

REPOSITORY = Path("models")
MAX_FILES = 256
FILES_PER_KIND = 12
SHOWN_LABELS = 8
TOLERANCE = 1e-2
"""By how much equal scores may differ: in a batch of another size, sums are rounded in another order, which moves an
undecided score in its third digit. Labels whose scores are that close to each other count as equal."""


@dataclass(frozen=True)
class Verdict:
    path: Path
    scores: dict[str, float]

    @property
    def label(self) -> str:
        return max(self.scores, key=self.scores.__getitem__)

    @property
    def score(self) -> float:
        return self.scores[self.label]


def pick_files(folder: Path) -> list[Path]:
    """A mixture: some files of each suffix, in a stable order."""
    kinds: Counter[str] = Counter()
    picked: list[Path] = []
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.is_symlink() and kinds[path.suffix] < FILES_PER_KIND:
            kinds[path.suffix] += 1
            picked.append(path)
    return picked[:MAX_FILES]


async def classify(grpc_port: int, paths: list[Path], labels: list[str], done: Callable[[int], None]) -> list[Verdict]:
    """One request per file, from `CLIENTS` clients at once. Calls `done` with 1 after each file."""
    waiting = iter(paths)
    verdicts: list[Verdict] = []

    async def one_client(client: AsyncInferenceClient) -> None:
        for path in waiting:
            row = features(path)
            if row is not None:
                result = await client.infer("magika", {"bytes": row})
                verdicts.append(Verdict(path, dict(zip(labels, result["target_label"][0].tolist(), strict=True))))
            done(1)

    async with clients(grpc_port) as many:
        await asyncio.gather(*(one_client(client) for client in many))
    return sorted(verdicts, key=lambda verdict: verdict.path)


def disagreements(verdicts: list[Verdict], done: Callable[[int], None]) -> list[str]:
    """Where the served model and the package differ. Calls `done` with numbers of files compared."""
    magika = Magika()
    lines = []
    for first in range(0, len(verdicts), CLIENTS):
        some = verdicts[first : first + CLIENTS]
        for verdict, result in zip(some, magika.identify_paths([each.path for each in some]), strict=True):
            own, own_score = str(result.prediction.dl.label), float(result.prediction.score)
            if abs(own_score - verdict.scores[own]) > TOLERANCE or verdict.score - verdict.scores[own] > TOLERANCE:
                said = f"served {verdict.label} {verdict.score:.6f}, magika {own} {own_score:.6f}"
                lines.append(f"{verdict.path}: {said}")
        done(len(some))
    return lines


def show(verdicts: list[Verdict], sizes: list[tuple[str, int]], mean: float) -> None:
    """A table of labels, and one of batches."""
    labels = Counter(verdict.label for verdict in verdicts).most_common()
    print("files by label: " + ", ".join(f"{label} {count}" for label, count in labels[:SHOWN_LABELS]), end="")
    print(f", {len(labels) - SHOWN_LABELS} other labels" if len(labels) > SHOWN_LABELS else "")
    show_batches(sizes, mean)


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else sysconfig.get_paths()["platlib"])
    labels = (build(REPOSITORY) / "labels.txt").read_text().splitlines()
    paths = pick_files(folder)
    with serving(REPOSITORY) as (grpc_port, metrics_port):
        with click.progressbar(length=len(paths), label=f"asking the server, {CLIENTS} files at a time") as bar:
            began = time.perf_counter()
            verdicts = asyncio.run(classify(grpc_port, paths, labels, bar.update))
            took_s = time.perf_counter() - began
        sizes, mean = batch_sizes(metrics_port, "magika")
    with click.progressbar(length=len(verdicts), label="asking the package magika the same") as bar:
        wrong = disagreements(verdicts, bar.update)
    show(verdicts, sizes, mean)
    for line in wrong:
        print("DIFFERS:", line)
    if wrong or not verdicts:
        sys.exit(f"{len(wrong)} of {len(verdicts)} answers differ from the package magika's own")
    print(f"{len(verdicts)} files in {took_s:.1f} s: all labels and scores are those of the package magika itself")


if __name__ == "__main__":
    main()
