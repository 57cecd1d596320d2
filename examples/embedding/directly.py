"""The same embeddings without a server, from the same files, one text at a time: to compare with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort  # type: ignore[import-untyped,unused-ignore]
from tokenizers import Tokenizer

__all__ = ["embedded", "tokenized"]

_MOST_TOKENS = 256


def tokenized(repository: Path, texts: Sequence[str]) -> list[dict[str, list[int]]]:
    """The encoder's inputs for each text, as long as the text is."""
    tokenizer = Tokenizer.from_file(str(repository / "tokenizer" / "1" / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(_MOST_TOKENS)
    return [
        {"input_ids": one.ids, "attention_mask": one.attention_mask, "token_type_ids": one.type_ids}
        for one in tokenizer.encode_batch(list(texts))
    ]


def embedded(repository: Path, texts: Sequence[str]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """The embeddings of the texts, [texts, 384], each of length 1."""
    session = ort.InferenceSession(str(repository / "encoder" / "1" / "model.onnx"), providers=["CPUExecutionProvider"])
    vectors = []
    for columns in tokenized(repository, texts):
        (words,) = session.run(None, {name: np.array([column], np.int64) for name, column in columns.items()})
        mean = words[0].mean(axis=0)
        vectors.append(mean / np.linalg.norm(mean))
    return np.stack(vectors)
