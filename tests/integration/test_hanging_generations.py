"""Steps of a decoder, or its encoder, that hang: what becomes of generations, and of the instance; and a trial that
hangs at load."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import grpc
import numpy as np
import pytest

from paceline.backends.base import Device, InstanceGroup, ModelSource
from paceline.backends.onnx.backend import OnnxModel
from paceline.backends.onnx.decoder import DecoderModel, decoder_of
from paceline.backends.onnx.decoder_block import Run
from paceline.backends.onnx.instance import OnnxInstance
from paceline.backends.onnx.options import parse_options
from paceline.backends.spec import Array, ModelSpec, Tensors
from paceline.server.errors import StartError
from tests import encoder_decoder_models
from tests.encoder_decoder_models import TRANSLATION
from tests.encoder_decoder_truth import NaivePair
from tests.generation_truth import Asked, is_same
from tests.integration import test_encoder_decoders as encoded
from tests.integration.serving import failure_of, serving, write_model
from tests.integration.streams import Stream
from tests.integration.test_generations import asking, tokens_of
from tests.memory_models import Gate
from tests.polling import eventually_async
from tests.unit.backends.onnx.generating import Decoder, answer_of, layout

LIMITED = """
    parameters { key: "paceline.execution_timeout_ms" value { string_value: "200" } }
    parameters { key: "paceline.max_generations" value { string_value: "2" } }
"""


class Stepped:
    """A decoder whose executions pass a gate."""

    spec = layout().executed
    operators = frozenset[str]()

    def __init__(self) -> None:
        self.gate = Gate()

    def stepped(self, spec: ModelSpec, device: Device) -> Decoder:
        return Decoder(before=lambda rows: self.gate.enter())

    tried = stepped

    def close(self) -> None:
        pass


class Backend:
    def __init__(self) -> None:
        self.model = Stepped()

    def devices(self, groups: Sequence[InstanceGroup]) -> tuple[Device, ...]:
        return (Device(),)

    def open(self, source: ModelSource, device: Device) -> DecoderModel:
        decoder = decoder_of(source, self.model, lambda path: self.model, device)
        assert decoder is not None
        return decoder


async def test_step_that_hangs_ends_its_generations_and_is_replaced(tmp_path: Path) -> None:
    write_model(tmp_path, "m", LIMITED)
    backend = Backend()
    async with serving(tmp_path, backends={"memory": backend}) as served:
        assert tokens_of(await served.infer(asking([9, 8], max_tokens=3))) == answer_of([9, 8], 3)
        backend.model.gate.close()
        stream = Stream(served)
        await stream.send(asking([5], max_tokens=20))
        others = [failure_of(served.infer(asking([6], max_tokens=20))) for _ in range(2)]
        for code, text in await asyncio.gather(*others):
            assert (code, "took longer than the limit of executions, 0.2 s" in text) == (grpc.StatusCode.INTERNAL, True)
        assert "took longer than the limit" in (await stream.message()).error_message
        await stream.end()
        assert await served.metric("paceline_hung_executions", 'model="m",version="1"') == 1
        assert served.server.repository.hangs
        backend.model.gate.open()
        assert tokens_of(await served.infer(asking([9, 8], max_tokens=3))) == answer_of([9, 8], 3)
        await eventually_async(lambda: not served.server.repository.hangs, "the end of what hung")


@pytest.mark.usefixtures("without_minimum_execution_limit")
async def test_trial_that_hangs_fails_the_load(tmp_path: Path) -> None:
    write_model(tmp_path, "m", LIMITED)
    backend = Backend()
    backend.model.gate.close()
    with pytest.raises(StartError, match=r"took longer than its limit: 0.2 s"):
        async with serving(tmp_path, backends={"memory": backend}):
            pass
    backend.model.gate.open()


class GatedSteps:
    """Steps that pass a gate."""

    def __init__(self, steps: OnnxInstance, gate: Gate) -> None:
        self._steps = steps
        self._gate = gate

    def run(self, inputs: Sequence[Array]) -> Tensors:
        self._gate.enter()
        return self._steps.run(inputs)

    def keeping(self, kept: Sequence[Array]) -> Run:
        raise AssertionError("an encoder keeps nothing")

    def abandon(self) -> None:
        self._steps.abandon()

    def close(self) -> None:
        self._steps.close()


class GatedModel:
    """An encoder whose executions pass a gate."""

    def __init__(self, model: OnnxModel, gate: Gate) -> None:
        self.spec, self.operators = model.spec, model.operators
        self._model = model
        self._gate = gate

    def stepped(self, spec: ModelSpec, device: Device) -> GatedSteps:
        return GatedSteps(self._model.stepped(spec, device), self._gate)

    tried = stepped

    def close(self) -> None:
        self._model.close()


class EncoderBackend:
    def __init__(self) -> None:
        self.gate = Gate()

    def devices(self, groups: Sequence[InstanceGroup]) -> tuple[Device, ...]:
        return (Device(),)

    def open(self, source: ModelSource, device: Device) -> DecoderModel:
        def opened(path: Path) -> OnnxModel:
            return OnnxModel(source, path, parse_options(source), device, lambda device: None)

        decoder = decoder_of(source, opened(source.path), lambda path: GatedModel(opened(path), self.gate), device)
        assert decoder is not None
        return decoder


async def test_encoder_that_hangs_ends_its_requests_and_is_replaced(tmp_path: Path) -> None:
    encoder_decoder_models.write(TRANSLATION, tmp_path / "m")
    (tmp_path / "m" / "config.pbtxt").write_text(LIMITED)
    backend, request = EncoderBackend(), encoded.asking(TRANSLATION, np.arange(3, 9), max_tokens=4)
    truth = NaivePair(tmp_path / "m").generate(np.arange(3, 9), Asked(max_tokens=4))
    async with serving(tmp_path, backends={"onnxruntime": backend}) as served:
        backend.gate.close()
        for code, text in await asyncio.gather(*(failure_of(served.infer(request, 30)) for _ in range(2))):
            assert (code, "took longer than the limit of executions, 0.2 s" in text) == (grpc.StatusCode.INTERNAL, True)
        assert await served.metric("paceline_hung_executions", 'model="m",version="1"') >= 1
        backend.gate.open()
        await eventually_async(lambda: not served.server.repository.hangs, "the end of what hung")
        answer = await served.infer(request, 30)
        assert is_same(truth, encoded.tokens_of(answer), answer.parameters["finish_reason"].string_param)
