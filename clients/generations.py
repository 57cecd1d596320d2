"""Generations: what a prompt and its parameters are on the wire, and what their answers say.

Lives here: pure functions that both clients share. Must not live here: calls. They are for two kinds of servers, told
apart by the inputs that the model has: paceline's decoders, and those like Triton's vLLM backend
(https://github.com/triton-inference-server/vllm_backend), which take a JSON object as `sampling_parameters`, and one
answer per token only if `stream` is true.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from paceline.clients.casting import Array
from paceline.clients.errors import ResponseError
from paceline.clients.messages import InferResult, Inputs, Parameters, ParameterValue

GenerationParameter = ParameterValue | Sequence[str] | None

_FOR_THE_SERVER: Final = ("priority", "timeout")
_PREFIXES: Final = ("paceline_", "triton_")
"""Names, and beginnings of names, of parameters that say nothing about tokens."""


@dataclass(frozen=True, slots=True)
class GenerationChunk:
    """What one answer adds to a generation, usually a token.

    `text` is "" from a model without a tokenizer, and while what comes next may change it. `token_ids` are () from
    servers that don't tell them. `finish_reason` is None except in the last chunk, where it says why that is the last,
    such as `length` or `stop`; of servers that don't say it, also there. `result` is the whole answer.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None
    result: InferResult = field(repr=False)


class GenerationRequest(NamedTuple):
    """Arguments for `stream_infer`."""

    inputs: Inputs
    datatypes: Mapping[str, str]
    parameters: Parameters


def generation_request(
    prompt: str | npt.ArrayLike, parameters: Mapping[str, GenerationParameter], known: Mapping[str, str]
) -> GenerationRequest:
    """A request to a model whose inputs have the `known` datatypes. Raises TypeError and ValueError for parameters that
    can't be sent."""
    inputs: dict[str, npt.ArrayLike] = {"text_input": [prompt]} if isinstance(prompt, str) else {"input_ids": prompt}
    flags = ("stream", "return_finish_reason", *(["return_logprobs"] if "logprobs" in parameters else []))
    of_request: dict[str, ParameterValue] = {}
    sampling: dict[str, GenerationParameter] = {}
    for name, value in {**{flag: True for flag in flags if flag in known}, **parameters}.items():
        if value is None:
            continue  # as if it weren't there
        one = value if isinstance(value, ParameterValue | np.generic) else None
        if name in known:
            inputs[name] = value if one is None else [one]
        elif "sampling_parameters" in known and not (name in _FOR_THE_SERVER or name.startswith(_PREFIXES)):
            sampling[name] = value
        else:
            # A parameter of a request is one value, so several are a list in JSON.
            of_request[name] = _json(value) if one is None else one
    if sampling:
        inputs["sampling_parameters"] = [_json(sampling)]
    return GenerationRequest(inputs, {name: known[name] for name in inputs if name in known}, of_request)


def _json(value: object) -> str:
    def plain(one: Any) -> Any:
        if isinstance(one, np.ndarray | np.generic):
            return one.tolist()
        raise TypeError(f"parameters: expected bool, int, float, str or a sequence of str, got {one!r}")

    return json.dumps(value, default=plain, allow_nan=False)


def generation_chunk(result: InferResult) -> GenerationChunk:
    """Raises ResponseError for outputs that aren't text or token ids."""
    token_ids = result.outputs.get("output_ids", np.empty(0, np.int64))
    if token_ids.dtype.kind not in "iu":
        raise _unexpected(result, "output_ids", "integers")
    reason = result.parameters.get("finish_reason") or _text(result, "finish_reason")
    # vLLM's backend says None in words until there is a reason.
    finish_reason = None if reason in ("", "None") else str(reason)
    return GenerationChunk(_text(result, "text_output"), tuple(token_ids.ravel().tolist()), finish_reason, result)


def _text(result: InferResult, output: str) -> str:
    texts: Array | None = result.outputs.get(output)
    if texts is None or not texts.size:
        return ""
    try:
        text: str = texts.flat[0].decode()
    except (AttributeError, UnicodeDecodeError):
        raise _unexpected(result, output, "UTF-8") from None
    return text


def _unexpected(result: InferResult, output: str, expected: str) -> ResponseError:
    return ResponseError(
        f"model {result.model_name!r}, output {output!r}: expected {expected}, got {result.datatypes[output]}"
    )
