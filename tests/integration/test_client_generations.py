"""Generations of a decoder through both clients, with a real server: the whole answer, and what an early end frees."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from paceline.clients import (
    AsyncInferenceClient,
    DeadlineExceeded,
    GenerationChunk,
    InferenceClient,
    InvalidArgument,
)
from paceline.clients.cli import infer
from paceline.clients.report import generation_text
from tests import decoder_models, text_models
from tests.decoder_models import TINY, Decoder
from tests.harness import ServerProcess
from tests.polling import eventually_async

ENDLESS = Decoder(end_tokens=(), positions=100_000)
SPEAKS = replace(TINY, vocabulary=320)
Generate = Callable[..., AsyncGenerator[GenerationChunk, None]]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("models")
    decoder_models.write(TINY, folder / "tiny" / "1")
    decoder_models.write(ENDLESS, folder / "endless" / "1")
    text_models.write(text_models.byte_level(), decoder_models.write(SPEAKS, folder / "speaks" / "1"))
    (folder / "endless" / "config.pbtxt").write_text(
        'parameters { key: "paceline.max_generations" value { string_value: "1" } }'
    )
    with ServerProcess(folder) as started:
        yield started


@pytest.fixture(params=["blocking", "asyncio"])
async def generate(request: pytest.FixtureRequest, server: ServerProcess) -> AsyncIterator[Generate]:
    if request.param == "asyncio":
        async with AsyncInferenceClient(server.target, timeout_s=60) as made:
            yield made.generate
        return
    with InferenceClient(server.target, timeout_s=60) as client:

        async def chunks(model: str, prompt: Any, **more: Any) -> AsyncGenerator[GenerationChunk, None]:
            with contextlib.closing(client.generate(model, prompt, **more)) as found:
                while (one := await asyncio.to_thread(next, found, None)) is not None:
                    yield one

        yield chunks


async def test_chunks_are_the_whole_answer_token_by_token(server: ServerProcess, generate: Generate) -> None:
    asked = {"max_tokens": 20, "temperature": 1.5, "top_k": 50, "seed": 3, "min_tokens": 4}
    chunks = [chunk async for chunk in generate("tiny", [9, 8, 7], **asked)]
    with InferenceClient(server.target) as client:
        whole = await asyncio.to_thread(client.infer, "tiny", {"input_ids": [9, 8, 7]}, parameters=asked)
    assert [token for chunk in chunks for token in chunk.token_ids] == whole["output_ids"].tolist()
    assert {chunk.finish_reason for chunk in chunks[:-1]} <= {None}
    assert chunks[-1].finish_reason == whole.parameters["finish_reason"]
    assert all(len(chunk.token_ids) == 1 for chunk in chunks[:-1])


async def test_iterator_left_early_frees_the_only_place(generate: Generate, server: ServerProcess) -> None:
    async with contextlib.aclosing(generate("endless", np.array([5]), max_tokens=90_000, timeout_s=None)) as chunks:
        await anext(chunks)
    (chunk,) = [chunk async for chunk in generate("endless", [6], max_tokens=1)]
    assert chunk.finish_reason == "length"
    with InferenceClient(server.target) as client:
        left: AsyncGenerator[GenerationChunk, None] | None
        dropped = client.generate("endless", [5], max_tokens=90_000)
        await asyncio.to_thread(next, dropped)
        del dropped
        assert [chunk async for chunk in generate("endless", [6], max_tokens=1)]
    left = generate("endless", [5], max_tokens=90_000)
    await anext(left)
    left = None
    await eventually_async(lambda: _open_requests(server) == 0, "no request is left")


def _open_requests(server: ServerProcess) -> float:
    return server.metrics().get('paceline_open_requests{model="endless",version="1"}', -1.0)


async def test_timeout_and_refusal_are_errors_of_the_library(generate: Generate) -> None:
    with pytest.raises(DeadlineExceeded):
        _ = [chunk async for chunk in generate("endless", [5], max_tokens=90_000, timeout_s=1.0)]
    with pytest.raises(InvalidArgument, match="parameter 'top_p': expected a number above 0"):
        _ = [chunk async for chunk in generate("tiny", [5], top_p=2.0)]
    with pytest.raises(InvalidArgument, match="expected tokens from 0 to 127, got 128"):
        _ = [chunk async for chunk in generate("tiny", [128])]


async def test_text_of_chunks_is_that_of_the_whole_answer(server: ServerProcess, generate: Generate) -> None:
    asked: dict[str, Any] = {"max_tokens": 30, "temperature": 1.0, "seed": 5, "min_tokens": 10}
    chunks = [chunk async for chunk in generate("speaks", "the cat", logprobs=1, **asked)]
    with InferenceClient(server.target) as client:
        whole = await asyncio.to_thread(client.infer, "speaks", {"text_input": ["the cat"]}, parameters=asked)
    text = whole["text_output"][0].decode()
    assert "".join(chunk.text for chunk in chunks) == text
    assert [token for chunk in chunks for token in chunk.token_ids] == whole["output_ids"].tolist()
    assert chunks[-1].finish_reason == whole.parameters["finish_reason"]
    assert all(b"rank" in chunk.result["logprobs"][0] for chunk in chunks if chunk.token_ids)
    stop = text[12:14]
    cut = [chunk async for chunk in generate("speaks", "the cat", stop=["never there", stop], **asked)]
    assert "".join(chunk.text for chunk in cut) == text[: text.index(stop, 10)]
    assert cut[-1].finish_reason == "stop"


def test_infer_command_prints_what_is_generated(server: ServerProcess) -> None:
    asked = ["speaks", "--server", server.target, "--text", "the cat", "--parameter", "max_tokens=12"]
    whole, streamed = CliRunner().invoke(infer, asked), CliRunner().invoke(infer, [*asked, "--stream"])
    assert (whole.exit_code, whole.stderr, streamed.stderr) == (0, "", "")
    assert whole.stdout == streamed.stdout
    with InferenceClient(server.target) as client:
        chunks = list(client.generate("speaks", "the cat", max_tokens=12))
    assert whole.stdout == generation_text(chunks) + "\n"
