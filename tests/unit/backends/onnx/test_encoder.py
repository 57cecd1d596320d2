"""Encoders: which models are, and how several requests share an execution, over encoders in numpy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from threading import Event, Thread
from typing import Any

import numpy as np
import pytest

from paceline.backends.base import Device
from paceline.backends.errors import DeviceLost, ExecutionError, OutOfMemory
from paceline.backends.generation import GenerationLimits, Wanted, read_request
from paceline.backends.onnx.decoder_layout import DecoderLayout, find_layout
from paceline.backends.onnx.decoder_trial import Trial, try_encoder
from paceline.backends.onnx.decoding_rules import DecodingRules
from paceline.backends.onnx.encoder import Encoder, EncoderLayout, EncoderThread, find_encoder
from paceline.backends.onnx.generations import Decoder, GeneratingInstance
from paceline.backends.onnx.options import DecoderSettings
from paceline.backends.open_request import OpenRequest
from paceline.backends.spec import Array, ModelSpec, Tensors, TensorSpec

IDS, MASK, HIDDEN = (
    TensorSpec("input_ids", "INT64", (-1, -1)),
    TensorSpec("attention_mask", "INT64", (-1, -1)),
    TensorSpec("last_hidden_state", "FP32", (-1, -1, 2)),
)


def decoder(**changed: TensorSpec | None) -> DecoderLayout | str:
    """A decoder of one layer with an encoder; with other tensors, or without them, by name with `_` for `.`."""
    parts = [f"0.{of}.{part}" for of in ("decoder", "encoder") for part in ("key", "value")]
    inputs = [
        replace(IDS, name="encoder_attention_mask"),
        IDS,
        replace(HIDDEN, name="encoder_hidden_states"),
        *(TensorSpec(f"past_key_values.{one}", "FP32", (-1, 3, -1, 4)) for one in parts),
        TensorSpec("use_cache_branch", "BOOL", (1,)),
    ]
    outputs = [TensorSpec(f"present.{one}", "FP32", (-1, 3, -1, 4)) for one in parts]
    chosen = [changed.get(one.name.replace(".", "_"), one) for one in inputs]
    spec = ModelSpec(tuple(one for one in chosen if one), (TensorSpec("logits", "FP32", (-1, -1, 9)), *outputs))
    return find_layout(spec, frozenset(), {})


def layout_of(spec: ModelSpec, **said: Any) -> EncoderLayout | str:
    found = decoder()
    assert isinstance(found, DecoderLayout)
    return find_encoder(spec, said, found)


class Sums:
    """Leaves each token and the number of those that count, unless it is 13; `before` is called with the inputs."""

    def __init__(self, before: Callable[[Sequence[Array]], None] = lambda inputs: None) -> None:
        self.before = before
        self.rows: list[int] = []

    def run(self, inputs: Sequence[Array]) -> Tensors:
        self.before(inputs)
        ids, mask = inputs
        self.rows.append(len(ids))
        if 13 in ids:
            raise ExecutionError("a faulty row")
        return [np.stack([ids, np.repeat(mask.sum(axis=1, keepdims=True), ids.shape[1], 1)], -1).astype(np.float32)]

    def keeping(self, kept: Sequence[Array]) -> Callable[[Sequence[Array]], Tensors]:
        raise NotImplementedError

    def abandon(self) -> None:
        pass

    def close(self) -> None:
        pass


class Steps(Sums):
    """A decoder that likes 8 best, and then the length of its source, which it has to get in each step."""

    def run(self, inputs: Sequence[Array]) -> Tensors:
        ids, _, mask, hidden, *pasts = inputs
        assert mask.shape == hidden.shape[:2]
        logits = np.zeros((*ids.shape, 9), np.float32)
        logits[np.arange(len(ids)), -1, mask.sum(axis=1)] = 1
        logits[..., 8] = 2
        sizes = [past.shape[2] + ids.shape[1] for past in pasts[:2]] + [hidden.shape[1]] * 2
        return [logits, *(np.zeros((len(ids), 3, size, 4), np.float32) for size in sizes)]


def text_encoder() -> EncoderLayout:
    found = layout_of(ModelSpec((IDS, MASK), (HIDDEN,)))
    assert isinstance(found, EncoderLayout)
    return found


def tokens(*lengths: int) -> list[Array]:
    return [np.arange(20, 20 + length) for length in lengths]


def test_decoder_of_an_encoder_has_its_tensors_in_order() -> None:
    found = decoder()
    assert isinstance(found, DecoderLayout)
    assert found.leads == ("input_ids", "use_cache_branch", "encoder_attention_mask", "encoder_hidden_states")
    assert [one.name for one in found.pasts] == ["past_key_values.0.decoder.key", "past_key_values.0.decoder.value"]
    assert [one.name for one in found.of_source] == [
        "encoder_hidden_states",
        "past_key_values.0.encoder.key",
        "past_key_values.0.encoder.value",
    ]
    assert [one.name for one in found.executed.outputs][-2:] == ["present.0.encoder.key", "present.0.encoder.value"]
    assert (found.token_bytes, found.source_bytes) == (2 * 3 * 4 * 4, (2 + 2 * 3 * 4) * 4)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"encoder_hidden_states": None}, "it has no input 'encoder_hidden_states'"),
        ({"use_cache_branch": None}, "it has no input 'use_cache_branch'"),
        ({"encoder_hidden_states": TensorSpec("encoder_hidden_states", "FP32", (-1, -1, -1))}, "with a fixed size"),
        ({"encoder_attention_mask": TensorSpec("encoder_attention_mask", "BOOL", (-1, -1))}, "isn't of INT64"),
    ],
)
def test_decoder_that_lacks_something_of_its_encoder_is_told(
    changed: Mapping[str, TensorSpec | None], why: str
) -> None:
    assert why in str(decoder(**changed))


@pytest.mark.parametrize(
    ("inputs", "output", "said", "why"),
    [
        ([IDS, MASK, replace(IDS, name="x")], HIDDEN, {}, "expected one input besides attention_mask"),
        ([replace(IDS, datatype="INT32")], HIDDEN, {}, "input 'input_ids': expected INT64, FP32 or FP16"),
        ([IDS, replace(MASK, datatype="BOOL")], HIDDEN, {}, "input 'attention_mask': expected INT64"),
        ([IDS], replace(HIDDEN, name="x"), {}, "expected FP32 [-1, -1, 2], as its decoder takes, got none"),
        ([IDS], replace(HIDDEN, dims=(-1, -1, 3)), {}, "as its decoder takes, got FP32 [-1, -1, 3]"),
        ([IDS], replace(HIDDEN, datatype="FP16"), {}, "as its decoder takes, got FP16"),
        (
            [TensorSpec("pixel_values", "FP32", (-1, -1, -1, -1))],
            HIDDEN,
            {"image_size": "large"},
            "input 'pixel_values': expected fixed sizes, or config.json to tell them",
        ),
    ],
)
def test_encoder_that_does_not_fit_is_told(
    inputs: Sequence[TensorSpec], output: TensorSpec, said: dict[str, Any], why: str
) -> None:
    assert why in str(layout_of(ModelSpec(tuple(inputs), (output,)), **said))


@pytest.mark.parametrize(
    ("fed", "said", "dims"),
    [
        (TensorSpec("pixel_values", "FP32", (-1, -1, -1, -1)), {"image_size": 8, "num_channels": 1}, (1, 8, 8)),
        (TensorSpec("pixel_values", "FP32", (-1, 3, -1, -1)), {"image_size": [6, 4]}, (3, 6, 4)),
        (TensorSpec("input_features", "FP16", (-1, -1, -1)), {"num_mel_bins": 8, "max_source_positions": 5}, (8, 10)),
        (TensorSpec("input_features", "FP32", (-1, 4, 30)), {}, (4, 30)),
    ],
)
def test_sizes_come_from_the_file_or_beside_it(fed: TensorSpec, said: dict[str, Any], dims: tuple[int, ...]) -> None:
    found = layout_of(ModelSpec((fed,), (HIDDEN,)), **said)
    assert isinstance(found, EncoderLayout)
    assert found.source.dims == dims


def test_texts_of_similar_length_share_an_execution() -> None:
    model, texts = Sums(), tokens(8, 2, 7, 8, 3)
    left = Encoder(model, text_encoder(), pads=True).encode(texts)
    assert model.rows == [3, 1, 1]
    for text, one in zip(texts, left, strict=True):
        assert isinstance(one, np.ndarray)
        assert one.tolist() == [[[token, len(text)] for token in text]]
        assert one.base is None


def test_requests_together_execute_their_encoder_once() -> None:
    found, sums = decoder(), Sums()
    assert isinstance(found, DecoderLayout)
    limits = GenerationLimits(9, 20)

    def asked(request: OpenRequest) -> Wanted:
        return read_request((np.array([1]),), {"max_tokens": 3}, limits)._replace(source=request.inputs[0])

    rules = DecodingRules(forced={2: 7}, never=[8])
    instance = GeneratingInstance(
        Decoder("m", found, limits, DecoderSettings(), Trial(9, pads=False), rules),
        Steps(),
        Device(),
        asked,
        EncoderThread(sums, text_encoder(), pads=True),
    )
    try:
        results = instance.execute([[text] for text in tokens(4, 4, 4)]).results
    finally:
        instance.close()
    assert sums.rows == [3]
    # The likeliest is 8, and then as the length of the source is.
    assert [one[0].tolist() for one in results] == [[4, 7, 4]] * 3


def test_texts_share_by_equal_length_if_padding_spoils() -> None:
    model = Sums()
    Encoder(model, text_encoder()).encode(tokens(8, 7, 8))
    assert model.rows == [2, 1]


@pytest.mark.parametrize("fault", [ExecutionError("a faulty row"), OutOfMemory("too little")])
def test_faulty_text_fails_alone_among_others(fault: ExecutionError) -> None:
    def before(inputs: Sequence[Array]) -> None:
        if 13 in inputs[0]:
            raise fault

    texts = [*tokens(4, 4, 4), np.array([5, 13, 5, 5])]
    left = Encoder(Sums(before), text_encoder(), pads=True).encode(texts)
    assert [isinstance(one, ExecutionError) for one in left] == [False, False, False, True]
    assert str(left[3]) == str(fault)


def test_lost_device_is_no_fault_of_a_text() -> None:
    def before(inputs: Sequence[Array]) -> None:
        raise DeviceLost("gone")

    with pytest.raises(DeviceLost, match="gone"):
        Encoder(Sums(before), text_encoder()).encode(tokens(4, 4))


def test_nobody_waits_for_an_encoder_given_up() -> None:
    begun, gate = Event(), Event()

    def before(inputs: Sequence[Array]) -> None:
        begun.set()
        assert gate.wait(20)

    encoder, failed = EncoderThread(Sums(before), text_encoder()), list[ExecutionError]()

    def encode() -> None:
        with pytest.raises(ExecutionError) as raised:
            encoder.encode(tokens(4))
        failed.append(raised.value)

    waiting = Thread(target=encode)
    assert encoder.began_ns == 0
    waiting.start()
    assert begun.wait(20)
    assert encoder.began_ns > 0
    error = ExecutionError("it hangs")
    ended = encoder.give_up(error)
    waiting.join(20)
    assert failed == [error]
    with pytest.raises(ExecutionError, match="it hangs"):
        encoder.encode(tokens(4))
    assert not ended.done()
    gate.set()
    ended.result(20)
    assert encoder.began_ns == 0
    encoder.close()


@pytest.mark.parametrize("counts_fill", [True, False])
def test_trial_finds_whether_texts_may_be_filled_up(counts_fill: bool) -> None:
    def before(inputs: Sequence[Array]) -> None:
        if counts_fill:
            inputs[1][:] = 1

    left, pads = try_encoder(Sums(before), text_encoder(), 97)
    assert [one.shape for one in left] == [(1, 6, 2), (1, 4, 2)]
    assert pads is not counts_fill


def test_trial_refuses_encoder_whose_rows_depend_on_each_other() -> None:
    def before(inputs: Sequence[Array]) -> None:
        inputs[0][:] = inputs[0].max(axis=0)

    with pytest.raises(ExecutionError, match="of two requests together than of each alone"):
        try_encoder(Sums(before), text_encoder(), 97)
