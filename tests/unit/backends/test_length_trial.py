"""Along which axes requests may be filled up: what a trial of small models finds, and what is refused."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from paceline.backends.base import Device, ModelSource
from paceline.backends.errors import ExecutionError, LoadError, ProcessError
from paceline.backends.length_trial import try_lengths
from paceline.backends.onnx.backend import OnnxBackend
from paceline.backends.spec import Array, Length, ModelSpec, Tensors, TensorSpec
from paceline.backends.trials import LengthAxis, LengthTrial, TriesLengths
from tests.models import write
from tests.unit.backends.length_models import encoder, images, sounds, texts

OWN_PROCESS = {"paceline.own_process": "true"}
IDS, MASK = LengthAxis("ids", 1), LengthAxis("mask", 1)


def trial(
    folder: Path,
    model: onnx.ModelProto,
    asked: Sequence[LengthAxis] | None = None,
    parameters: dict[str, str] | None = None,
) -> LengthTrial:
    source = ModelSource("m", write(model, folder / "model.onnx"), parameters=parameters or {})
    opened = OnnxBackend().open(source, Device())
    assert isinstance(opened, TriesLengths)
    try:
        return opened.try_lengths(served(opened.spec), asked)
    finally:
        opened.close()


def served(own: ModelSpec) -> ModelSpec:
    inputs, outputs = (
        tuple(replace(one, dims=one.dims[1:], assumed=False) for one in tensors)
        for tensors in (own.inputs, own.outputs)
    )
    return ModelSpec(inputs, outputs, batched=True)


@pytest.mark.parametrize("kind", ["masked", "words", "causal", "quantized"])
def test_trial_of_heeded_masks_finds_renamed_outputs(kind: str, tmp_path: Path) -> None:
    found = trial(tmp_path, encoder(kind))

    assert found.why_not == ""
    assert found.spec.lengths == (Length("words", ((0, 1), (1, 1)), ((0, 1),)),)


def test_trial_finds_sounds_whose_mask_is_heeded(tmp_path: Path) -> None:
    assert trial(tmp_path, sounds(heeds=True)).spec.lengths == (Length("frames", ((0, 1), (1, 1)), ((0, 1),)),)
    ignored = trial(tmp_path, sounds(heeds=False))
    assert ignored.spec.lengths == ()
    assert "differs" in ignored.why_not


def test_trial_of_pooled_outputs_finds_no_axis_to_cut(tmp_path: Path) -> None:
    assert trial(tmp_path, encoder("pooled")).spec.lengths == (Length("words", ((0, 1), (1, 1))),)


def test_trial_without_names_joins_axes_of_one_number(tmp_path: Path) -> None:
    assert trial(tmp_path, encoder("masked", names=False)).spec.lengths == (
        Length("axis 1", ((0, 1), (1, 1)), ((0, 1),)),
    )


def test_trial_of_a_small_vocabulary_uses_its_words(tmp_path: Path) -> None:
    assert trial(tmp_path, encoder("masked", words=2)).spec.lengths


def test_trial_in_half_precision_allows_its_rounding(tmp_path: Path) -> None:
    assert trial(tmp_path, encoder("masked", output="FP16")).spec.lengths


@pytest.mark.parametrize("parameters", [{}, OWN_PROCESS])
def test_trial_of_half_precision_inside_allows_its_rounding(parameters: dict[str, str], tmp_path: Path) -> None:
    """What differs by a thousandth may be rounding then."""
    assert trial(tmp_path, encoder("leaky", halves=True), parameters=parameters).spec.lengths


def test_trial_in_its_own_process_finds_the_same(tmp_path: Path) -> None:
    assert trial(tmp_path, encoder("masked"), parameters=OWN_PROCESS) == trial(tmp_path, encoder("masked"))


@pytest.mark.parametrize("words", [2, 64])
@pytest.mark.parametrize("kind", ["mean", "max", "both", "convolution", "leaky", "quantized mean"])
def test_trial_catches_models_that_look_at_padding(kind: str, words: int, tmp_path: Path) -> None:
    found = trial(tmp_path, encoder(kind, words))

    assert found.spec.lengths == ()
    assert re.fullmatch(
        r"output 'x' of a request of size 5 differs from alone by [\d.]+% once it is filled up to 24", found.why_not
    )


def test_trial_tells_of_an_output_that_follows_otherwise(tmp_path: Path) -> None:
    found = trial(tmp_path, encoder("twice"))

    assert found.spec.lengths == ()
    assert found.why_not == (
        "axis 1 of output 'x' varies, and not as the inputs' sizes do: [1, 10, 6] for 5, [1, 22, 6] for 11, [1, 48, 6] "
        "for 24"
    )


def test_model_without_a_mask_is_not_run() -> None:
    spec = ModelSpec((TensorSpec("ids", "INT64", (-1,)),), (TensorSpec("x", "FP32", (-1,)),), batched=True)

    assert try_lengths(spec, None, _never) == LengthTrial(spec)


def _never(inputs: Sequence[Array]) -> Tensors:
    raise AssertionError("it must not run")


def test_asked_axis_moves_all_that_have_its_name(tmp_path: Path) -> None:
    found = trial(tmp_path, encoder("masked"), [replace(IDS, fill=3)])

    assert found.why_not == ""
    assert found.spec.lengths == (Length("words", ((0, 1), (1, 1)), ((0, 1),)),)
    assert [one.fill for one in found.spec.inputs] == [3, 0]


def test_asked_axes_of_two_names_are_two_lengths(tmp_path: Path) -> None:
    asked = [LengthAxis("image", 2, float("-inf")), LengthAxis("image", 3, float("-inf"))]
    found = trial(tmp_path, images(), asked)

    assert found.why_not == ""
    assert found.spec.lengths == (
        Length("height", ((0, 2),), ((0, 2), (1, 2))),
        Length("width", ((0, 3),), ((0, 3),)),
    )


def test_asked_axis_of_text_has_its_output(tmp_path: Path) -> None:
    assert trial(tmp_path, texts(), [LengthAxis("text", 1)]).spec.lengths == (Length("axis 1", ((0, 1),), ((0, 1),)),)


def test_asked_axes_that_show_are_filled_up_and_told(tmp_path: Path) -> None:
    found = trial(tmp_path, encoder("mean"), [IDS, MASK])

    assert found.spec.lengths == (Length("words", ((0, 1), (1, 1))),)
    assert found.why_not.startswith("output 'x' of a request of size 5 differs from alone by ")


def test_asked_axes_of_an_untried_model_are_cut_by_place() -> None:
    def refuse(inputs: Sequence[Array]) -> Tensors:
        raise ExecutionError("no such word")

    spec = ModelSpec(
        (TensorSpec("ids", "INT64", (-1,)),),
        (TensorSpec("x", "FP32", (-1, 3)), TensorSpec("y", "FP32", (3,))),
        batched=True,
    )
    found = try_lengths(spec, [IDS], refuse)

    assert found.spec.lengths == (Length("axis 1", ((0, 1),), ((0, 1),)),)
    assert found.why_not == (
        "it isn't known whether the filling shows in its results, as it accepts no made-up inputs (no such word)"
    )


ODD = ModelSpec(
    (TensorSpec("a", "UINT8", (-1, 3)), TensorSpec("b", "FP32", (1,), reshape=())),
    (TensorSpec("x", "FP32", (-1, 3)),),
    batched=True,
)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (LengthAxis("c", 1), "input 'c': expected one of ['a', 'b']"),
        (LengthAxis("a", 0), "input 'a': expected an axis from 1 to 2 (0 is the batch's), got 0"),
        (LengthAxis("a", 3), "input 'a': expected an axis from 1 to 2 (0 is the batch's), got 3"),
        (LengthAxis("a", 2), "input 'a': expected an axis of free size, got axis 2, which is 3"),
        (LengthAxis("a", 1, 256), "input 'a': expected a fill that UINT8 can hold, got 256"),
        (LengthAxis("b", 1), "input 'b': expected one without reshape, got []"),
    ],
)
def test_asked_axis_that_cannot_be_filled_is_refused(asked: LengthAxis, message: str) -> None:
    with pytest.raises(LoadError, match=f"^{re.escape(message)}$"):
        try_lengths(ODD, [asked], _never)


@pytest.mark.parametrize("change", [{"ragged": True}, {"optional": True}, {"shape_tensor": True}])
def test_asked_axis_of_a_special_input_is_refused(change: Any) -> None:
    spec = replace(ODD, inputs=(replace(ODD.inputs[0], **change), ODD.inputs[1]))
    with pytest.raises(
        LoadError,
        match="stacked by their batch axis and never left out, got input 'a'",
    ):
        try_lengths(spec, [LengthAxis("a", 1)], _never)


def test_asked_axis_that_an_output_follows_otherwise_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"^axis 1 of output 'x' varies, and not as"):
        trial(tmp_path, encoder("twice"), [IDS])


def _spec(*, wide: int = 2) -> ModelSpec:
    inputs = (TensorSpec("ids", "INT64", (-1,)), TensorSpec("mask", "INT64", (-1,)))
    return ModelSpec(inputs, (TensorSpec("x", "FP32", (-1, wide)),), batched=True)


def _wide(inputs: Sequence[Array], wide: int = 2) -> Tensors:
    return [np.repeat(inputs[0].astype(np.float32)[:, :, None], wide, axis=2)]


def test_trial_judges_by_sizes_that_a_model_accepts() -> None:
    def run(inputs: Sequence[Array]) -> Tensors:
        if inputs[0].shape[1] > 30:
            raise ExecutionError("too long")
        return _wide(inputs)

    assert try_lengths(_spec(), None, run).why_not == ""


def test_trial_tells_of_failures_that_only_filling_brings() -> None:
    def run(inputs: Sequence[Array]) -> Tensors:
        if (inputs[1] == 0).any():
            raise ExecutionError("no mask")
        return _wide(inputs)

    assert try_lengths(_spec(), None, run).why_not == (
        "it runs with requests of sizes 5, 11, 24 alone, and fails once they are filled up: no mask"
    )


def test_trial_ends_after_half_a_minute() -> None:
    now_ns = iter(range(0, 10**12, 10**10))
    found = try_lengths(_spec(), None, _wide, now_ns=lambda: next(now_ns))

    assert found.spec.lengths == ()
    assert found.why_not.endswith("as its trial was given up: it took longer than 30 s")


def test_trial_runs_no_rows_with_too_large_results() -> None:
    sizes = []

    def run(inputs: Sequence[Array]) -> Tensors:
        sizes.append(inputs[0].size)
        return _wide(inputs, 1 << 17)

    assert try_lengths(_spec(wide=1 << 17), None, run).why_not == ""
    assert max(sizes) == 5 * 24
    found = try_lengths(_spec(wide=1 << 20), None, lambda inputs: _wide(inputs, 1 << 20))
    assert found.why_not.endswith("given up: four rows with their results take more than 64 MiB")


def test_trial_that_ends_its_process_finds_nothing() -> None:
    def run(inputs: Sequence[Array]) -> Tensors:
        raise ProcessError("it was killed")

    found = try_lengths(_spec(), None, run)

    assert (found.spec.lengths, found.why_not[-33:]) == ((), "its trial was given up: it was killed"[-33:])


def test_trial_judges_results_beside_random_ones() -> None:
    random = np.random.default_rng(0)
    spec = replace(_spec(), outputs=(*_spec().outputs, TensorSpec("y", "FP32", (1,))))

    def run(inputs: Sequence[Array]) -> Tensors:
        return [*_wide(inputs), random.random((len(inputs[0]), 1), np.float32)]

    assert try_lengths(spec, None, run).spec.lengths
    mean = try_lengths(spec, None, lambda inputs: [_wide(inputs)[0] * inputs[0].shape[1], run(inputs)[1]])
    assert mean.why_not.startswith("output 'x' of a request of size 5 differs")


@pytest.mark.parametrize("index", [0, 1])
def test_trial_catches_one_largest_word_of_all(index: int) -> None:
    """Which the filling exceeds in few texts only."""

    def run(inputs: Sequence[Array]) -> Tensors:
        ids, mask = inputs
        scores = np.where(mask == 0, 6, ids)  # of 63 words, a tenth is below
        return [[scores.argmax(1), scores.max(1).astype(np.float32)][index]]

    spec = replace(_spec(), outputs=((TensorSpec("y", "INT64", ()), TensorSpec("y", "FP32", ()))[index],))
    found = try_lengths(spec, None, run)

    assert found.spec.lengths == ()
    assert re.fullmatch(
        r"output 'y' of a request of size 1 differs from alone by [\d.]+% once it is filled up to 24", found.why_not
    )


def test_trial_of_equal_results_shows_nothing() -> None:
    found = try_lengths(_spec(), None, lambda inputs: [np.zeros((*inputs[0].shape, 2), np.float32)])

    assert found.why_not.endswith("as all made-up rows give the same results")


def test_trial_doubts_an_output_that_never_varies() -> None:
    spec = replace(_spec(), outputs=(*_spec().outputs, TensorSpec("label", "INT64", ())))

    def run(inputs: Sequence[Array]) -> Tensors:
        (x,) = _wide(inputs)
        return [x, np.full(len(x), int(inputs[0].shape[1] > 10**4), np.int64)]

    found = try_lengths(spec, None, run)

    assert found.spec.lengths == ()
    assert found.why_not.endswith("in output 'label', which is the same for all made-up rows")


def test_trial_of_two_texts_without_names_is_none() -> None:
    words = TensorSpec("words", "INT64", (-1,))
    texts = [replace(words, name=f"{what}_{one}") for one in "ab" for what in ("words", "mask")]
    named = [replace(one, axis_names=("n", one.name[-1])) for one in texts]
    spec = replace(_spec(), inputs=tuple(texts))

    def run(inputs: Sequence[Array]) -> Tensors:
        return [*_wide(inputs[:2])]

    assert try_lengths(spec, None, run).spec.lengths == ()
    found = try_lengths(replace(spec, inputs=tuple(named)), None, run).spec.lengths
    assert [one.inputs for one in found] == [((0, 1), (1, 1)), ((2, 1), (3, 1))]
