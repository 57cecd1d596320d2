"""What a request of a model that has an encoder asks for.

Lives here: its tensors, what its encoder gets, and how its decoder begins. Must not: execute anything. All else is read
as of any prompt (`backends.generation`), here the decoder's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from paceline.backends.errors import ModelRefused
from paceline.backends.generation import SHORT, TEXT_SPEC, GenerationLimits, Wanted, read_request, text_of
from paceline.backends.onnx.decoding_rules import DecodingRules
from paceline.backends.onnx.encoder import EncoderLayout
from paceline.backends.open_request import Parameters
from paceline.backends.spec import MISSING, Array, ModelSpec, Tensors, TensorSpec

_BEGINNING = TensorSpec("decoder_input_ids", "INT64", (-1,), optional=True)


@dataclass(frozen=True, slots=True)
class EncoderRequests:
    """Those of one model. Its encoder takes up to `most_tokens` tokens out of `vocabulary` (0: not known), if tokens;
    `limits` are its decoder's."""

    layout: EncoderLayout
    most_tokens: int
    vocabulary: int
    rules: DecodingRules
    limits: GenerationLimits

    @property
    def takes_texts(self) -> bool:
        return self.limits.tokenizer is not None and self.layout.takes_tokens

    @property
    def spec(self) -> ModelSpec:
        source = replace(self.layout.source, optional=self.takes_texts)
        others = TEXT_SPEC.inputs[1 if self.takes_texts else 2 :] if self.limits.tokenizer is not None else ()
        return ModelSpec((source, _BEGINNING, *others), self.limits.spec.outputs)

    def read(self, inputs: Tensors, parameters: Parameters) -> Wanted:
        """Raises ModelRefused. A long text has no tokens yet."""
        source, given, *others = inputs
        text = MISSING
        if self.takes_texts:
            text, *others = others
        name = self.layout.source.name
        if (source is MISSING) == (text is MISSING):
            came = "neither" if source is MISSING else "both"
            raise _refused(f"expected either input '{name}' or input 'text_input', got {came}")
        prompt = np.array(self.rules.prompt([] if given is MISSING else given.tolist()), np.int64)
        _check(_BEGINNING.name, prompt, self.limits.vocabulary, self.limits.most_tokens - 1)
        if text is not MISSING:
            parameters = {"stream": False, **parameters}  # the default for texts
        of_prompt = (prompt, MISSING, *others) if others else (prompt,)
        wanted = read_request(of_prompt, parameters, self.limits)
        if text is not MISSING:
            said = text_of(text[0], replace(self.limits, most_tokens=self.most_tokens))
            wanted = wanted._replace(source=said)
            return self.with_source(wanted) if len(said) <= SHORT else wanted
        if self.layout.takes_tokens:
            _check(name, source, self.vocabulary, self.most_tokens)
        return wanted._replace(source=source)

    def with_source(self, wanted: Wanted) -> Wanted:
        """With tokens for what is a text. Blocks for as long as that is long; raises ModelRefused."""
        if not isinstance(wanted.source, str):
            return wanted
        assert self.limits.tokenizer is not None
        tokens = np.array(self.limits.tokenizer.encode(wanted.source), np.int64)
        _check("text_input", tokens, self.vocabulary, self.most_tokens)
        return wanted._replace(source=tokens)


def _check(name: str, tokens: Array, vocabulary: int, most: int) -> None:
    """Raises ModelRefused."""
    expected = got = ""
    if not tokens.size:
        expected, got = "at least one token", "none"
    elif tokens.size > most:
        expected, got = f"at most {most} tokens", str(tokens.size)
    elif tokens.min() < 0 or (vocabulary and tokens.max() >= vocabulary):
        expected = f"tokens from 0 to {vocabulary - 1}" if vocabulary else "tokens from 0 on"
        got = str(tokens.min() if tokens.min() < 0 else tokens.max())
    if expected:
        raise _refused(f"input '{name}': expected {expected}, got {got}")


def _refused(text: str) -> ModelRefused:
    return ModelRefused("INVALID_ARGUMENT", text)
