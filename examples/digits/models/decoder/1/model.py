"""Decodes images, of any size and format that Pillow reads, to what the classifier takes: 8 x 8 grey pixels."""

import io

import numpy as np
from PIL import Image, UnidentifiedImageError

SIDE = 8
MOST_PIXELS = 4096 * 4096  # a small file may claim to be a huge image


class Model:
    inputs = {"image": ("BYTES", [-1, 1])}
    outputs = {"pixels": ("FP32", [-1, SIDE * SIDE])}

    def execute(self, inputs):
        # One image that can't be decoded fails its own request: the server runs the others again without it.
        return {"pixels": np.stack([pixels(data) for data in inputs["image"][:, 0]])}


def pixels(data):
    try:
        image = Image.open(io.BytesIO(data))
    except UnidentifiedImageError:
        raise ValueError("expected the bytes of an image, such as those of a PNG or JPEG file") from None
    if image.width * image.height > MOST_PIXELS:
        raise ValueError(f"expected an image of at most {MOST_PIXELS} pixels, got {image.width} x {image.height}")
    image.draft("L", (SIDE, SIDE))  # a large JPEG is decoded smaller, which takes a fraction of the time
    small = image.convert("L").resize((SIDE, SIDE), Image.Resampling.BOX)
    return np.asarray(small, np.float32).reshape(-1) / 255
