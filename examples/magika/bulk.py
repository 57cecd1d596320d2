"""Find the types of all files of a folder with `paceline bulk`, and compare them with ONNX Runtime's own answers.

    python -m examples.magika.bulk [FOLDER]

The model's input, a row of numbers for each file, is written to a Parquet file first. Files that are too short to be
classified have none there: they are rows at fault, and end in `_bad`. The last line has the result.
"""

from __future__ import annotations

import sys
import sysconfig
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import click
import numpy as np
import onnxruntime as ort  # type: ignore[import-untyped,unused-ignore]
import pyarrow as pa
import pyarrow.parquet as pq

from examples.magika.build import build
from examples.magika.demo import SHOWN_LABELS, TOLERANCE
from examples.magika.features import features
from examples.offline import at_fault, bulk, parts

ROWS = 1_024
WIDTH = 2_048
INPUT = pa.schema({"path": pa.string(), "bytes": pa.list_(pa.int32(), WIDTH)})


def all_files(folder: Path) -> list[Path]:
    """In a stable order, without links."""
    return sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def write_features(paths: Iterable[Path], file: Path) -> None:
    """A row for each path: with null where the file is too short."""
    with pq.ParquetWriter(file, INPUT, compression="zstd") as writer:
        waiting = list(paths)
        for first in range(0, len(waiting), ROWS):
            some = waiting[first : first + ROWS]
            found = [features(path) for path in some]
            values = np.concatenate([np.zeros((1, WIDTH), np.int32) if row is None else row for row in found])
            missing = pa.array([row is None for row in found])
            column = pa.FixedSizeListArray.from_arrays(pa.array(values.ravel()), WIDTH, mask=missing)
            # A path needn't be UTF-8, a column of text has to be.
            names = pa.array([str(path).encode(errors="replace").decode() for path in some])
            writer.write_table(pa.Table.from_arrays([names, column], schema=INPUT))


def directly(model: Path, file: Path) -> Iterator[tuple[list[str], np.ndarray]]:
    """Paths and scores from ONNX Runtime alone, of the rows that have numbers."""
    session = ort.InferenceSession(str(model / "1" / "model.onnx"), providers=["CPUExecutionProvider"])
    for batch in pq.ParquetFile(file).iter_batches(ROWS):
        rows = batch.filter(batch["bytes"].is_valid())
        if rows.num_rows:
            values = rows["bytes"].flatten().to_numpy().reshape(-1, WIDTH)
            yield rows["path"].to_pylist(), session.run(["target_label"], {"bytes": values})[0]


def differences(model: Path, file: Path, out: Path) -> tuple[list[str], Counter[int]]:
    """Which files have other scores, or another place, than by ONNX Runtime alone; how many files each label has."""
    written = pa.concat_tables(parts(out))
    place, wrong, labels = 0, list[str](), Counter[int]()
    for paths, expected in directly(model, file):
        rows = written.slice(place, len(paths))
        place += len(paths)
        if rows["path"].to_pylist() != paths:
            return [f"rows {place - len(paths)} to {place} are other files than in the input"], labels
        scores = rows["target_label"].combine_chunks().flatten().to_numpy().reshape(len(paths), -1)
        labels.update(scores.argmax(axis=1).tolist())
        far = np.abs(scores - expected).max(axis=1) > TOLERANCE
        wrong += [paths[at] for at in np.flatnonzero(far)]
    if place != written.num_rows:
        wrong.append(f"{written.num_rows - place} rows that the input doesn't have")
    return wrong, labels


def compare(paths: list[Path], work: Path) -> str:
    """Have `paths` classified in the folder `work`; the result in words. Exits if anything is amiss."""
    model, file, out = build(work / "models"), work / "files.parquet", work / "types"
    with click.progressbar(paths, label="reading the files") as bar:
        write_features(bar, file)
    bulk(model, "-i", file, "-o", out, "--keep", "path", "--max-bad", "50%")
    wrong, labels = differences(model, file, out)
    for line in wrong:
        print("DIFFERS:", line)
    bad = at_fault(out)
    column = pq.read_table(file, columns=["bytes"])["bytes"]
    if {one["row"] for one in bad} != set(np.flatnonzero(column.is_null().to_numpy()).tolist()):
        sys.exit("the rows at fault aren't the files that are too short")
    if wrong or sum(labels.values()) + len(bad) != len(paths):
        sys.exit(f"{len(wrong)} of {len(paths)} files differ")
    names = (model / "labels.txt").read_text().splitlines()
    print("files by label: " + ", ".join(f"{names[one]} {count}" for one, count in labels.most_common(SHOWN_LABELS)))
    return f"{len(paths)} files, {len(bad)} too short: all scores are those of ONNX Runtime alone"


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else sysconfig.get_paths()["platlib"])
    with tempfile.TemporaryDirectory() as work:
        print(compare(all_files(folder), Path(work)))


if __name__ == "__main__":
    main()
