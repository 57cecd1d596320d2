"""Small tokenizers, built on the fly, of the kinds that decoders come with.

Lives here: their vocabularies and parts. Must not: anything of the server. In all of them 0 is an unknown token, 1
begins a text, 2 ends one, and these are special.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

__all__ = ["KINDS", "byte_level", "byte_pairs", "sentence_pieces", "unigrams", "word_ends", "word_pieces", "write"]

_SPECIAL = ("<unk>", "<s>", "</s>")
_WORDS = ("the", "then", "he", "hen", "a", "cat", "sat", "on", "mat", "stop", "one", "two", "é", "日本")
_LETTERS = "abcdefghijklmnopqrstuvwxyz.,!?é日本語👋"


def write(tokenizer: Tokenizer, folder: Path) -> Path:
    """Write `tokenizer.json`; the folder again."""
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def byte_level() -> Tokenizer:
    """As of GPT-2, Llama 3 and Qwen: 267 tokens, some of which are parts of characters."""
    merges = [("Ġ", "t"), ("t", "h"), ("Ġt", "h"), ("h", "e"), ("Ġ", "c"), ("Ġc", "a"), ("Ã", "©"), ("æ", "Ĺ")]
    tokenizer = byte_pairs(sorted(pre_tokenizers.ByteLevel.alphabet()), merges)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def sentence_pieces() -> Tokenizer:
    """As of Llama 2 and Mistral: blanks as ▁, bytes for what the vocabulary lacks, and a token before each text."""
    single = [f"<0x{byte:02X}>" for byte in range(256)]
    merges = [("▁", "t"), ("▁t", "h"), ("▁th", "e"), ("▁", "c"), ("▁c", "a"), ("▁ca", "t"), ("o", "n")]
    tokenizer = byte_pairs([*single, "▁", *"abcdefghijklmnopqrstuvwxyz.,!?é"], merges, byte_fallback=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def unigrams() -> Tokenizer:
    """As of T5: blanks as ▁, by probability."""
    pieces = [*_SPECIAL, "▁", *(f"▁{word}" for word in _WORDS), *_LETTERS, "on", "at"]
    tokenizer = Tokenizer(
        models.Unigram([(piece, -float(len(pieces[0]))) for piece in dict.fromkeys(pieces)], unk_id=0)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return _with_special(tokenizer)


def word_pieces() -> Tokenizer:
    """As of BERT: what goes on a word begins with ##."""
    pieces = dict.fromkeys([*_SPECIAL, *_WORDS, *_LETTERS, *(f"##{letter}" for letter in _LETTERS), "##at", "##en"])
    vocabulary = {piece: place for place, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return _with_special(tokenizer)


def word_ends() -> Tokenizer:
    """As of the first GPT: what ends a word says so."""
    pieces = dict.fromkeys([*_LETTERS, *(f"{letter}</w>" for letter in _LETTERS)])
    tokenizer = byte_pairs([*pieces], [("a", "t</w>"), ("t", "h"), ("th", "e</w>")], end_of_word_suffix="</w>")
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.BPEDecoder()
    return tokenizer


def byte_pairs(alphabet: Sequence[str], merges: Sequence[tuple[str, str]], **options: Any) -> Tokenizer:
    pieces = [*_SPECIAL, *alphabet, *(one + other for one, other in merges)]
    vocabulary = {piece: place for place, piece in enumerate(dict.fromkeys(pieces))}
    return _with_special(Tokenizer(models.BPE(vocabulary, list(merges), unk_token="<unk>", **options)))


def _with_special(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.add_special_tokens([*_SPECIAL])
    return tokenizer


KINDS: Mapping[str, Callable[[], Tokenizer]] = {
    one.__name__: one for one in (byte_level, sentence_pieces, unigrams, word_pieces, word_ends)
}
