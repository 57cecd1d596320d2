"""What a pair of encoder and decoder generates, by the plainest means there are: one request at a time, `session.run`
for each token.

Lives here: the loop. Must not: anything of the server, or more than one request in a run. What `generation_config.json`
says of tokens is applied as in Hugging Face's `transformers`: some are forced at their places, some never chosen, or
not as the first that isn't forced.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort  # type: ignore[import-untyped,unused-ignore]

from tests.generation_truth import DTYPES, Asked, Generation, choose
from tests.wire import Array

__all__ = ["NaivePair"]


class NaivePair:
    """A folder of a pair, on one thread."""

    def __init__(self, folder: Path) -> None:
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        self._encoder, self._decoder = (
            ort.InferenceSession(str(folder / f"{name}.onnx"), options, providers=["CPUExecutionProvider"])
            for name in ("encoder_model", "decoder_model_merged")
        )
        config = json.loads((folder / "config.json").read_text())
        self._said = {**config, **json.loads((folder / "generation_config.json").read_text())}
        self._positions = self._said.get("max_target_positions") or config.get("decoder", {}).get(
            "max_position_embeddings", 10**6
        )
        ends = self._said["eos_token_id"]
        self.end_tokens = [ends] if isinstance(ends, int) else ends

    def generate(self, source: Array, asked: Asked, given: Sequence[int] = ()) -> Generation:
        draw = np.random.default_rng(asked.seed).random
        forced = {place: token for place, token in self._said.get("forced_decoder_ids", []) if token is not None}
        if "forced_bos_token_id" in self._said:
            forced[1] = self._said["forced_bos_token_id"]
        start = self._said["decoder_start_token_id"]
        prompt = [*given] if [*given][:1] == [start] else [start, *given]
        while len(prompt) in forced:
            prompt.append(forced[len(prompt)])
        fed = {"input_ids": source[None], "attention_mask": np.ones((1, len(source)), np.int64)}
        name = self._encoder.get_inputs()[0].name
        fed[name] = source[None]
        (hidden,) = self._encoder.run(None, {one.name: fed[one.name] for one in self._encoder.get_inputs()})
        found, ids, past = Generation(), list(prompt), self._no_past()
        first = max(len(prompt), 1 + max(forced, default=0))
        while len(found.tokens) < min(asked.max_tokens, self._positions - len(prompt)):
            scores, past = self._step(ids, hidden, past)
            tokens = [*prompt, *found.tokens]
            barred = [*self._said.get("suppress_tokens", []), *(one for (one,) in self._said.get("bad_words_ids", []))]
            barred += self._said.get("begin_suppress_tokens", []) if len(tokens) == first else []
            barred += self.end_tokens if len(found.tokens) < asked.min_tokens else []
            if (token := forced.get(len(tokens))) is None:
                token, margin = choose(scores, tokens, barred, asked, draw)
            else:
                margin = np.inf
            found.margins.append(margin)
            if token in self.end_tokens:
                found.finish_reason = "stop"
                break
            found.tokens.append(token)
            ids = [token]
        return found

    def _no_past(self) -> dict[str, Array]:
        return {
            one.name: np.zeros((1, one.shape[1], 0, one.shape[3]), DTYPES[one.type])
            for one in self._decoder.get_inputs()
            if one.name.startswith("past_key_values.")
        }

    def _step(self, ids: Sequence[int], hidden: Array, past: dict[str, Array]) -> tuple[Array, dict[str, Array]]:
        """The last token's scores, and the past after it. What the encoder gave is made once."""
        begins = not next(iter(past.values())).shape[2]
        feeds: dict[str, Any] = {
            "input_ids": np.array([ids], np.int64),
            "encoder_hidden_states": hidden,
            "encoder_attention_mask": np.ones(hidden.shape[:2], np.int64),
            "use_cache_branch": np.array([not begins]),
            **past,
        }
        names = [one.name for one in self._decoder.get_outputs()]
        found = self._decoder.run(names, {one.name: feeds[one.name] for one in self._decoder.get_inputs()})
        outputs = {name.replace("present", "past_key_values"): one for name, one in zip(names, found, strict=True)}
        logits = outputs.pop("logits")
        kept = {name: one for name, one in past.items() if ".encoder." in name and not begins}
        return logits[0, -1].astype(np.float64), {**outputs, **kept}
