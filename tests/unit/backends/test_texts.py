from __future__ import annotations

import numpy as np
import pytest

from paceline.backends.errors import ExecutionError
from paceline.backends.onnx.instance import decode_texts, encode_texts
from paceline.backends.spec import Array

AWKWARD = ["", "\0", "a\0", "\0\0b\0", "naïve", "日本語", "\U0001f600", "b'quoted'", " ", "x" * 1000]


def _objects(elements: list[bytes] | list[str], shape: tuple[int, ...]) -> Array:
    array = np.empty(len(elements), object)
    array[:] = elements
    return array.reshape(shape)


def test_decode_texts_awkward_elements_are_exact() -> None:
    decoded = decode_texts(_objects([text.encode() for text in AWKWARD], (5, 2)), "INPUT0")

    assert decoded.dtype == object
    assert decoded.shape == (5, 2)
    assert decoded.ravel().tolist() == AWKWARD


def test_encode_texts_awkward_elements_are_exact() -> None:
    encoded = encode_texts(_objects(AWKWARD, (2, 5)))

    assert encoded.dtype == object
    assert encoded.shape == (2, 5)
    assert encoded.ravel().tolist() == [text.encode() for text in AWKWARD]


@pytest.mark.parametrize("shape", [(0,), (0, 3), (2, 0)])
def test_texts_without_elements_keep_their_shape(shape: tuple[int, ...]) -> None:
    assert decode_texts(np.empty(shape, object), "INPUT0").shape == shape
    assert encode_texts(np.empty(shape, object)).shape == shape


def test_texts_of_rank_0_keep_their_rank() -> None:
    decoded = decode_texts(np.array(b"a\0", object), "INPUT0")

    assert (decoded.shape, decoded.item()) == ((), "a\0")
    assert (encode_texts(decoded).shape, encode_texts(decoded).item()) == ((), b"a\0")


def test_decode_texts_strided_view_keeps_the_order() -> None:
    view = _objects([b"a", b"b", b"c", b"d"], (2, 2)).T

    assert decode_texts(view, "INPUT0").tolist() == [["a", "c"], ["b", "d"]]


def test_decode_texts_invalid_utf8_is_an_error_naming_the_input() -> None:
    with pytest.raises(ExecutionError, match=r"input 'NAME': expected UTF-8, got b'\\xff'"):
        decode_texts(_objects([b"fine", b"\xff"], (2,)), "NAME")
