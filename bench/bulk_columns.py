"""From columns to a model's inputs and back, without a model: processor time per row.

Lives here: chunks of a few kinds of columns, and what `server.bulk` makes of them. Must not: files, calls. The outputs
are the inputs. Prints one line of JSON: microseconds per row, the median of rounds, by kind of column and rows of a
chunk; calls are of 256 rows.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from bench.stats import spread
from paceline.backends.lengths import Lengths
from paceline.backends.spec import Length, ModelSpec, TensorSpec
from paceline.clients.description import Batching, ModelDescription
from paceline.clients.messages import TensorMetadata
from paceline.server.bulk.batches import batches
from paceline.server.bulk.columns import Columns
from paceline.server.bulk.values import Chunk, Computed, Fixed, Results

_CALL_ROWS = 256
_CHUNK_ROWS = (256, 4096)


def _kinds(rows: int) -> dict[str, tuple[pa.Array, str, tuple[int, ...], bool]]:
    """Columns, and for each the datatype and dims of its input, and whether rows are filled up."""
    random = np.random.default_rng(1)
    four = random.random((rows, 4), np.float32)
    words = [random.integers(0, 30_000, size).tolist() for size in random.integers(8, 200, rows)]
    return {
        "4 floats, fixed": (pa.FixedSizeListArray.from_arrays(pa.array(four.ravel()), 4), "FP32", (4,), False),
        "4 floats, list": (pa.array(four.tolist(), pa.list_(pa.float32())), "FP32", (4,), False),
        "4 doubles as floats": (pa.array(four.tolist(), pa.list_(pa.float64())), "FP32", (4,), False),
        "text": (pa.array([f"text {row}" for row in range(rows)]), "BYTES", (1,), False),
        "8 to 200 words, equal": (pa.array(words), "INT64", (-1,), False),
        "8 to 200 words, filled": (pa.array(words), "INT64", (-1,), True),
    }


def _us_per_row(rows: int, column: pa.Array, datatype: str, dims: tuple[int, ...], *, is_filled: bool) -> float:
    tensor, axes = TensorMetadata("x", datatype, (-1, *dims)), ((0, 1),)
    batching = Batching(_CALL_ROWS, True, (), 0, 0, 0, ())
    spec = TensorSpec("x", datatype, dims)
    filled = Lengths(ModelSpec((spec,), (spec,), batched=True, lengths=(Length("words", axes, axes),)))
    table = pa.record_batch({"x": column, "id": pa.array(range(rows))})
    columns = Columns(
        ModelDescription("m", ("1",), "", (tensor,), (tensor,), batching=batching),
        table.schema,
        keep=["id"],
        outputs={"y": "x"},
        lengths=filled if is_filled else None,
    )
    chunk, fixed = Chunk(table, np.arange(rows)), Fixed(rows, rows, 1 << 30, _CALL_ROWS, 1, 1)
    began = time.process_time()
    taken = columns.rows(chunk)
    results = Results()
    for places in batches(taken, fixed):
        sizes = taken.common_sizes(places)
        results.computed.append(Computed(places, taken.take(places, sizes), sizes))
    columns.table(chunk, taken, results)
    return (time.process_time() - began) / rows * 1e6


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.bulk_columns", description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=15, help="the median is reported (default: %(default)s)")
    rounds = parser.parse_args(arguments).rounds
    found: dict[str, dict[int, float]] = {}
    for rows in _CHUNK_ROWS:
        for name, (column, datatype, dims, is_filled) in _kinds(rows).items():
            costs = [_us_per_row(rows, column, datatype, dims, is_filled=is_filled) for _ in range(rounds)]
            found.setdefault(name, {})[rows] = round(spread(costs).median, 2)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
