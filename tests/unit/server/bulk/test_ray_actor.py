"""An actor refuses to work on a node that sees another job than the driver. Without Ray."""

from __future__ import annotations

import logging
import os
import pickle
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from paceline.server.bulk.fingerprint import fingerprint
from paceline.server.bulk.ray_actor import Actor, Errand
from paceline.server.bulk.settings import BulkSettings, MaxBad
from paceline.server.bulk.sources import find_source
from paceline.server.bulk.values import BulkError, Fixed, Unit
from tests import models

FIXED = Fixed(unit_rows=10, chunk_rows=10, chunk_bytes=1000, batch_rows=1, intra_op_threads=1)


@pytest.fixture(autouse=True)
def logger_as_before() -> Iterator[None]:
    """An actor has its process for itself."""
    ours, inference = map(logging.getLogger, ("paceline", "paceline.server.inference"))
    handlers, level = list(ours.handlers), inference.level
    yield
    ours.handlers = handlers
    inference.setLevel(level)


@pytest.fixture
def errand(tmp_path: Path) -> Errand:
    models.write(models.row_sums(2), tmp_path / "sums.onnx")
    pq.write_table(pa.table({"INPUT0": pa.array([[1.0, 2.0]], pa.list_(pa.float32()))}), tmp_path / "in.parquet")
    settings = BulkSettings(str(tmp_path / "sums.onnx"), (str(tmp_path / "in.parquet"),), tmp_path / "out")
    return Errand(settings, os.getcwd(), fingerprint(settings), find_source(settings.inputs).files, 1)


async def test_node_that_has_another_model_is_refused(errand: Errand, tmp_path: Path) -> None:
    models.write(models.row_sums(3), tmp_path / "sums.onnx")
    with pytest.raises(
        BulkError,
        match=r"node .* has another model or input than the driver, whose job is with other contents of the model",
    ):
        await Actor(errand).choose()


async def test_node_that_has_other_input_is_refused(errand: Errand) -> None:
    (file,) = errand.files
    with pytest.raises(BulkError, match=r"whose job is with input .*in.parquet of 1 bytes"):
        await Actor(replace(errand, files=[replace(file, size_bytes=1)])).choose()


async def test_node_without_the_input_says_where(errand: Errand, tmp_path: Path) -> None:
    (tmp_path / "in.parquet").unlink()
    with pytest.raises(BulkError, match=r"^on node .*in.parquet"):
        await Actor(errand).choose()


async def test_node_without_the_folder_is_refused(errand: Errand, tmp_path: Path) -> None:
    with pytest.raises(BulkError, match=f"can't go to {tmp_path}/none, where the job was started: No such file"):
        await Actor(replace(errand, home=str(tmp_path / "none"))).choose()


async def test_caution_goes_to_the_driver(errand: Errand, tmp_path: Path) -> None:
    column = pa.array([None] * 2, pa.list_(pa.float32()))
    pq.write_table(pa.table({"INPUT0": column}), tmp_path / "in.parquet")
    settings = replace(errand.settings, max_bad=MaxBad(share=1.0))
    files = find_source(settings.inputs).files
    chosen = await Actor(Errand(settings, os.getcwd(), errand.facts, files, 1)).choose()
    (caution,) = pickle.loads(pickle.dumps(chosen.warnings))
    assert caution.getMessage().startswith("none of the first 2 rows could be computed: column 'INPUT0'")


async def test_node_that_shares_no_output_is_refused(errand: Errand, tmp_path: Path) -> None:
    unit = Unit(0, errand.files[0], 0, 1)
    with pytest.raises(BulkError, match=r"doesn't see .*sign, which the driver has written: expected an output folder"):
        await Actor(errand).do(FIXED, str(tmp_path / "sign"), unit)
