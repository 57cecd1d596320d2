"""What a trial finds of how rows may be stepped."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from paceline.backends.errors import ExecutionError
from paceline.backends.onnx.decoder_trial import Trial, try_steps
from paceline.backends.spec import Array, Tensors
from tests.unit.backends.onnx.generating import VOCABULARY, Decoder, layout


class Spoilt(Decoder):
    """What is filled up gives something else where rows begin (`prompts`), or where they go on."""

    def __init__(self, *, prompts: bool) -> None:
        super().__init__()
        self._prompts = prompts

    def run(self, inputs: Sequence[Array]) -> Tensors:
        logits, present = super().run(inputs)
        _, mask, _, past = inputs
        is_filled = not mask.all() and self._prompts == (past.shape[2] == 0)
        return [np.roll(logits, 1, axis=2) if is_filled else logits, present]


@pytest.mark.parametrize("in_place", [True, False])
def test_rows_may_be_filled_up_where_that_spoils_nothing(in_place: bool) -> None:
    assert try_steps(Decoder(), layout(in_place), {}) == Trial(VOCABULARY)


class Rough(Decoder):
    """Multiplies many rows with fewer bits of fraction than one."""

    def run(self, inputs: Sequence[Array]) -> Tensors:
        logits, present = super().run(inputs)
        return [logits * np.float32(1 if inputs[0].size == 1 else 1.004), present]


def test_gpu_may_be_less_exact_with_many_rows() -> None:
    with pytest.raises(ExecutionError, match="a token after a prompt doesn't give"):
        try_steps(Rough(), layout(), {})
    assert try_steps(Rough(), layout(), {}, on_gpu=True) == Trial(VOCABULARY)


@pytest.mark.parametrize(
    ("decoder", "found"),
    [
        (Spoilt(prompts=True), Trial(VOCABULARY, pads_prompts=False)),
        (Spoilt(prompts=False), Trial(VOCABULARY, pads=False, pads_prompts=False)),
    ],
    ids=["begin", "go on"],
)
def test_rows_that_fill_spoils_are_not_filled_up(decoder: Decoder, found: Trial) -> None:
    assert try_steps(decoder, layout(), {}) == found
