"""Decoders served by the token: every answer is what the naive loop gives the request alone, whatever the company."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from pathlib import Path

import grpc
import numpy as np
import pytest
from onnxruntime.capi.onnxruntime_pybind11_state import (  # type: ignore[import-untyped,unused-ignore]
    get_all_operator_schema,
)

from paceline.backends.generation import OPTIONAL_OUTPUTS
from paceline.protos import inference_pb2 as pb
from paceline.server.config import Settings
from tests import decoder_models
from tests.decoder_models import TINY, TINY_GPT2, TINY_GROUPED, Decoder
from tests.generation_truth import Asked, Generation, NaiveLoop, is_same
from tests.integration.controlling import explicit, unload
from tests.integration.regions import register
from tests.integration.serving import Served, failure_of, serving
from tests.integration.streams import Stream
from tests.polling import eventually_async
from tests.shared_objects import add_shared_input, shared_object
from tests.wire import infer

HALVES = Decoder(datatype="FP16", end_tokens=(2, 9))
GROUPED = {
    "grouped": replace(TINY_GROUPED, packed=True),
    "grouped-halves": replace(TINY_GROUPED, datatype="FP16", window=9),
    "grouped-rotated": replace(TINY_GROUPED, places="given"),
    "grouped-lengths": replace(TINY_GROUPED, lengths="given", end_tokens=(2, 9)),
}


@asynccontextmanager
async def served(
    root: Path, decoder: Decoder = TINY, config: str = "", settings: Settings | None = None
) -> AsyncIterator[Served]:
    folder = decoder_models.write(decoder, root / "m" / "1")
    if config:
        (folder.parent / "config.pbtxt").write_text(config)
    async with serving(root, settings=settings) as started:
        yield started


def asking(prompt: Sequence[int], **parameters: float | str | bool) -> pb.ModelInferRequest:
    request = infer("m", {"input_ids": np.array(prompt, np.int64)})
    for name, value in parameters.items():
        kinds = {bool: "bool_param", int: "int64_param", float: "double_param", str: "string_param"}
        setattr(request.parameters[name], kinds[type(value)], value)
    return request


def tokens_of(response: pb.ModelInferResponse) -> list[int]:
    (output,) = response.outputs
    assert (output.name, output.datatype) == ("output_ids", "INT64")
    tokens: list[int] = np.frombuffer(response.raw_output_contents[0], np.int64).tolist()
    assert list(output.shape) == [len(tokens)]
    return tokens


def made_up(decoder: Decoder, count: int) -> list[tuple[list[int], Asked]]:
    """Prompts and what is asked of them, greedy and seeded."""
    random = np.random.default_rng(3)
    requests = []
    for number in range(count):
        seeded = {
            "temperature": float(random.choice([0.7, 1.0, 2.0])),
            "top_k": int(random.choice([0, 20])),
            "top_p": float(random.choice([0.8, 1.0])),
            "repetition_penalty": float(random.choice([1.0, 1.3])),
            "min_tokens": 3,
            "seed": number,
        }
        asked = Asked(max_tokens=int(random.integers(3, 30)), **(seeded if number % 2 else {}))
        requests.append((random.integers(0, decoder.vocabulary, random.integers(1, 70)).tolist(), asked))
    return requests


async def streamed(started: Served, request: pb.ModelInferRequest) -> tuple[list[int], str]:
    """All tokens of a stream's answers, which have one each, and why they ended."""
    stream, tokens, reason = Stream(started, timeout_s=60), list[int](), ""
    await stream.send(request)
    while not reason:
        message = await stream.message()
        assert not message.error_message
        response = message.infer_response
        reason = response.parameters["finish_reason"].string_param if "finish_reason" in response.parameters else ""
        assert response.parameters["triton_final_response"].bool_param == bool(reason)
        # Of a reader who is far behind, answers may have more.
        if request.parameters["max_tokens"].int64_param <= 64:
            assert len(tokens_of(response)) == (0 if reason == "stop" else 1)
        tokens += tokens_of(response)
    await stream.end()
    return tokens, reason


@pytest.mark.parametrize(
    "decoder",
    [
        TINY,
        TINY_GPT2,
        HALVES,
        replace(TINY, places="counted"),
        replace(TINY_GPT2, places="index"),
        replace(TINY, merged="many"),
        replace(TINY_GPT2, merged="one"),
        *GROUPED.values(),
    ],
    ids=["llama", "gpt2", "halves", "counted", "index", "merged", "merged-whole", *GROUPED],
)
async def test_answers_equal_the_naive_loop_in_company(tmp_path: Path, decoder: Decoder) -> None:
    requests = made_up(decoder, 24)
    async with served(tmp_path, decoder) as started:
        calls = [started.infer(asking(prompt, **asdict(asked)), 60) for prompt, asked in requests]
        streams = [streamed(started, asking(prompt, **asdict(asked))) for prompt, asked in requests]
        whole, single = await asyncio.gather(asyncio.gather(*calls), asyncio.gather(*streams))
        assert await started.metric("nv_inference_request_success") == 2 * len(requests)
    loop = NaiveLoop(tmp_path / "m" / "1")
    truths = [loop.generate(prompt, asked) for prompt, asked in requests]
    answers = [(tokens_of(one), one.parameters["finish_reason"].string_param) for one in whole]
    assert {truth.finish_reason for truth in truths} == {"length", "stop"}
    same = [is_same(truth, *answer) for truth, answer in zip([*truths, *truths], [*answers, *single], strict=True)]
    assert sum(same) >= len(same) - 2


@pytest.mark.parametrize("places", ["given", "counted", "index"])
async def test_rows_that_padding_spoils_are_stepped_by_length(
    tmp_path: Path, places: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        async with served(tmp_path, replace(TINY_GPT2, places=places)):
            pass
    (line,) = [line for line in caplog.messages if "a decoder, generates up to 512 tokens" in line]
    assert ("those of equal length together" in line) == (places == "index")


@pytest.mark.parametrize("takes", ["many", "one"])
async def test_prompts_are_whole_where_pieces_would_differ(
    tmp_path: Path, takes: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        async with served(tmp_path, replace(TINY, merged=takes)):
            pass
    (line,) = [line for line in caplog.messages if "a decoder, generates up to 512 tokens" in line]
    assert ("prompts aren't cut into pieces" in line) == (takes == "one")


async def test_operator_that_may_forget_has_room_for_its_window(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its own memory is as long as its window at least, and here as long as the text, so that it forgets nothing."""
    if not has_attribute("GroupQueryAttention", "sliding_window_cache"):
        pytest.skip("this onnxruntime's attention has no window of its own")
    slides = replace(TINY_GROUPED, window=20, slides=True)
    loop = NaiveLoop(decoder_models.write(replace(slides, slides=False), tmp_path / "whole"))
    requests = made_up(slides, 8)
    token_bytes = 2 * 2 * slides.kv_heads * slides.head_size * 4
    config = f'parameters {{ key: "paceline.max_cache_bytes" value {{ string_value: "{128 * token_bytes}" }} }}'
    caplog.set_level(logging.INFO)
    async with served(tmp_path / "served", slides, config) as started:
        calls = [started.infer(asking(prompt, **asdict(asked)), 60) for prompt, asked in requests]
        for (prompt, asked), response in zip(requests, await asyncio.gather(*calls), strict=True):
            truth = loop.generate(prompt, asked)
            is_same(truth, tokens_of(response), response.parameters["finish_reason"].string_param)
    assert any("up to 6 generations are stepped together" in line for line in caplog.messages)


def has_attribute(operator: str, attribute: str) -> bool:
    return any(one.name == operator and attribute in one.attributes for one in get_all_operator_schema())


@pytest.mark.parametrize("decoder", [TINY, TINY_GROUPED], ids=["llama", "grouped"])
async def test_short_memory_for_keys_changes_no_answer(tmp_path: Path, decoder: Decoder) -> None:
    token_bytes = 2 * 2 * decoder.kv_heads * decoder.head_size * 4
    config = f'parameters {{ key: "paceline.max_cache_bytes" value {{ string_value: "{200 * token_bytes}" }} }}'
    requests = [(prompt[:40], asked) for prompt, asked in made_up(decoder, 20)]
    async with served(tmp_path, decoder, config) as started:
        calls = [started.infer(asking(prompt, **asdict(asked)), 60) for prompt, asked in requests]
        answers = [tokens_of(one) for one in await asyncio.gather(*calls)]
    loop = NaiveLoop(tmp_path / "m" / "1")
    truths: list[Generation] = [loop.generate(prompt, asked) for prompt, asked in requests]
    differing = [truth for truth, tokens in zip(truths, answers, strict=True) if truth.tokens != tokens]
    assert all(min(truth.margins) < 1e-4 for truth in differing)


async def test_repeated_request_has_the_same_answer(tmp_path: Path) -> None:
    async with served(tmp_path) as started:
        greedy, seeded = asking([9, 8], max_tokens=6), asking([9, 8], max_tokens=6, temperature=2.0, seed=4)
        for request in (greedy, seeded):
            answers = [tokens_of(await started.infer(request)) for _ in range(3)]
            assert answers[0] == answers[1] == answers[2]
        drawn = [tokens_of(await started.infer(asking([9, 8], max_tokens=6, temperature=2.0))) for _ in range(4)]
        assert len({*map(tuple, drawn)}) > 1


@pytest.mark.parametrize(
    ("request_", "code", "text"),
    [
        (asking([]), grpc.StatusCode.INVALID_ARGUMENT, "model 'm': input 'input_ids': expected at least one token"),
        (asking([128]), grpc.StatusCode.INVALID_ARGUMENT, "expected tokens from 0 to 127, got 128"),
        (asking([1] * 512), grpc.StatusCode.INVALID_ARGUMENT, "expected at most 511 tokens"),
        (asking([1], max_tokens="many"), grpc.StatusCode.INVALID_ARGUMENT, "'max_tokens': expected an integer"),
        (asking([1], top_p=2.0), grpc.StatusCode.INVALID_ARGUMENT, "parameter 'top_p': expected a number above 0"),
        (asking([1], n=2), grpc.StatusCode.UNIMPLEMENTED, "parameter 'n' is not supported by this build"),
    ],
    ids=["empty", "vocabulary", "long", "type", "range", "unsupported"],
)  # fmt: skip
async def test_bad_request_is_refused_before_it_waits(
    tmp_path: Path, request_: pb.ModelInferRequest, code: grpc.StatusCode, text: str
) -> None:
    async with served(tmp_path) as started:
        got, details = await failure_of(started.infer(request_))
        assert (got, text in details) == (code, True), details
        stream = Stream(started)
        await stream.send(request_, asking([3], max_tokens=1))
        assert text in (await stream.message()).error_message
        assert len(tokens_of((await stream.message()).infer_response)) == 1
        await stream.end()
        assert (await started.metrics()).get('nv_inference_count{model="m",version="1"}') == 1


async def test_step_of_an_ensemble_generates_all_at_once(tmp_path: Path) -> None:
    maps = 'input_map { key: "input_ids" value: "P" } output_map { key: "output_ids" value: "T" }'
    tensor = "data_type: TYPE_INT64 dims: [ -1 ]"
    (tmp_path / "e" / "1").mkdir(parents=True)
    (tmp_path / "e" / "config.pbtxt").write_text(
        f'platform: "ensemble" input {{ name: "P" {tensor} }} output {{ name: "T" {tensor} }} '
        f'ensemble_scheduling {{ step {{ model_name: "m" {maps} }} }}'
    )
    async with served(tmp_path) as started:
        request = infer("e", {"P": np.array([9, 8], np.int64)})
        request.parameters["max_tokens"].int64_param = 5
        whole = await started.infer(request)
        alone = await started.infer(asking([9, 8], max_tokens=5))
        assert whole.raw_output_contents[0] == alone.raw_output_contents[0]
        request.parameters["max_tokens"].int64_param = 0
        code, text = await failure_of(started.infer(request))
        assert (code, "max_tokens" in text) == (grpc.StatusCode.INVALID_ARGUMENT, True)


async def test_prompt_in_shared_memory_is_checked_as_any(tmp_path: Path) -> None:
    settings = Settings(paths=(tmp_path,), allow_client_shm=True)
    with shared_object(16) as memory:
        async with served(tmp_path, settings=settings) as started:
            await register(started, "r", memory.key, 16)
            request = pb.ModelInferRequest(model_name="m")
            add_shared_input(request, "input_ids", "INT64", [2], "r", 16, 0)
            memory.put(np.array([9, 8], np.int64))
            assert tokens_of(await started.infer(request)) == tokens_of(await started.infer(asking([9, 8])))
            memory.put(np.array([9, 128], np.int64))
            code, text = await failure_of(started.infer(request))
            assert (code, "got 128" in text) == (grpc.StatusCode.INVALID_ARGUMENT, True)


@pytest.mark.parametrize("decoder", [TINY, TINY_GROUPED], ids=["llama", "grouped"])
async def test_cancelled_generation_gives_its_place_to_the_next(tmp_path: Path, decoder: Decoder) -> None:
    config = 'parameters { key: "paceline.max_generations" value { string_value: "1" } }'
    endless = replace(decoder, end_tokens=(), positions=100_000)
    async with served(tmp_path, endless, config) as started:
        stream = Stream(started)
        await stream.send(asking([5], max_tokens=99_000))
        await stream.message()
        call = started.stub.ModelInfer(asking([6], max_tokens=2), timeout=20)
        stream.call.cancel()
        assert len(tokens_of(await call)) == 2
        model = started.server.repository.get("m", "")
        assert model.open_requests is not None
        await eventually_async(lambda: not len(model.open_requests or ()), "no request is left")


async def test_deadline_ends_a_generation(tmp_path: Path) -> None:
    endless = Decoder(end_tokens=(), positions=100_000)
    async with served(tmp_path, endless) as started:
        request = asking([5], max_tokens=99_000, paceline_deadline_us=100_000)
        stream = Stream(started)
        await stream.send(request)
        while not (message := await stream.message()).error_message:
            pass
        assert message.infer_response.parameters["paceline_status"].string_param == "DEADLINE_EXCEEDED"
        assert (await failure_of(started.infer(request)))[0] == grpc.StatusCode.DEADLINE_EXCEEDED
        assert len(tokens_of(await started.infer(asking([5], max_tokens=2)))) == 2


async def test_model_is_unloaded_when_its_generations_have_ended(tmp_path: Path) -> None:
    async with served(tmp_path, settings=explicit(tmp_path, load=("m",))) as started:
        stream = Stream(started)
        await stream.send(asking([5], max_tokens=200, min_tokens=200))
        tokens = len(tokens_of((await stream.message()).infer_response))
        await unload(started, "m")
        is_last = False
        while not is_last:
            message = await stream.message()
            assert not message.error_message
            tokens += len(tokens_of(message.infer_response))
            is_last = message.infer_response.parameters["triton_final_response"].bool_param
        assert tokens == 200  # in fewer answers, if they are read slowly


async def test_metadata_says_what_clients_send(tmp_path: Path) -> None:
    async with served(tmp_path) as started:
        metadata = await started.stub.ModelMetadata(pb.ModelMetadataRequest(name="m"))
        ((sent,), (got, *optional)) = metadata.inputs, metadata.outputs
        assert (sent.name, sent.datatype, list(sent.shape)) == ("input_ids", "INT64", [-1])
        assert (got.name, got.datatype, list(got.shape)) == ("output_ids", "INT64", [-1])
        assert [one.name for one in optional] == [one.name for one in OPTIONAL_OUTPUTS]


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ('parameters { key: "paceline.generate" value { string_value: "off" } }', "paceline.generate is off"),
        ("max_batch_size: 4", "its configuration has max_batch_size"),
        ('max_batch_size: 4 output { name: "logits" data_type: TYPE_FP32 dims: [ -1, 128 ] }', "names 'logits'"),
    ],
    ids=["off", "batched", "declared"],
)
async def test_decoder_is_served_as_it_is_if_asked(
    tmp_path: Path, config: str, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        async with served(tmp_path, TINY, config) as started:
            metadata = await started.stub.ModelMetadata(pb.ModelMetadataRequest(name="m"))
            assert "past_key_values.0.key" in [one.name for one in metadata.inputs]
    assert any("is served as it is" in line and why in line for line in caplog.messages), caplog.messages


async def test_end_tokens_of_generation_config_count(tmp_path: Path) -> None:
    loop_tokens = (
        NaiveLoop(decoder_models.write(TINY, tmp_path / "m" / "1")).generate([9, 8], Asked(max_tokens=4)).tokens
    )
    assert loop_tokens[0] != loop_tokens[1]
    async with serving_with(tmp_path, {"eos_token_id": [loop_tokens[1]], "max_new_tokens": 3}) as started:
        response = await started.infer(asking([9, 8]))
        assert tokens_of(response) == loop_tokens[:1]
        assert response.parameters["finish_reason"].string_param == "stop"
        assert len(tokens_of(await started.infer(asking([9, 8], min_tokens=3)))) == 3


@asynccontextmanager
async def serving_with(root: Path, generation_config: dict[str, object]) -> AsyncIterator[Served]:
    """The same with other defaults, which are in the model's folder."""
    (root / "m" / "1" / "generation_config.json").unlink()
    (root / "m" / "generation_config.json").write_text(json.dumps(generation_config))
    async with serving(root) as started:
        yield started


async def test_timeout_ends_a_generation_with_what_there_is(tmp_path: Path) -> None:
    endless = Decoder(end_tokens=(), positions=100_000)
    config = 'parameters { key: "paceline.max_generations" value { string_value: "1" } }'
    async with served(tmp_path, endless, config) as started:
        tokens, reason = await streamed(started, asking([5], max_tokens=99_000, timeout=1_000_000))
        assert (reason, len(tokens) > 0) == ("timeout", True)
        whole = await started.infer(asking([5], max_tokens=99_000, timeout=1_000_000))
        assert whole.parameters["finish_reason"].string_param == "timeout"
        shorter = min(len(tokens), len(tokens_of(whole)))
        assert tokens_of(whole)[:shorter] == tokens[:shorter]
        stream = Stream(started)
        await stream.send(asking([5], max_tokens=99_000))
        await stream.message()
        waiting = [started.infer(asking([6], max_tokens=2, timeout=50_000)) for _ in range(3)]
        for code, text in await asyncio.gather(*map(failure_of, waiting)):
            assert (code, "time" in text) == (grpc.StatusCode.DEADLINE_EXCEEDED, True), text
        stream.call.cancel()
