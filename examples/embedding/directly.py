"""The same embeddings without a server, from the same files, one text at a time: to compare with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort  # type: ignore[import-untyped,unused-ignore]
from tokenizers import Tokenizer

__all__ = ["embedded"]

_MOST_TOKENS = 256


def embedded(repository: Path, texts: Sequence[str]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """The embeddings of the texts, [texts, 384], each of length 1."""
    tokenizer = Tokenizer.from_file(str(repository / "tokenizer" / "1" / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(_MOST_TOKENS)
    session = ort.InferenceSession(str(repository / "encoder" / "1" / "model.onnx"), providers=["CPUExecutionProvider"])
    vectors = []
    for text in texts:
        tokens = tokenizer.encode(text)
        columns = {"input_ids": tokens.ids, "attention_mask": tokens.attention_mask, "token_type_ids": tokens.type_ids}
        (words,) = session.run(None, {name: np.array([column], np.int64) for name, column in columns.items()})
        mean = words[0].mean(axis=0)
        vectors.append(mean / np.linalg.norm(mean))
    return np.stack(vectors)
