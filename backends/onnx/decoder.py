"""A decoder that is stepped: a model of ONNX Runtime whose requests are prompts.

Lives here: `DecoderModel`, around the model that executes its steps, and maybe its encoder; what its requests have to
be like. Must not: how instances go on (`generations`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from paceline.backends.base import Device, DeviceKind, ModelSource
from paceline.backends.errors import ExecutionError, LoadError
from paceline.backends.generation import MAX_TOKENS, GenerationLimits, Wanted, read_request, with_prompt
from paceline.backends.onnx.decoder_block import StepsModel
from paceline.backends.onnx.decoder_layout import DecoderLayout, find_layout, is_decoder, read_settings
from paceline.backends.onnx.decoder_trial import Trial, try_encoder, try_steps
from paceline.backends.onnx.decoding_rules import read_rules
from paceline.backends.onnx.encoder import ENCODER_FILE, EncoderLayout, EncoderThread, find_encoder
from paceline.backends.onnx.encoder_requests import EncoderRequests
from paceline.backends.onnx.generations import Decoder, GeneratingInstance
from paceline.backends.onnx.options import DecoderSettings, decoder_settings
from paceline.backends.onnx.spec import check_served
from paceline.backends.open_request import OpenRequest, Parameters
from paceline.backends.paths import is_file
from paceline.backends.spec import Array, ModelSpec, Tensors
from paceline.backends.text import Tokenizer, open_tokenizer

_log = logging.getLogger("paceline.backends.onnx")

_ENCODED_TOGETHER = 8
"""So many requests are handed over at a time, of those that wait."""
_TARGET_LIMITS = ("max_target_positions", "max_decoder_position_embeddings", "max_position_embeddings")
_SOURCE_LIMITS = ("max_encoder_position_embeddings", "max_position_embeddings")
_MOST_SOURCE = 4_096
"""Tokens of a source where no file says how many: an encoder's attention takes memory by the square of them."""
_LIMITS = ("context_length", "max_position_embeddings", "n_positions", "n_ctx", "max_sequence_length", "max_seq_len")


class _Stepped(Protocol):
    """The model that is stepped."""

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def operators(self) -> frozenset[str]: ...

    def stepped(self, spec: ModelSpec, device: Device) -> StepsModel:
        """What executes it on `device`, with `spec` for its tensors. Blocks; raises LoadError."""

    def tried(self, spec: ModelSpec, device: Device) -> StepsModel:
        """The same before it is stepped."""

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class _Encoding:
    """A decoder's encoder. `pads`: it takes texts of different lengths together."""

    model: _Stepped
    pads: bool
    requests: EncoderRequests


class DecoderModel:
    """`OpenModel` and `Generates`."""

    platform = "onnxruntime_onnx"

    def __init__(self, decoder: Decoder, model: _Stepped, encoding: _Encoding | None) -> None:
        self.spec = decoder.limits.spec if encoding is None else encoding.requests.spec
        self.totals = decoder.totals
        self._decoder = decoder
        self._model = model
        self._encoding = encoding

    @property
    def together(self) -> int:
        return 1 if self._encoding is None else min(_ENCODED_TOGETHER, self._decoder.settings.most_generations)

    @property
    def in_words(self) -> str:
        limits, settings, tried = self._decoder.limits, self._decoder.settings, self._decoder.tried
        ends = f"ends at {', '.join(map(str, limits.end_tokens))}" if limits.end_tokens else "without an end token"
        what = "a decoder" if self._encoding is None else f"an encoder of {self.spec.inputs[0].name} with a decoder"
        lengths = "" if tried.pads else ", those of equal length together"
        if self._encoding is not None and self._encoding.requests.layout.takes_tokens and not tried.pads_sources:
            lengths += ", and with texts of equal length"
        whole = "" if tried.in_pieces else "; prompts aren't cut into pieces"
        takes_texts = limits.tokenizer is not None if self._encoding is None else self._encoding.requests.takes_texts
        text = "; takes texts" if takes_texts else ""
        return (
            f"{what}, generates up to {limits.most_tokens} tokens of {limits.vocabulary}, {ends}{text}; up to "
            f"{settings.most_generations} generations are stepped together{lengths}{whole}"
        )

    def read(self, inputs: Tensors, parameters: Parameters) -> Wanted:
        if self._encoding is not None:
            return self._encoding.requests.read(inputs, parameters)
        return read_request(inputs, parameters, self._decoder.limits)

    def with_prompt(self, wanted: Wanted) -> Wanted:
        if self._encoding is not None:
            return self._encoding.requests.with_source(wanted)
        return with_prompt(wanted, self._decoder.limits)

    def instance(self, spec: ModelSpec, device: Device) -> GeneratingInstance:
        check_served(self._decoder.name, spec, self.spec)
        steps, encoder = self._model.stepped(self._decoder.layout.executed, device), None
        if self._encoding is not None:
            layout = self._encoding.requests.layout
            steps_of_encoder = self._encoding.model.stepped(layout.executed, device)
            encoder = EncoderThread(steps_of_encoder, layout, pads=self._encoding.pads)
        return GeneratingInstance(self._decoder, steps, device, self._asked, encoder)

    def close(self) -> None:
        self._model.close()
        if self._encoding is not None:
            self._encoding.model.close()

    def _asked(self, request: OpenRequest) -> Wanted:
        """Raises ModelRefused. Those in clients' shared memory weren't read before."""
        return self.with_prompt(request.wanted or self.read(request.inputs, request.parameters))


def decoder_of(
    source: ModelSource, model: _Stepped, open_beside: Callable[[Path], _Stepped], device: Device
) -> DecoderModel | None:
    """`model` as one that generates. None if it is no decoder, or is to be served as it is; the log says why. Opens its
    encoder by `open_beside`. Blocks for some executions. Raises LoadError for files beside it that can't be read, or
    don't fit."""
    if not is_decoder(model.spec):
        return None
    settings = decoder_settings(source)
    why_not = source.why_raw if settings.generates else "paceline.generate is off"
    if not why_not:
        said = read_settings(source.name, source.path)
        layout, path = find_layout(model.spec, model.operators, said), source.path.parent / ENCODER_FILE
        if isinstance(layout, str):
            why_not = layout
        elif layout.has_encoder and not is_file(path):
            why_not = f"it has an encoder, and there is no {ENCODER_FILE} beside it"
        else:
            try:
                with ExitStack() as undo:
                    encoder = open_beside(path) if layout.has_encoder else None
                    if encoder is not None:
                        undo.callback(encoder.close)
                    made = _tried(source, model, layout, said, encoder, settings, device)
                    undo.pop_all()
                    return made
            except ExecutionError as error:
                why_not = f"steps with made-up tokens fail: {error}"
    text = "model '%s' has the inputs of a decoder and is served as it is, a step a request: %s"
    _log.info(text, source.name, why_not)
    return None


def _tokenizer_of(source: ModelSource, vocabulary: int) -> Tokenizer | None:
    found = open_tokenizer(source.path, vocabulary)
    if isinstance(found, str):
        _log.warning("model '%s' takes token ids, and no texts: %s", source.name, found)
        return None
    return found


def _try_steps(
    model: StepsModel, layout: DecoderLayout, said: Mapping[str, Any], left: Sequence[Array], *, on_gpu: bool
) -> tuple[DecoderLayout, Trial]:
    try:
        return layout, try_steps(model, layout, said, left, on_gpu=on_gpu)
    except ExecutionError:
        window = said.get("sliding_window")
        if not layout.in_place or type(window) is not int or window < 1:
            raise
    # With its attribute sliding_window_cache, the operator refuses pasts that are shorter than its window.
    layout = replace(layout, least_past=window)
    return layout, try_steps(model, layout, said, on_gpu=on_gpu)


def _tried(
    source: ModelSource,
    model: _Stepped,
    layout: DecoderLayout,
    said: Mapping[str, Any],
    encoder: _Stepped | None,
    settings: DecoderSettings,
    device: Device,
) -> DecoderModel:
    """A model whose steps with made-up tokens give what they should. Raises ExecutionError and LoadError."""
    name, most_tokens = source.name, settings.most_cache_bytes // layout.token_bytes
    found, left, pads, on_gpu = None, list[Array](), False, device.kind is DeviceKind.GPU
    of_encoder, of_decoder = ({**said, **_of_part(said, "encoder")}, {**_of_part(said, "decoder"), **said})
    if encoder is not None:
        found = find_encoder(encoder.spec, of_encoder, layout)
        if isinstance(found, str):
            raise LoadError(f"model '{name}': {ENCODER_FILE} doesn't fit its decoder: {found}")
        with _trying(encoder, found.executed, device) as steps:
            left, pads = source.supervise(
                partial(try_encoder, steps, found, _vocabulary(of_encoder) or 8, on_gpu=on_gpu)
            )
        said = of_decoder
    with _trying(model, layout.executed, device) as steps:
        layout, tried = source.supervise(partial(_try_steps, steps, layout, said, left, on_gpu=on_gpu))
    limits = _limits_of(name, said, tried.vocabulary, most_tokens, has_encoder=encoder is not None)
    limits = replace(limits, tokenizer=_tokenizer_of(source, tried.vocabulary))
    if layout.least_past:
        most_generations = min(settings.most_generations, max(1, most_tokens // layout.least_past))
        settings = replace(settings, most_generations=most_generations)
    rules, encoding = read_rules(name, said, tried.vocabulary), None
    if encoder is not None and isinstance(found, EncoderLayout):
        positions = next((of_encoder[key] for key in _SOURCE_LIMITS if type(of_encoder.get(key)) is int), _MOST_SOURCE)
        # With its keys and values, there is room for an answer.
        fits = (most_tokens - 2) * layout.token_bytes // layout.source_bytes
        most = max(1, min(positions, fits))
        requests = EncoderRequests(found, most, _vocabulary(of_encoder), rules, limits)
        encoding = _Encoding(encoder, pads, requests)
    return DecoderModel(Decoder(name, layout, limits, settings, tried, rules), model, encoding)


@contextmanager
def _trying(model: _Stepped, spec: ModelSpec, device: Device) -> Iterator[StepsModel]:
    steps = model.tried(spec, device)
    try:
        yield steps
    except ExecutionError:
        raise
    except BaseException:  # it may hang
        steps.abandon()
        raise
    finally:
        steps.close()


def _vocabulary(said: Mapping[str, Any]) -> int:
    """0 if it doesn't say."""
    known = said.get("vocab_size")
    return known if isinstance(known, int) and known > 0 else 0


def _of_part(said: Mapping[str, Any], part: str) -> Mapping[str, Any]:
    """What is said of one of two models that were put together."""
    found = said.get(part)
    return found if isinstance(found, dict) else {}


def _limits_of(
    name: str, said: Mapping[str, Any], vocabulary: int, fits: int, *, has_encoder: bool
) -> GenerationLimits:
    longest = next((said[key] for key in (_TARGET_LIMITS if has_encoder else _LIMITS) if key in said), fits)
    max_tokens = said.get("max_new_tokens", MAX_TOKENS)
    if has_encoder and "max_new_tokens" not in said and type(said.get("max_length")) is int:
        max_tokens = max(1, said["max_length"] - 1)
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
