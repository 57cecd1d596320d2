"""Decoders with a tokenizer: texts in and out, equal to the naive loop's tokens, decoded at once."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from threading import Event

import grpc
import numpy as np
import pytest
from tokenizers import Tokenizer, decoders

from paceline.backends.generation import TEXT_SPEC
from paceline.protos import inference_pb2 as pb
from paceline.server.config import Settings
from tests import decoder_models, text_models
from tests.decoder_models import TINY
from tests.generation_truth import Asked, NaiveLoop
from tests.integration.regions import register
from tests.integration.serving import Served, failure_of, serving
from tests.integration.streams import Stream
from tests.polling import eventually_async
from tests.shared_objects import add_shared_input, shared_object
from tests.wire import infer

SPEAKS = replace(TINY, vocabulary=320, end_tokens=(2,))
PROMPTS = ("the cat", "stop one, two", "é 日本 👋!", "x" * 300)
KINDS = ("byte_level", "sentence_pieces")


@asynccontextmanager
async def served(root: Path, kind: str = "byte_level") -> AsyncIterator[Served]:
    text_models.write(text_models.KINDS[kind](), decoder_models.write(SPEAKS, root / "m" / "1"))
    async with serving(root) as started:
        yield started


def asking(text: str | bytes, **parameters: float | str | bool) -> pb.ModelInferRequest:
    content = text.encode() if isinstance(text, str) else text
    request = infer("m", {"text_input": np.array([content], object)})
    for name, value in parameters.items():
        kinds = {bool: "bool_param", int: "int64_param", float: "double_param", str: "string_param"}
        setattr(request.parameters[name], kinds[type(value)], value)
    return request


def outputs_of(response: pb.ModelInferResponse) -> tuple[list[int], str]:
    tokens = text = None
    for output, raw in zip(response.outputs, response.raw_output_contents, strict=True):
        if output.name == "output_ids":
            tokens = np.frombuffer(raw, np.int64).tolist()
        elif output.name == "text_output":
            text = raw[4:].decode()
    assert tokens is not None
    assert text is not None
    return tokens, text


def reason_of(response: pb.ModelInferResponse) -> str:
    return response.parameters["finish_reason"].string_param if "finish_reason" in response.parameters else ""


async def streamed(started: Served, request: pb.ModelInferRequest) -> list[tuple[list[int], str, str]]:
    stream = Stream(started, timeout_s=60)
    await stream.send(request)
    answers = []
    while not (answers and answers[-1][2]):
        message = await stream.message()
        assert not message.error_message
        answers.append((*outputs_of(message.infer_response), reason_of(message.infer_response)))
    await stream.end()
    return answers


def text_of(own: Tokenizer, prompt: list[int], tokens: list[int]) -> str:
    """What `tokens` add to the prompt's text."""
    before, whole = own.decode(prompt), own.decode([*prompt, *tokens])
    return whole[len(before) :] if whole.startswith(before) else own.decode(tokens)


@pytest.mark.parametrize("kind", KINDS)
async def test_texts_equal_decoded_tokens_of_the_naive_loop(tmp_path: Path, kind: str) -> None:
    own, asked = text_models.KINDS[kind](), Asked(max_tokens=24)
    async with served(tmp_path, kind) as started:
        for text in PROMPTS:
            prompt = own.encode(text).ids
            truth = NaiveLoop(tmp_path / "m" / "1").generate(prompt, asked)
            whole = await started.infer(asking(text, max_tokens=24))
            assert outputs_of(whole) == (truth.tokens, text_of(own, prompt, truth.tokens))
            by_ids = infer("m", {"input_ids": np.array(prompt, np.int64)})
            by_ids.parameters["max_tokens"].int64_param = 24
            assert outputs_of(await started.infer(by_ids)) == outputs_of(whole)
            for request in (asking(text, max_tokens=24, stream=True), by_ids):
                answers = await streamed(started, request)
                assert [token for tokens, _, _ in answers for token in tokens] == truth.tokens
                assert "".join(text for _, text, _ in answers) == outputs_of(whole)[1]
                assert {len(tokens) for tokens, _, _ in answers} <= {0, 1}


@pytest.mark.parametrize("kind", KINDS)
async def test_text_ends_before_the_first_stop(tmp_path: Path, kind: str) -> None:
    async with served(tmp_path, kind) as started:
        whole = outputs_of(await started.infer(asking("the cat", max_tokens=40)))[1]
        for begin, end in ((9, 12), (20, 21), (15, 24)):
            stop = whole[begin:end]
            place = whole.index(stop)
            for given in (stop, json.dumps(["never", stop])):
                response = await started.infer(asking("the cat", max_tokens=40, stop=given))
                assert (outputs_of(response)[1], reason_of(response)) == (whole[:place], "stop")
                answers = await streamed(started, asking("the cat", max_tokens=40, stop=given, stream=True))
                assert "".join(text for _, text, _ in answers) == whole[:place]
                assert answers[-1][2] == "stop"
                assert [token for one in answers for token in one[0]] == outputs_of(response)[0]
        late = asking("the cat", max_tokens=40, min_tokens=40, stop=whole[9:12])
        assert outputs_of(await started.infer(late))[1] == whole


async def test_text_without_stream_has_one_answer(tmp_path: Path) -> None:
    async with served(tmp_path) as started:
        alone = outputs_of(await started.infer(asking("the cat", max_tokens=9)))
        ((tokens, text, reason),) = await streamed(started, asking("the cat", max_tokens=9))
        assert (tokens, text, reason) == (alone[0], "the cat" + alone[1], "length")
        shown = asking("the cat", max_tokens=9, exclude_input_in_output=False)
        assert outputs_of(await started.infer(shown)) == (tokens, text)


async def test_optional_outputs_come_if_asked_for(tmp_path: Path) -> None:
    async with served(tmp_path) as started:
        prompt = text_models.byte_level().encode("the cat").ids
        truth = NaiveLoop(tmp_path / "m" / "1").generate(prompt, Asked(max_tokens=6))
        response = await started.infer(asking("the cat", max_tokens=6, logprobs=3, return_cumulative_logprob=True))
        names = [one.name for one in response.outputs]
        assert names == ["output_ids", "logprobs", "cumulative_logprob", "text_output"]
        told = json.loads(response.raw_output_contents[1][4:])
        chosen = [one[str(token)]["logprob"] for one, token in zip(told, truth.tokens, strict=True)]
        assert chosen == pytest.approx(truth.logprobs, abs=1e-4)
        (total,) = np.frombuffer(response.raw_output_contents[2], np.float32)
        assert total == pytest.approx(sum(truth.logprobs), abs=1e-3)
        assert [sorted(about["rank"] for about in one.values()) for one in told] == [[1, 2, 3]] * 6


async def test_metadata_and_configuration_show_texts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        async with served(tmp_path) as started:
            metadata = await started.stub.ModelMetadata(pb.ModelMetadataRequest(name="m"))
            assert {"input_ids", "text_input", "stream", "sampling_parameters"} <= {one.name for one in metadata.inputs}
            assert metadata.outputs[-1].name == "text_output"
            config = (await started.stub.ModelConfig(pb.ModelConfigRequest(name="m"))).config
            assert all(one.optional for one in config.input)
    assert any("ends at 2; takes texts" in line for line in caplog.messages)


async def test_tokenizer_that_does_not_fit_leaves_tokens(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    text_models.write(text_models.byte_level(), decoder_models.write(TINY, tmp_path / "m" / "1"))
    with caplog.at_level(logging.INFO):
        async with serving(tmp_path) as started:
            code, text = await failure_of(started.infer(asking("the cat")))
            assert (code, "text_input" in text) == (grpc.StatusCode.INVALID_ARGUMENT, True)
            await started.infer(infer("m", {"input_ids": np.array([5], np.int64)}))
    assert any("takes token ids, and no texts: tokenizer.json has the token 266" in line for line in caplog.messages)


def both() -> pb.ModelInferRequest:
    return infer("m", {"text_input": np.array([b"a"], object), "input_ids": np.array([5], np.int64)})


def sampling(text: str) -> pb.ModelInferRequest:
    return infer(
        "m", {"text_input": np.array([b"a"], object), "sampling_parameters": np.array([text.encode()], object)}
    )


@pytest.mark.parametrize(
    ("request_", "text"),
    [
        (both(), "expected either input 'input_ids' or input 'text_input', got both"),
        (infer("m", {"stream": np.array([True])}), "or input 'text_input', got neither"),
        (asking(b"a\xff"), "input 'text_input': expected UTF-8, got"),
        (asking(""), "input 'text_input': expected at least one token, got none"),
        (asking("ab" * 300), "input 'text_input': expected at most 511 tokens, so that there is room"),
        (asking("a" * 10_000), "input 'text_input': expected at most 2560 bytes"),
        (asking("a", stop=""), "parameter 'stop': expected texts of 1 to 256 characters, got ''"),
        (asking("a", stop='["a", ""]'), "parameter 'stop': expected texts of 1 to 256 characters"),
        (asking("a", stop="[1]"), "parameter 'stop': expected texts of 1 to 256 characters, got '[1]'"),
        (asking("a", stop=7), "parameter 'stop': expected texts of 1 to 256 characters, got 7"),
        (asking("a", stop=json.dumps(["a"] * 17)), "parameter 'stop': expected at most 16 texts, got 17"),
        (asking("a", stream=True, exclude_input_in_output=False), "false is not allowed when streaming"),
        (sampling("[]"), "input 'sampling_parameters': expected a JSON object, got another value"),
        (sampling("{"), "input 'sampling_parameters': expected a JSON object: "),
        (sampling("[" * 100_000), "input 'sampling_parameters': expected a JSON object: "),
        (sampling('{"top": 1}'), "input 'sampling_parameters': expected some of"),
        (sampling('{"stop": [1]}'), "parameter 'stop': expected texts of 1 to 256 characters"),
        (sampling('{"temperature": 1%s}' % ("0" * 400)), "parameter 'temperature': expected a number from 0 on, got 1"),
        (sampling('{"temperature": NaN}'), "parameter 'temperature': expected a number from 0 on, got nan"),
        (infer("m", {"text_input": np.array([b"a"], object), "image": np.array([b"a"], object)}), "'image'"),
    ],
)  # fmt: skip
async def test_bad_text_is_refused_before_it_waits(tmp_path: Path, request_: pb.ModelInferRequest, text: str) -> None:
    async with served(tmp_path) as started:
        code, details = await failure_of(started.infer(request_))
        assert (code, text in details) == (grpc.StatusCode.INVALID_ARGUMENT, True), details
        assert await started.metric("nv_inference_queue_duration_us") == 0
        assert outputs_of(await started.infer(asking("a", max_tokens=1)))[0]


async def test_numbers_of_unsupported_parameters_may_be_texts_too(tmp_path: Path) -> None:
    async with served(tmp_path) as started:
        await started.infer(sampling('{"n": "1", "presence_penalty": "0.0", "stop_token_ids": null}'))
        for other in ('{"n": "2"}', '{"min_p": "few"}', '{"skip_special_tokens": "True"}'):
            assert (await failure_of(started.infer(sampling(other))))[0] == grpc.StatusCode.UNIMPLEMENTED


async def test_tokenizer_that_panics_ends_its_generation_alone(tmp_path: Path) -> None:
    tokenizer = text_models.sentence_pieces()
    # Panics, which is no Exception, where nothing is left of a token.
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", ""), decoders.Strip(" ", 0, 1)])
    text_models.write(tokenizer, decoder_models.write(SPEAKS, tmp_path / "m" / "1"))
    async with serving(tmp_path) as started:
        bad = asking("the", max_tokens=300, temperature=99.0, seed=1, ignore_eos=True)
        good = asking("the", max_tokens=1)
        code, details = await failure_of(started.stub.ModelInfer(bad, timeout=20))
        assert (code, "the tokenizer can't make a text of" in details) == (grpc.StatusCode.INTERNAL, True), details
        assert len(outputs_of(await started.stub.ModelInfer(good, timeout=20))[0]) == 1


async def test_long_text_ends_with_its_caller_or_its_time(tmp_path: Path) -> None:
    gate, loop = Event(), asyncio.get_running_loop()
    loop.set_default_executor(ThreadPoolExecutor(1))
    async with served(tmp_path) as started:
        model = started.server.repository.get("m", "")
        assert model.open_requests is not None
        held = loop.run_in_executor(None, gate.wait, 20)
        calls = [started.stub.ModelInfer(asking("cat, " * 60, max_tokens=2), timeout=20) for _ in range(2)]
        late = asking("cat, " * 60, paceline_deadline_us=200_000)
        assert (await failure_of(started.infer(late)))[0] == grpc.StatusCode.DEADLINE_EXCEEDED
        calls[0].cancel()
        await eventually_async(lambda: len(model.open_requests or ()) == 1, "one request is left")
        assert started.failed() == 2
        gate.set()
        assert len(outputs_of(await calls[1])[0]) == 2
        await held
        assert not len(model.open_requests)
        assert (await started.metrics()).get('nv_inference_count{model="m",version="1"}') == 1


async def test_text_in_shared_memory_is_checked_as_any(tmp_path: Path) -> None:
    text_models.write(text_models.byte_level(), decoder_models.write(SPEAKS, tmp_path / "m" / "1"))
    with shared_object(64) as memory:
        async with serving(tmp_path, settings=Settings(paths=(tmp_path,), allow_client_shm=True)) as started:
            await register(started, "r", memory.key, 64)
            request = pb.ModelInferRequest(model_name="m")
            add_shared_input(request, "text_input", "BYTES", [1], "r", 11, 0)
            memory.put(np.frombuffer(b"\x07\0\0\0the cat", np.uint8))
            assert outputs_of(await started.infer(request)) == outputs_of(await started.infer(asking("the cat")))
            memory.put(np.frombuffer(b"\x07\0\0\0the \xff\xff\xff", np.uint8))
            code, text = await failure_of(started.infer(request))
            assert (code, "expected UTF-8" in text) == (grpc.StatusCode.INVALID_ARGUMENT, True)


async def test_step_of_an_ensemble_takes_a_text(tmp_path: Path) -> None:
    maps = 'input_map { key: "text_input" value: "P" } output_map { key: "text_output" value: "T" }'
    tensor = "data_type: TYPE_STRING dims: [ 1 ]"
    (tmp_path / "e" / "1").mkdir(parents=True)
    (tmp_path / "e" / "config.pbtxt").write_text(
        f'platform: "ensemble" input {{ name: "P" {tensor} }} output {{ name: "T" {tensor} }} '
        f'ensemble_scheduling {{ step {{ model_name: "m" {maps} }} }}'
    )
    async with served(tmp_path) as started:
        (raw,) = (await started.infer(infer("e", {"P": np.array([b"the cat"], object)}))).raw_output_contents
        assert raw[4:].decode() == outputs_of(await started.infer(asking("the cat")))[1]


async def test_configuration_that_names_some_tensors_leaves_all(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.pbtxt").write_text(
        'input { name: "text_input" data_type: TYPE_STRING dims: [ 1 ] } '
        'input { name: "stream" data_type: TYPE_BOOL dims: [ 1 ] optional: true } '
        'output { name: "text_output" data_type: TYPE_STRING dims: [ -1 ] }'
    )
    async with served(tmp_path) as started:
        assert outputs_of(await started.infer(asking("the cat", max_tokens=3)))[0]
        config = (await started.stub.ModelConfig(pb.ModelConfigRequest(name="m"))).config
        assert [one.name for one in config.input] == [one.name for one in TEXT_SPEC.inputs]
