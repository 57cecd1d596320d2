"""Which models are decoders, by their tensors, and what the files beside them say."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.backends.errors import LoadError
from paceline.backends.onnx.decoder_layout import DecoderLayout, find_layout, is_decoder, read_settings
from paceline.backends.spec import ModelSpec, TensorSpec

PAST, PRESENT = "past_key_values.{}.{}", "present.{}.{}"
NONE: frozenset[str] = frozenset()
GROUPED = frozenset({"GroupQueryAttention"})


def spec(**changed: TensorSpec | None) -> ModelSpec:
    """A decoder of two layers, with the tensors of the given names (with `_` for `.`) in place of its own, or without
    them."""
    names = [(layer, part) for layer in (0, 1) for part in ("value", "key")]
    ids = [TensorSpec(name, "INT64", (-1, -1)) for name in ("attention_mask", "input_ids", "position_ids")]
    inputs = [*ids, *(TensorSpec(PAST.format(*one), "FP16", (-1, 4, -1, 8)) for one in names)]
    presents = [TensorSpec(PRESENT.format(*one), "FP16", (-1, 4, -1, 8)) for one in names]
    outputs = [*presents, TensorSpec("logits", "FP32", (-1, -1, 100))]

    def after(tensors: list[TensorSpec]) -> tuple[TensorSpec, ...]:
        new = (changed.get(one.name.replace(".", "_"), one) for one in tensors)
        return tuple(one for one in new if one is not None)

    known = {one.name.replace(".", "_") for one in (*inputs, *outputs)}
    added = tuple(one for name, one in changed.items() if name not in known and one is not None)
    return ModelSpec((*after(inputs), *added), after(outputs))


def test_tensors_of_a_decoder_are_put_in_order() -> None:
    layout = find_layout(spec(), NONE, {})
    assert isinstance(layout, DecoderLayout)
    names = [one.name for one in layout.executed.inputs]
    assert names[:3] == ["input_ids", "attention_mask", "position_ids"]
    pasts = [PAST.format(layer, part) for layer in (0, 1) for part in ("key", "value")]
    assert names[3:] == [one.name for one in layout.pasts] == pasts
    assert [one.name for one in layout.executed.outputs] == [
        "logits",
        *(name.replace("past_key_values", "present") for name in pasts),
    ]
    assert layout.token_bytes == 4 * 4 * 8 * 2


def test_decoder_may_lack_positions() -> None:
    layout = find_layout(spec(position_ids=None), NONE, {})
    assert isinstance(layout, DecoderLayout)
    assert layout.leads == ("input_ids", "attention_mask")
    assert len(layout.pasts) == 4


def test_other_models_are_no_decoders() -> None:
    tensor = TensorSpec("input_ids", "INT64", (-1, -1))
    assert not is_decoder(ModelSpec((tensor,), (replace(tensor, name="logits"),)))
    assert is_decoder(spec())


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"use_cache_branch": TensorSpec("use_cache_branch", "BOOL", ())}, "'use_cache_branch' isn't of BOOL with one"),
        ({"seqlens_k": TensorSpec("seqlens_k", "INT32", (-1,))}, "has an input 'seqlens_k'"),
        ({"attention_mask": None}, "has no input 'attention_mask'"),
        ({"input_ids": TensorSpec("input_ids", "INT32", (-1, -1))}, "'input_ids' isn't of INT64"),
        ({"logits": None}, "has no output 'logits'"),
        ({"logits": TensorSpec("logits", "BF16", (-1, -1, 100))}, "'logits' isn't of FP32 or FP16"),
        ({"present_1_key": None}, "has no output 'present.1.key'"),
        (
            {"past_key_values_1_key": TensorSpec(PAST.format(1, "key"), "FP32", (-1, 4, -1, 8))},
            "'past_key_values.1.key' isn't of FP32 or FP16 like",
        ),
        (
            {"past_key_values_1_key": TensorSpec(PAST.format(1, "key"), "FP16", (-1, 4, -1, -1))},
            r"'past_key_values.1.key' isn't \[free, heads",
        ),
        (
            {"past_key_values_1_key": TensorSpec(PAST.format(1, "key"), "FP16", (-1, 8, -1))},
            r"'past_key_values.1.key' isn't \[free, heads",
        ),
    ],
)
def test_decoder_of_another_layout_is_told_apart(changed: Mapping[str, TensorSpec | None], why: str) -> None:
    refused = find_layout(spec(**changed), NONE, {})
    assert isinstance(refused, str)
    assert re.search(why, refused)


LENGTHS = {
    "seqlens_k": TensorSpec("seqlens_k", "INT32", (-1,)),
    "total_sequence_length": TensorSpec("total_sequence_length", "INT32", ()),
}


@pytest.mark.parametrize(
    ("changed", "leads"),
    [
        ({"position_ids": None}, ("input_ids", "attention_mask")),
        ({"attention_mask": None, "position_ids": None, **LENGTHS}, ("input_ids", *LENGTHS)),
        (LENGTHS, ("input_ids", "attention_mask", "position_ids", *LENGTHS)),
    ],
    ids=["mask", "lengths", "both"],
)
def test_grouped_attention_is_stepped_in_place(
    changed: Mapping[str, TensorSpec | None], leads: tuple[str, ...]
) -> None:
    layout = find_layout(spec(**changed), GROUPED, {})
    assert isinstance(layout, DecoderLayout)
    assert (layout.in_place, layout.leads) == (True, leads)
    assert layout.token_bytes == 4 * 4 * 8 * 2


@pytest.mark.parametrize(
    ("changed", "operators", "why"),
    [
        ({}, {"If"}, "has an If"),
        ({"attention_mask": None}, {}, "has no input 'attention_mask'"),
        ({"attention_mask": None, "seqlens_k": LENGTHS["seqlens_k"]}, {}, "has no input 'attention_mask'"),
        ({"seqlens_k": TensorSpec("seqlens_k", "INT64", (-1,))}, {}, "'seqlens_k' isn't of INT32"),
        ({"use_cache_branch": TensorSpec("use_cache_branch", "BOOL", (1,))}, {}, "has an input 'use_cache_branch'"),
    ],
)
def test_grouped_attention_of_another_kind_is_told_apart(
    changed: Mapping[str, TensorSpec | None], operators: Collection[str], why: str
) -> None:
    refused = find_layout(spec(**changed), GROUPED | {*operators}, {})
    assert isinstance(refused, str)
    assert why in refused


@pytest.mark.parametrize("said", [{}, {"head_size": 8}, {"head_size": "8"}], ids=["unsaid", "said", "text"])
def test_free_size_is_that_of_the_configuration(said: Mapping[str, object]) -> None:
    free = {
        PAST.format(layer, part).replace(".", "_"): TensorSpec(PAST.format(layer, part), "FP16", (-1, 4, -1, -1))
        for layer in (0, 1)
        for part in ("key", "value")
    }
    layout = find_layout(spec(**free), GROUPED, said)
    if said == {"head_size": 8}:
        assert isinstance(layout, DecoderLayout)
        assert layout.token_bytes == 4 * 4 * 8 * 2
    else:
        assert "with fixed heads and size" in str(layout)


def test_settings_of_the_builder_have_the_same_names(tmp_path: Path) -> None:
    decoder = {"head_size": 8, "sliding_window": {"window_size": 7, "layers": [0]}}
    model = {"context_length": 99, "eos_token_id": [1, 2], "decoder": decoder}
    (tmp_path / "genai_config.json").write_text(json.dumps({"model": model, "search": {"max_length": 5}}))
    said = read_settings("m", tmp_path / "model.onnx")
    wanted = {"context_length": 99, "eos_token_id": [1, 2], "head_size": 8, "sliding_window": 7}
    assert {key: said[key] for key in wanted} == wanted
    (tmp_path / "genai_config.json").write_text(json.dumps({"model": 3}))
    assert read_settings("m", tmp_path / "model.onnx") == {}


def test_settings_beside_the_model_come_first(tmp_path: Path) -> None:
    model = tmp_path / "m" / "1" / "model.onnx"
    model.parent.mkdir(parents=True)
    (tmp_path / "m" / "config.json").write_text(json.dumps({"eos_token_id": 1, "n_positions": 9, "n_ctx": None}))
    assert read_settings("m", model) == {"eos_token_id": 1, "n_positions": 9}
    (tmp_path / "m" / "1" / "config.json").write_text(json.dumps({"eos_token_id": 2}))
    assert read_settings("m", model) == {"eos_token_id": 2}
    (tmp_path / "m" / "1" / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 4]}))
    assert read_settings("m", model) == {"eos_token_id": [3, 4]}


def test_null_in_any_part_says_nothing(tmp_path: Path) -> None:
    decoder = {"bos_token_id": 0, "suppress_tokens": None, "forced_bos_token_id": None}
    (tmp_path / "config.json").write_text(json.dumps({"decoder": decoder, "encoder": {"image_size": None}}))
    assert read_settings("m", tmp_path / "model.onnx") == {"decoder": {"bos_token_id": 0}, "encoder": {}}


@pytest.mark.parametrize("text", ["{", "[1]", "\udc80"], ids=["broken", "list", "bytes"])
def test_file_that_says_nothing_readable_fails_the_load(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(LoadError, match=r"model 'm': .*config\.json: "):
        read_settings("m", tmp_path / "model.onnx")


def test_folder_of_another_name_has_no_say(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    assert read_settings("m", tmp_path / "m" / "model.onnx") == {}
