"""A decoder that is stepped: a model of ONNX Runtime whose requests are prompts.

Lives here: `DecoderModel`, around the model that executes its steps, and what is tried before anybody relies on them.
Must not: how instances go on (`generations`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from paceline.backends.base import Device, ModelSource
from paceline.backends.errors import ExecutionError, LoadError
from paceline.backends.generation import MAX_TOKENS, GenerationLimits, Wanted, read_request, with_prompt
from paceline.backends.generation_totals import GenerationTotals
from paceline.backends.onnx.decoder_block import StepsModel
from paceline.backends.onnx.decoder_layout import DecoderLayout, find_layout, is_decoder, read_settings
from paceline.backends.onnx.decoder_trial import Trial, try_steps
from paceline.backends.onnx.generations import GeneratingInstance
from paceline.backends.onnx.options import DecoderSettings, decoder_settings
from paceline.backends.onnx.spec import check_served
from paceline.backends.open_request import Parameters
from paceline.backends.spec import ModelSpec, Tensors
from paceline.backends.text import Tokenizer, open_tokenizer

__all__ = ["DecoderModel", "decoder_of"]

_log = logging.getLogger("paceline.backends.onnx")

_LIMITS = ("context_length", "max_position_embeddings", "n_positions", "n_ctx", "max_sequence_length", "max_seq_len")


class _Stepped(Protocol):
    """The model that is stepped."""

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def operators(self) -> frozenset[str]: ...

    def stepped(self, spec: ModelSpec, device: Device) -> StepsModel:
        """What executes it on `device`, with `spec` for its tensors. Blocks; raises LoadError."""

    def close(self) -> None: ...


class DecoderModel:
    """`OpenModel` and `Generates`."""

    platform = "onnxruntime_onnx"

    def __init__(
        self,
        name: str,
        model: _Stepped,
        layout: DecoderLayout,
        limits: GenerationLimits,
        settings: DecoderSettings,
        tried: Trial,
    ) -> None:
        self.spec = limits.spec
        self._name = name
        self._model = model
        self._layout = layout
        self._limits = limits
        self._settings = settings
        self._tried = tried
        self.totals = GenerationTotals()

    @property
    def in_words(self) -> str:
        limits, settings = self._limits, self._settings
        ends = f"ends at {', '.join(map(str, limits.end_tokens))}" if limits.end_tokens else "without an end token"
        lengths = "" if self._tried.pads else ", those of equal length together"
        whole = "" if self._tried.in_pieces else "; prompts aren't cut into pieces"
        text = "; takes texts" if limits.tokenizer is not None else ""
        return (
            f"a decoder, generates up to {limits.most_tokens} tokens of {limits.vocabulary}, {ends}{text}; up to "
            f"{settings.most_generations} generations are stepped together{lengths}{whole}"
        )

    def read(self, inputs: Tensors, parameters: Parameters) -> Wanted:
        return read_request(inputs, parameters, self._limits)

    def with_prompt(self, wanted: Wanted) -> Wanted:
        return with_prompt(wanted, self._limits)

    def instance(self, spec: ModelSpec, device: Device) -> GeneratingInstance:
        check_served(self._name, spec, self.spec)
        steps = self._model.stepped(self._layout.executed, device)
        settings = self._settings, self._tried, self.totals
        return GeneratingInstance(self._name, steps, device, self._layout, self._limits, *settings)

    def close(self) -> None:
        self._model.close()


def decoder_of(source: ModelSource, model: _Stepped, device: Device) -> DecoderModel | None:
    """`model` as one that generates. None if it is no decoder, or is to be served as it is; the log says why. Blocks
    for some executions. Raises LoadError for files beside it that can't be read."""
    if not is_decoder(model.spec):
        return None
    settings = decoder_settings(source)
    why_not = source.why_raw if settings.generates else "paceline.generate is off"
    if not why_not:
        said = read_settings(source.name, source.path)
        layout = find_layout(model.spec, model.operators, said)
        if isinstance(layout, DecoderLayout):
            steps = model.stepped(layout.executed, device)
            try:
                layout, tried = source.supervise(partial(_tried, steps, layout, said))
                fits = settings.most_cache_bytes // layout.token_bytes
                limits = _limits_of(source.name, said, tried.vocabulary, fits)
                limits = replace(limits, tokenizer=_tokenizer_of(source, tried.vocabulary))
                if layout.least_past:
                    most = min(settings.most_generations, max(1, fits // layout.least_past))
                    settings = replace(settings, most_generations=most)
                return DecoderModel(source.name, model, layout, limits, settings, tried)
            except ExecutionError as error:
                layout = f"steps with made-up tokens fail: {error}"
            except BaseException:
                steps.abandon()
                raise
            finally:
                steps.close()
        why_not = layout
    text = "model '%s' has the inputs of a decoder and is served as it is, a step a request: %s"
    _log.info(text, source.name, why_not)
    return None


def _tokenizer_of(source: ModelSource, vocabulary: int) -> Tokenizer | None:
    found = open_tokenizer(source.path, vocabulary)
    if isinstance(found, str):
        _log.warning("model '%s' takes token ids, and no texts: %s", source.name, found)
        return None
    return found


def _tried(model: StepsModel, layout: DecoderLayout, said: Mapping[str, Any]) -> tuple[DecoderLayout, Trial]:
    try:
        return layout, try_steps(model, layout, said)
    except ExecutionError:
        window = said.get("sliding_window")
        if not layout.in_place or type(window) is not int or window < 1:
            raise
    # With its attribute sliding_window_cache, the operator refuses pasts that are shorter than its window.
    layout = replace(layout, least_past=window)
    return layout, try_steps(model, layout, said)


def _limits_of(name: str, said: Mapping[str, Any], vocabulary: int, fits: int) -> GenerationLimits:
    longest = next((said[key] for key in _LIMITS if key in said), fits)
    max_tokens = said.get("max_new_tokens", MAX_TOKENS)
    ends = said.get("eos_token_id", ())
    ends = tuple(ends) if isinstance(ends, (list, tuple)) else (ends,)
    numbers = (("its longest text", (longest,), 2), ("max_new_tokens", (max_tokens,), 1), ("eos_token_id", ends, 0))
    for key, values, least in numbers:
        if not all(type(value) is int and value >= least for value in values):
            raise LoadError(
                f"model '{name}': config.json and generation_config.json: {key}: expected integers from {least} on, "
                f"got {list(values)}"
            )
    known = tuple(one for one in ends if one < vocabulary)
    return GenerationLimits(vocabulary, min(longest, max(2, fits)), known, max_tokens)
