"""Clients of Triton's vLLM backend, with NVIDIA's client: the same tensors, defaults and answers."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc.aio
from tritonclient.utils import InferenceServerException

from tests import decoder_models, text_models
from tests.decoder_models import TINY
from tests.generation_truth import Asked, Generation, NaiveLoop
from tests.integration.serving import serving

PROMPT = "the cat sat"
SAMPLING = {"temperature": "0", "top_p": "1", "max_tokens": "12"}
"""Numbers as texts, as the backend's sample client sends them."""


class Backend:
    """A server with a model, and what its model says to the prompt."""

    def __init__(self, client: tritonclient.grpc.aio.InferenceServerClient, truth: Generation) -> None:
        self.client = client
        self.truth = truth
        self.text = text_models.byte_level().decode(truth.tokens)

    async def ask(
        self,
        sampling: Mapping[str, Any] | None = SAMPLING,
        parameters: Mapping[str, Any] | None = None,
        **flags: bool | None,
    ) -> list[dict[str, Any]]:
        """The outputs of each answer over a stream."""
        inputs = [tensor("text_input", np.array([PROMPT.encode()], object))]
        if sampling is not None:
            inputs.append(tensor("sampling_parameters", np.array([json.dumps(sampling).encode()], object)))
        inputs += [tensor(name, np.array([flag])) for name, flag in flags.items() if flag is not None]
        answers = []

        async def requests() -> AsyncIterator[dict[str, Any]]:
            yield {"model_name": "m", "inputs": inputs, "request_id": "7", "parameters": parameters}

        async for result, error in self.client.stream_infer(requests(), stream_timeout=60):
            if error is not None:
                raise error
            response = result.get_response()
            assert response.id == "7"
            answers.append({one.name: result.as_numpy(one.name) for one in response.outputs})
        return answers


def tensor(name: str, array: np.ndarray[Any, Any]) -> tritonclient.grpc.aio.InferInput:
    made = tritonclient.grpc.aio.InferInput(name, list(array.shape), "BOOL" if array.dtype == bool else "BYTES")
    made.set_data_from_numpy(array)
    return made


@pytest.fixture
async def backend(tmp_path: Path) -> AsyncIterator[Backend]:
    folder = decoder_models.write(replace(TINY, vocabulary=320, end_tokens=()), tmp_path / "m" / "1")
    text_models.write(text_models.byte_level(), folder)
    truth = NaiveLoop(folder).generate(text_models.byte_level().encode(PROMPT).ids, Asked(max_tokens=12))
    async with serving(tmp_path) as started, tritonclient.grpc.aio.InferenceServerClient(started.target) as client:
        yield Backend(client, truth)


async def test_stream_answers_each_token_without_the_prompt(backend: Backend) -> None:
    answers = await backend.ask(stream=True)
    assert len(answers) == 12
    assert "".join(one["text_output"][0].decode() for one in answers) == backend.text
    assert await backend.ask(stream=True, exclude_input_in_output=True) == answers


@pytest.mark.parametrize("stream", [False, None])
@pytest.mark.parametrize("excludes", [None, False, True])
async def test_one_answer_begins_with_the_prompt_unless_excluded(
    backend: Backend, stream: bool | None, excludes: bool | None
) -> None:
    (answer,) = await backend.ask(stream=stream, exclude_input_in_output=excludes)
    assert answer["text_output"][0].decode() == ("" if excludes else PROMPT) + backend.text
    (same,) = await backend.ask(None, SAMPLING, stream=stream, exclude_input_in_output=excludes)
    assert same["text_output"].tolist() == answer["text_output"].tolist()


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("logprobs", [None, 0, 2])
@pytest.mark.parametrize("asked", [None, False, True])
async def test_additional_outputs_come_only_if_asked_for(
    backend: Backend, stream: bool, logprobs: int | None, asked: bool | None
) -> None:
    sampling = SAMPLING if logprobs is None else {**SAMPLING, "logprobs": logprobs}
    names = ("finish_reason", "cumulative_logprob", "logprobs", "num_input_tokens", "num_output_tokens")
    answers = await backend.ask(sampling, sampling, stream=stream, **{f"return_{name}": asked for name in names})
    if not asked:
        assert all(one.keys() == {"output_ids", "text_output"} for one in answers)
        return
    assert [one["finish_reason"][0] for one in answers] == [b"None"] * (len(answers) - 1) + [b"length"]
    assert answers[-1]["cumulative_logprob"][0] == pytest.approx(sum(backend.truth.logprobs), abs=1e-3)
    assert {int(one["num_input_tokens"][0]) for one in answers} == {len(text_models.byte_level().encode(PROMPT).ids)}
    assert sum(int(one["num_output_tokens"][0]) for one in answers) == 12
    told = [json.loads(one["logprobs"][0]) for one in answers]
    if logprobs is None:
        assert told == [None] * len(answers)
        return
    tokens = [about for one in told for about in one]
    assert all(1 <= len(about) <= logprobs + 1 for about in tokens)
    best = [next(one for one in about.values() if one["rank"] == 1) for about in tokens]
    assert [one["logprob"] for one in best] == pytest.approx(backend.truth.logprobs, abs=1e-4)
    assert [int(next(iter(about))) for about in tokens] == backend.truth.tokens


async def test_stop_of_the_parameters_is_a_text_or_a_list(backend: Backend) -> None:
    stop = backend.text[5:8]
    for given in (stop, [stop, "never"]):
        answers = await backend.ask({**SAMPLING, "stop": given}, stream=True, return_finish_reason=True)
        assert "".join(one["text_output"][0].decode() for one in answers) == backend.text[: backend.text.index(stop)]
        assert answers[-1]["finish_reason"][0] == b"stop"


async def test_ignored_end_tokens_are_tokens_as_others(backend: Backend) -> None:
    neutral = {"n": 1, "best_of": 1, "presence_penalty": 0.0, "stop_token_ids": [], "seed": None, "ignore_eos": True}
    (answer,) = await backend.ask({**SAMPLING, **neutral}, exclude_input_in_output=True)
    assert answer["text_output"][0].decode() == backend.text


@pytest.mark.parametrize(
    ("sampling", "flags", "text"),
    [
        (SAMPLING, {"stream": True, "exclude_input_in_output": False}, "false is not allowed when streaming"),
        ({"best": 1}, {}, "got 'best'"),
        ({"n": 2}, {}, "parameter 'n' is not supported by this build"),
        ({"max_tokens": "many"}, {}, "parameter 'max_tokens': expected an integer"),
        (SAMPLING, {"embedding_request": True}, "embedding_request"),
    ],
)
async def test_what_cannot_be_had_is_refused_by_name(
    backend: Backend, sampling: Mapping[str, Any], flags: Mapping[str, bool], text: str
) -> None:
    with pytest.raises(InferenceServerException, match=text):
        await backend.ask(sampling, **flags)
    assert len(await backend.ask(stream=True)) == 12
