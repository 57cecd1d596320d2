"""The example of docs/guides/images.md, trained and served as the guide says."""

from __future__ import annotations

import io
from collections.abc import Iterator

import numpy as np
import pytest
from PIL import Image

from examples.digits.train import LABELS, digits
from paceline.clients import Internal
from tests.examples import PYTHON, answers, check_guide, executions, trained
from tests.harness import ServerProcess


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


@pytest.mark.parametrize(
    "path",
    [
        "digits/models/decoder/1/model.py",
        "digits/models/decoder/config.pbtxt",
    ],
)
def test_guide_shows_files_of_the_example_unchanged(path: str) -> None:
    check_guide("images.md", path)
