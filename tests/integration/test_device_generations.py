"""Decoders on a device, in whose memory keys and values stay: answers are the naive loop's, whatever the company."""

from __future__ import annotations

import asyncio
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from paceline.backends.base import Device, ModelSource
from paceline.backends.cuda.driver import count_gpus
from paceline.backends.errors import LoadError
from paceline.backends.onnx.backend import OnnxBackend, OnnxModel
from paceline.backends.onnx.decoder_block import Block
from paceline.backends.onnx.decoder_layout import DecoderLayout, find_layout
from paceline.backends.onnx.device_steps import Kept
from paceline.backends.onnx.options import parse_options
from paceline.protos import inference_pb2 as pb
from tests import decoder_models
from tests.decoder_models import TINY, TINY_GROUPED, Decoder
from tests.generation_truth import TIE, NaiveLoop, is_same
from tests.host_accelerator import HostAccelerator
from tests.integration.serving import Served, serving
from tests.integration.test_generations import asking, made_up, tokens_of

BACKENDS = {"onnxruntime": OnnxBackend(accelerators=lambda device: HostAccelerator())}
"""Their instances are staged as on a GPU, and ONNX Runtime computes on the CPU."""


async def check_answers(started: Served, folder: Path, decoder: Decoder, tie: float = TIE) -> None:
    requests = made_up(decoder, 24)
    answers = await asyncio.gather(*[started.infer(asking(one, **asdict(asked)), 60) for one, asked in requests])
    loop = NaiveLoop(folder)
    for (prompt, asked), answer in zip(requests, answers, strict=True):
        is_same(loop.generate(prompt, asked), tokens_of(answer), answer.parameters["finish_reason"].string_param, tie)


@pytest.mark.parametrize(
    "decoder",
    [TINY, Decoder(datatype="FP16"), replace(TINY, merged="many"), TINY_GROUPED],
    ids=["llama", "halves", "merged", "grouped"],
)
async def test_answers_on_a_device_equal_the_naive_loop(tmp_path: Path, decoder: Decoder) -> None:
    folder = decoder_models.write(decoder, tmp_path / "m" / "1")
    async with serving(tmp_path, backends=BACKENDS) as started:
        await check_answers(started, folder, decoder)


def test_what_a_step_leaves_stays_on_the_device(tmp_path: Path) -> None:
    path = decoder_models.write(TINY, tmp_path) / "model.onnx"
    source, prompt, following = ModelSource("m", path), np.array([[9, 8, 7]]), np.array([[6]])
    logits = []
    for accelerator in (HostAccelerator(), None):
        model = OnnxModel(source, path, parse_options(source), Device(), lambda device, one=accelerator: one)
        layout = find_layout(model.spec, model.operators, {})
        assert isinstance(layout, DecoderLayout)
        block, steps = Block.empty(0, layout), model.stepped(layout.executed, Device())
        block.step(steps, prompt, layout)
        assert all(isinstance(one, Kept) == (accelerator is not None) for one in block.pasts)
        logits.append(block.step(steps, following, layout))
    np.testing.assert_array_equal(*logits)


async def test_decoder_whose_steps_fail_is_served_as_it_is(tmp_path: Path) -> None:
    folder = decoder_models.write(replace(TINY, vocabulary=4), tmp_path / "m" / "1")
    (folder / "config.json").unlink()  # so that it isn't known which tokens there are
    async with serving(tmp_path, backends=BACKENDS) as started:
        metadata = await started.stub.ModelMetadata(pb.ModelMetadataRequest(name="m"))
        assert "past_key_values.0.key" in [one.name for one in metadata.inputs]


@pytest.mark.gpu
async def test_answers_on_a_gpu_equal_the_naive_loop(tmp_path: Path) -> None:
    try:
        count_gpus()
    except LoadError as reason:
        pytest.skip(str(reason))
    decoder = Decoder(end_tokens=(2, 9))
    folder = decoder_models.write(decoder, tmp_path / "m" / "1")
    (tmp_path / "m" / "config.pbtxt").write_text("instance_group { kind: KIND_GPU }")
    async with serving(tmp_path) as started:
        await check_answers(started, folder, decoder, tie=0.1)  # of scores up to 16, a GPU multiplies with ten bits
