"""The example of docs/guides/images.md, trained and served as the guide says."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image

from examples.digits.train import LABELS, digits
from paceline.clients import Internal
from tests.examples import PYTHON, answers, check_guide, executions, trained
from tests.harness import ServerProcess, run_command


@pytest.fixture(scope="module")
def labelling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    repository = trained("digits", "classifier/1/model.onnx", tmp_path_factory.mktemp("digits"))
    with ServerProcess(repository, args=PYTHON) as server:
        yield server


def image(pixels: np.ndarray[tuple[int], np.dtype[np.float32]], side: int, form: str) -> bytes:
    """The digit as a file, enlarged to `side` pixels."""
    small = Image.fromarray((pixels.reshape(8, 8) * 255).astype(np.uint8))
    file = io.BytesIO()
    small.resize((side, side), Image.Resampling.NEAREST).save(file, form)
    return file.getvalue()


async def test_images_of_all_kinds_get_the_right_labels(labelling: ServerProcess) -> None:
    _, unseen, _, numbers = digits()
    kinds = [(8, "png"), (64, "png"), (200, "jpeg"), (32, "bmp")]
    files = [image(one, *kinds[number % 4]) for number, one in enumerate(unseen[:64])]
    found = await answers(labelling, "digits", [{"image": [[file]]} for file in files])
    right = [one["label"][0, 0].decode() == LABELS[number] for one, number in zip(found, numbers[:64], strict=True)]
    assert np.mean(right) > 0.9
    assert executions(labelling, "decoder") < 64, "images of different sizes shared batches"


async def test_image_that_cannot_be_decoded_fails_alone(labelling: ServerProcess) -> None:
    good = image(digits()[1][0], 8, "png")
    huge = io.BytesIO()
    Image.new("1", (5000, 5000)).save(huge, "png")
    found = await answers(labelling, "digits", [{"image": [[data]]} for data in (good, b"no image", huge.getvalue())])
    assert not isinstance(found[0], BaseException)
    assert isinstance(found[1], Internal)
    assert "expected the bytes of an image" in str(found[1])
    assert isinstance(found[2], Internal)
    assert "got 5000 x 5000" in str(found[2])


def test_folder_of_images_is_labelled_offline(tmp_path: Path) -> None:
    """As docs/guides/bulk.md says: whole files as rows of a pipeline, with a file that is no image among them."""
    repository = trained("digits", "classifier/1/model.onnx", tmp_path / "models")
    _, unseen, _, numbers = digits()
    folder = tmp_path / "pictures"
    folder.mkdir()
    for place, pixels in enumerate(unseen[:24]):
        (folder / f"{place:02d}.png").write_bytes(image(pixels, 16, "png"))
    (folder / "notes.txt").write_text("no picture")
    words = ["-i", str(folder), "--format", "files", "--map", "image=bytes", "--keep", "path", "--allow-python-models"]
    sizes = ["--batch", "8", "--instances", "1", "--max-bad", "1"]
    done = run_command("bulk", str(repository / "digits"), "-o", str(tmp_path / "out"), *words, *sizes)
    assert done.returncode == 0, done.stderr
    rows = pq.read_table(tmp_path / "out" / "part-00000.parquet").to_pylist()
    assert [Path(row["path"]).name for row in rows] == [f"{place:02d}.png" for place in range(24)]
    right = [row["label"] == [LABELS[number]] for row, number in zip(rows, numbers, strict=False)]
    assert np.mean(right) > 0.9
    (bad,) = [json.loads(line) for line in (tmp_path / "out" / "_bad" / "part-00000.jsonl").read_text().splitlines()]
    assert bad["file"].endswith("notes.txt")
    assert "expected the bytes of an image" in bad["reason"]


@pytest.mark.parametrize(
    "path",
    [
        "digits/models/decoder/1/model.py",
        "digits/models/decoder/config.pbtxt",
    ],
)
def test_guide_shows_files_of_the_example_unchanged(path: str) -> None:
    check_guide("images.md", path)
