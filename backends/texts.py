"""Conversion of BYTES tensors for a runtime that has strings, and back.

Lives here: object arrays of `bytes` <-> object arrays of `str`. Must not: fixed-width numpy strings, even as an
intermediate step, since they drop NULs at the end of an element.
"""

from __future__ import annotations

import numpy as np

from paceline.backends.errors import ExecutionError
from paceline.backends.spec import Array

__all__ = ["decode_texts", "encode_texts"]


def decode_texts(array: Array, name: str) -> Array:
    """A copy with `str` for each `bytes`; ExecutionError naming the input `name` if one isn't UTF-8."""
    try:
        texts = [element.decode() for element in array.ravel().tolist()]
    except UnicodeDecodeError as error:
        raise ExecutionError(f"input '{name}': expected UTF-8, got {error.object!r}: {error}") from error
    return np.array(texts, object).reshape(array.shape)


def encode_texts(array: Array) -> Array:
    """A copy with UTF-8 `bytes` for each `str`."""
    return np.array([text.encode() for text in array.ravel().tolist()], object).reshape(array.shape)
