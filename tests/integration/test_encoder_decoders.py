"""Pairs of an encoder and a decoder: every answer is what the naive loop gives the request alone, whatever the
company."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from pathlib import Path

import grpc
import numpy as np
import pytest

from paceline.protos import inference_pb2 as pb
from paceline.server.errors import StartError
from tests import encoder_decoder_models, text_models
from tests.encoder_decoder_models import SPEECH, TRANSLATION, VISION, Pair
from tests.encoder_decoder_truth import NaivePair
from tests.generation_truth import Asked, is_same
from tests.integration.serving import Served, failure_of, serving
from tests.integration.streams import Stream
from tests.wire import Array, infer


@asynccontextmanager
async def served(root: Path, pair: Pair = TRANSLATION, config: str = "") -> AsyncIterator[Served]:
    """As exporters write it, all in the model's folder."""
    encoder_decoder_models.write(pair, root / "m")
    if config:
        (root / "m" / "config.pbtxt").write_text(config)
    async with serving(root) as started:
        yield started


def asking(pair: Pair, source: Array, given: Sequence[int] | None = None, **parameters: float) -> pb.ModelInferRequest:
    inputs = {pair.source_name: source}
    if given is not None:
        inputs["decoder_input_ids"] = np.array(given, np.int64)
    request = infer("m", inputs)
    for name, value in parameters.items():
        setattr(request.parameters[name], "int64_param" if isinstance(value, int) else "double_param", value)
    return request


def tokens_of(response: pb.ModelInferResponse) -> list[int]:
    tokens: list[int] = np.frombuffer(response.raw_output_contents[0], np.int64).tolist()
    return tokens


def made_up(pair: Pair, count: int) -> list[tuple[Array, Asked, list[int] | None]]:
    """Sources, what is asked of them, greedy and seeded, and how answers begin."""
    random = np.random.default_rng(5)
    made = []
    for number in range(count):
        seeded = {"temperature": float(random.choice([0.7, 1.5])), "top_k": 20, "min_tokens": 3, "seed": number}
        asked = Asked(max_tokens=int(random.integers(3, 24)), **(seeded if number % 2 else {}))
        source: Array = random.integers(0, pair.vocabulary, random.integers(1, 40))
        if pair.source_shape:
            source = random.standard_normal(pair.source_shape).astype(
                np.float16 if pair.datatype == "FP16" else np.float32
            )
        made.append((source, asked, random.integers(12, 60, number % 5).tolist() if number % 3 == 0 else None))
    return made


async def streamed(started: Served, request: pb.ModelInferRequest) -> list[int]:
    stream, tokens, last = Stream(started, timeout_s=60), list[int](), False
    await stream.send(request)
    while not last:
        message = await stream.message()
        assert not message.error_message
        last = message.infer_response.parameters["triton_final_response"].bool_param
        tokens += tokens_of(message.infer_response)
    await stream.end()
    return tokens


WORDS = {"bad_words_ids": [[44], [83]], "forced_bos_token_id": 72}


@pytest.mark.parametrize(
    "pair",
    [
        *(TRANSLATION, replace(TRANSLATION, takes="one", says=WORDS), replace(TRANSLATION, datatype="FP16")),
        *(SPEECH, replace(SPEECH, takes="one"), replace(SPEECH, datatype="FP16"), VISION),
    ],
    ids=["translation", "words", "halves", "speech", "whole", "sound of halves", "pictures"],
)
async def test_answers_equal_the_naive_loop_in_company(tmp_path: Path, pair: Pair) -> None:
    requests = made_up(pair, 20)
    async with served(tmp_path, pair) as started:
        made = [asking(pair, source, given, **asdict(asked)) for source, asked, given in requests]
        whole, single = await asyncio.gather(
            asyncio.gather(*(started.infer(one, 60) for one in made)),
            asyncio.gather(*(streamed(started, one) for one in made)),
        )
        assert await started.metric("nv_inference_request_success") == 2 * len(requests)
    loop = NaivePair(tmp_path / "m")
    truths = [loop.generate(source, asked, given or ()) for source, asked, given in requests]
    answers = [(tokens_of(one), one.parameters["finish_reason"].string_param) for one in whole]
    same = [is_same(truth, *answer) for truth, answer in zip(truths, answers, strict=True)]
    assert sum(same) >= len(same) - 1
    assert [tokens_of(one) for one in whole] == single


async def test_rows_put_out_keep_what_their_encoder_left(tmp_path: Path) -> None:
    pair, token_bytes = TRANSLATION, 2 * TRANSLATION.layers * TRANSLATION.width * 4
    config = f'parameters {{ key: "paceline.max_cache_bytes" value {{ string_value: "{150 * token_bytes}" }} }}'
    requests = made_up(pair, 16)
    async with served(tmp_path, pair, config) as started:
        calls = [started.infer(asking(pair, source, given, **asdict(one)), 60) for source, one, given in requests]
        answers = await asyncio.gather(*calls)
    loop = NaivePair(tmp_path / "m")
    for (source, asked, given), answer in zip(requests, answers, strict=True):
        truth = loop.generate(source, asked, given or ())
        is_same(truth, tokens_of(answer), answer.parameters["finish_reason"].string_param)


@pytest.mark.parametrize(
    ("pair", "said"),
    [
        (TRANSLATION, "an encoder of input_ids with a decoder, generates up to"),
        (replace(SPEECH, takes="one"), "those of equal length together; prompts aren't cut into pieces"),
        (VISION, "an encoder of pixel_values with a decoder, generates up to 96 tokens of 128"),
    ],
)
async def test_load_says_how_a_pair_is_served(
    tmp_path: Path, pair: Pair, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        async with served(tmp_path, pair) as started:
            metadata = await started.stub.ModelMetadata(pb.ModelMetadataRequest(name="m"))
    assert any(said in line for line in caplog.messages), caplog.messages
    shown = [(one.name, list(one.shape)) for one in metadata.inputs]
    assert shown == [(pair.source_name, list(pair.source_shape) or [-1]), ("decoder_input_ids", [-1])]
    assert metadata.outputs[0].name == "output_ids"


async def test_text_goes_into_the_encoder_and_comes_out(tmp_path: Path) -> None:
    tokenizer = text_models.sentence_pieces()
    pair = replace(TRANSLATION, vocabulary=tokenizer.get_vocab_size(), start_token=0, end_tokens=(2,))
    encoder_decoder_models.write(pair, tmp_path / "m")
    text_models.write(tokenizer, tmp_path / "m")
    loop, texts = NaivePair(tmp_path / "m"), ["the cat", "on", "the cat on the the then cat " * 20]
    async with serving(tmp_path) as started:
        for text in texts:
            tokens = np.array(tokenizer.encode(text).ids)
            truth = loop.generate(tokens, Asked(max_tokens=9))
            request = infer("m", {"text_input": np.array([text.encode()], object)})
            request.parameters["max_tokens"].int64_param = 9
            whole = await started.infer(request, 60)
            outputs = {one.name: raw for one, raw in zip(whole.outputs, whole.raw_output_contents, strict=True)}
            assert np.frombuffer(outputs["output_ids"], np.int64).tolist() == truth.tokens
            assert outputs["text_output"][4:].decode() == tokenizer.decode(truth.tokens).strip()
            ids = await started.infer(asking(pair, tokens, max_tokens=9), 60)
            assert {"output_ids", "text_output"} <= {one.name for one in ids.outputs}
        both = infer("m", {"text_input": np.array([b"on"], object), "input_ids": np.array([5])})
        code, details = await failure_of(started.infer(both))
        assert (code, "expected either input 'input_ids' or input 'text_input', got both" in details) == (
            grpc.StatusCode.INVALID_ARGUMENT,
            True,
        )


async def test_answer_has_as_many_tokens_as_files_say(tmp_path: Path) -> None:
    async with served(tmp_path, replace(TRANSLATION, end_tokens=())) as started:
        assert len(tokens_of(await started.infer(asking(TRANSLATION, np.array([5]))))) == 39


@pytest.mark.parametrize(
    ("pair", "request_", "text"),
    [
        (TRANSLATION, asking(TRANSLATION, np.array([], np.int64)), "'input_ids': expected at least one token"),
        (TRANSLATION, asking(TRANSLATION, np.array([128])), "'input_ids': expected tokens from 0 to 127, got 128"),
        (TRANSLATION, asking(TRANSLATION, np.array([5]), [-1]), "'decoder_input_ids': expected tokens from 0 to 127"),
        (SPEECH, asking(SPEECH, np.zeros((6, 20), np.float32), [9] * 96), "'decoder_input_ids': expected at most 95"),
        (SPEECH, asking(SPEECH, np.zeros((6, 19), np.float32)), "input 'input_features'"),
        (VISION, asking(VISION, np.zeros((3, 12, 9), np.float32)), "input 'pixel_values'"),
    ],
    ids=["empty", "vocabulary", "beginning", "long", "frames", "size"],
)  # fmt: skip
async def test_bad_request_of_a_pair_is_refused_by_name(
    tmp_path: Path, pair: Pair, request_: pb.ModelInferRequest, text: str
) -> None:
    async with served(tmp_path, pair) as started:
        code, details = await failure_of(started.infer(request_))
        assert (code, text in details) == (grpc.StatusCode.INVALID_ARGUMENT, True), details


async def test_decoder_without_its_encoder_is_served_as_it_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    encoder_decoder_models.write(TRANSLATION, tmp_path / "m")
    (tmp_path / "m" / "encoder_model.onnx").unlink()
    with caplog.at_level(logging.INFO):
        async with serving(tmp_path) as started:
            metadata = await started.stub.ModelMetadata(pb.ModelMetadataRequest(name="m"))
    assert "encoder_hidden_states" in [one.name for one in metadata.inputs]
    assert any("there is no encoder_model.onnx beside it" in line for line in caplog.messages)


@pytest.mark.parametrize(
    ("encoder", "text"),
    [
        (replace(TRANSLATION, heads=2), "output 'last_hidden_state': expected FP32 [-1, -1, 32]"),
        (VISION, "input 'pixel_values': expected fixed sizes, or config.json to tell them, got [-1, -1, -1]"),
    ],
    ids=["width", "sizes"],
)
async def test_encoder_that_does_not_fit_fails_the_load(tmp_path: Path, encoder: Pair, text: str) -> None:
    encoder_decoder_models.write(TRANSLATION, tmp_path / "m")
    other = encoder_decoder_models.write(encoder, tmp_path.parent / "other" / encoder.family)
    (tmp_path / "m" / "encoder_model.onnx").write_bytes((other / "encoder_model.onnx").read_bytes())
    with pytest.raises(StartError, match=re.escape(f"encoder_model.onnx doesn't fit its decoder: {text}")):
        async with serving(tmp_path):
            pass
