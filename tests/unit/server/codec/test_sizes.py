"""Requests to a model whose requests of different lengths share batches: one key, and their own sizes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from paceline.backends.spec import Length, ModelSpec, TensorSpec
from paceline.protos import inference_pb2 as pb
from paceline.server.codec.codec import ModelCodec
from paceline.server.codec.known_requests import Group
from paceline.server.codec.wire_request import RequestReader, WireRequest
from paceline.server.errors import InvalidRequest
from tests.wire import infer

WORDS, FRAMES = Length("words", ((0, 1), (1, 1)), ((0, 1),)), Length("frames", ((2, 2),))
SPEC = ModelSpec(
    (TensorSpec("ids", "INT64", (-1,)), TensorSpec("mask", "BOOL", (-1, -1)), TensorSpec("sound", "FP32", (-1, -1))),
    (TensorSpec("x", "FP32", (-1,)),),
    batched=True,
    lengths=(WORDS, FRAMES),
)


def request(words: int = 3, masked: int | None = None, frames: int = 4, bands: int = 2) -> pb.ModelInferRequest:
    masked = words if masked is None else masked
    ids, mask = np.zeros((1, words), np.int64), np.ones((1, masked, 1), np.bool_)
    return infer("m", {"ids": ids, "mask": mask, "sound": np.zeros((1, bands, frames), np.float32)})


def read(message: pb.ModelInferRequest) -> Group:
    return ModelCodec("m", "1", SPEC, 8).read(message)


def test_length_that_only_states_have_is_left_open() -> None:
    spec = replace(SPEC, lengths=(WORDS, Length("past", ((3, 1),)), FRAMES))
    read = ModelCodec("m", "1", spec, 8).read(request(3, frames=5))
    assert read.options.sizes == (3, 1, 5)


def test_sizes_differ_where_the_key_does_not() -> None:
    short, long = read(request(3, frames=5)).options, read(request(7, frames=4)).options
    assert short.key == long.key
    assert (short.sizes, long.sizes) == ((3, 5), (7, 4))


def test_key_differs_in_axes_that_are_not_filled_up() -> None:
    assert read(request(bands=2)).options.key != read(request(bands=3)).options.key


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (
            request(5, masked=6),
            "model 'm': input 'mask': expected 5 in axis 1, as in axis 1 of input 'ids', got 6 in shape [1, 6, 1]",
        ),
        (request(0), "model 'm': input 'ids': expected a size above 0 in axis 1, got 0 in shape [1, 0]"),
        (request(frames=0), "model 'm': input 'sound': expected a size above 0 in axis 2, got 0 in shape [1, 2, 0]"),
    ],
)
def test_sizes_that_cannot_be_filled_up_are_refused(message: pb.ModelInferRequest, text: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read(message)
    assert str(caught.value) == text


def test_known_requests_have_their_own_sizes() -> None:
    codec, reader = ModelCodec("m", "1", SPEC, 8), RequestReader()
    short, long = request(3).SerializeToString(), request(300).SerializeToString()
    for data in (short, long) * 3:
        codec.read(reader(data))  # type: ignore[arg-type]
    first, other = reader(short), reader(long)
    assert isinstance(first, WireRequest)
    assert isinstance(other, WireRequest)
    assert [codec.read(one).options.sizes for one in (first, other)] == [(3, 4), (300, 4)]
    assert len(codec.read(first, [other]).inputs) == 1
