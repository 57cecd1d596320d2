"""A model's `tokenizer.json`: where it is found, and what makes it of no use."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Own
from tokenizers import models

from paceline.backends.errors import ModelRefused
from paceline.backends.installed import how_to_install
from paceline.backends.text import Tokenizer, open_tokenizer
from tests import text_models


def folder_of(root: Path) -> Path:
    folder = root / "m" / "1"
    folder.mkdir(parents=True)
    return folder


def test_tokenizer_is_found_beside_the_model_or_its_version(tmp_path: Path) -> None:
    model = folder_of(tmp_path) / "model.onnx"
    assert open_tokenizer(model, 400) is None
    text_models.write(text_models.byte_level(), tmp_path / "m")
    found = open_tokenizer(model, 400)
    assert isinstance(found, Tokenizer)
    assert found.encode("the cat") == text_models.byte_level().encode("the cat").ids
    text_models.write(text_models.sentence_pieces(), tmp_path / "m" / "1")
    found = open_tokenizer(model, 400)
    assert isinstance(found, Tokenizer)
    assert found.encode("the cat")[0] == 1


def test_tokenizer_outside_of_the_folder_is_not_read(tmp_path: Path) -> None:
    text_models.write(text_models.byte_level(), tmp_path)
    folder = folder_of(tmp_path)
    (folder / "tokenizer.json").symlink_to(tmp_path / "tokenizer.json")
    assert open_tokenizer(folder / "model.onnx", 400) is None


def test_tokens_beyond_the_model_are_told(tmp_path: Path) -> None:
    text_models.write(text_models.byte_level(), folder_of(tmp_path))
    why = open_tokenizer(tmp_path / "m" / "1" / "model.onnx", 200)
    assert why == "tokenizer.json has the token 266, and the model knows those up to 199"


@pytest.mark.parametrize("content", ["", "{", "{}", "[]", '{"model": 3}'])
def test_tokenizer_that_is_none_is_told(tmp_path: Path, content: str) -> None:
    (folder_of(tmp_path) / "tokenizer.json").write_text(content)
    why = open_tokenizer(tmp_path / "m" / "1" / "model.onnx", 200)
    assert isinstance(why, str)
    assert why.startswith("tokenizer.json can't be read: ")


def test_missing_package_is_told_with_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text_models.write(text_models.byte_level(), folder_of(tmp_path))
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    why = open_tokenizer(tmp_path / "m" / "1" / "model.onnx", 400)
    assert why == f"tokenizer.json needs the package tokenizers: {how_to_install('text')}"


def test_prompts_are_neither_cut_nor_filled_up() -> None:
    own = text_models.byte_level()
    own.enable_truncation(2)
    own.enable_padding(length=9)
    assert Tokenizer(own).encode("the cat") == text_models.byte_level().encode("the cat").ids


def test_text_without_tokens_for_it_is_refused() -> None:
    tokenizer = Tokenizer(Own(models.WordLevel({"a": 0}, unk_token="<unk>")))
    with pytest.raises(ModelRefused, match="input 'text_input': the tokenizer can't read it"):
        tokenizer.encode("b")


def test_pieces_are_what_tokens_add_to_a_text() -> None:
    for tokenizer in (Tokenizer(text_models.byte_level()), Tokenizer(text_models.sentence_pieces())):
        tokens = [token for token in tokenizer.encode("the cat") if tokenizer.is_shown(token)]
        assert "".join(map(tokenizer.piece, tokens)).strip() == "the cat"
        assert tokenizer.piece(2) == "</s>"
        assert tokenizer.piece(9_999) == ""
