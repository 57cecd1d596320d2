"""Turns texts into the numbers of their tokens, by the `tokenizer.json` beside this file."""

import numpy as np
from tokenizers import Tokenizer

MOST_TOKENS = 256  # the encoder was trained with no more


class Model:
    inputs = {"text": ("BYTES", [-1, 1])}
    outputs = {
        "input_ids": ("INT64", [-1, -1]),
        "attention_mask": ("INT64", [-1, -1]),
        "token_type_ids": ("INT64", [-1, -1]),
    }

    def load(self, context):
        self.tokenizer = Tokenizer.from_file(str(context.folder / "tokenizer.json"))
        self.tokenizer.enable_truncation(MOST_TOKENS)
        self.tokenizer.enable_padding()  # of the texts of one request; the server fills up those of different ones

    def execute(self, inputs):
        found = self.tokenizer.encode_batch([text.decode(errors="replace") for text in inputs["text"][:, 0]])
        return {
            "input_ids": np.array([text.ids for text in found]),
            "attention_mask": np.array([text.attention_mask for text in found]),
            "token_type_ids": np.array([text.type_ids for text in found]),
        }
