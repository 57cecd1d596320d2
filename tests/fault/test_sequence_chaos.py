"""Thousands of steps of sequences, at random good, bad, failing, hasty or cancelled, over calls and streams, while the
model's process is killed and the model is loaded again. A state is the set of the steps that have made it, as bits:
each answer shows which those were.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import onnx
from onnx import helper, numpy_helper

from paceline.protos import inference_pb2 as pb
from tests import models
from tests.harness import ServerProcess
from tests.lengths import LONG
from tests.polling import eventually
from tests.wire import infer

STEPS = 10_000 if LONG else 800
WORKERS = 32
CONFIG = """
    max_batch_size: 8 instance_group { count: 2 }
    sequence_batching {
      max_sequence_idle_microseconds: 1000000
      oldest { }
      state { input_name: "STATE" output_name: "STATE_OUT" }
    }
    parameters { key: "paceline.own_process" value { string_value: "true" } }
    parameters { key: "paceline.max_sequences" value { string_value: "24" } }
    parameters { key: "paceline.sequence_backlog" value { string_value: "16" } }
"""
SERVICE = "/inference.GRPCInferenceService/"
Code = grpc.StatusCode
KINDS = ["good"] * 14 + ["failing"] * 2 + ["bad", "hasty", "cancelled", "restart"]
LONGEST = 60
"""Steps of a sequence: so many bits."""


def bits() -> onnx.ModelProto:
    """OUTPUT0 = STATE_OUT = STATE + INPUT0, INT64 [1]; fails if a row of PLACE, INT64 [1], isn't 0."""
    return models.model(
        [
            helper.make_node("Gather", ["zeros", "PLACE"], ["zero"]),
            helper.make_node("Add", ["STATE", "INPUT0"], ["sum"]),
            helper.make_node("Add", ["sum", "zero"], ["OUTPUT0"]),
            helper.make_node("Identity", ["OUTPUT0"], ["STATE_OUT"]),
        ],
        [models.tensor(name, "INT64", ["batch", 1]) for name in ("INPUT0", "PLACE", "STATE")],
        [models.tensor(name, "INT64", ["batch", 1]) for name in ("OUTPUT0", "STATE_OUT")],
        [numpy_helper.from_array(np.zeros(1, np.int64), "zeros")],
    )


class Sequence:
    """What a client knows of one of its sequences: which steps must have made the state, and which may have."""

    def __init__(self, id_: int) -> None:
        self.id = id_
        self.must = self.may = 0
        self.next = 0

    def request(self, kind: str, *, end: bool) -> tuple[pb.ModelInferRequest, int, bool]:
        """A step, its bit, and whether it starts anew."""
        start = self.next == 0 or kind == "restart"
        bit, self.next = 1 << self.next, self.next + 1
        place = 7 if kind == "failing" else 0
        shape = (1, 2) if kind == "bad" else (1, 1)
        inputs = {"INPUT0": np.full(shape, bit, np.int64), "PLACE": np.full((1, 1), place, np.int64)}
        parameters = {"sequence_id": self.id, "sequence_start": start, "sequence_end": end}
        return infer("m", inputs, parameters=parameters), bit, start

    def answered(self, made_of: int, bit: int, start: bool) -> None:
        """Check an answer: it has made a state of `made_of`."""
        must, may = (0, 0) if start else (self.must, self.may)
        assert made_of & bit
        assert made_of & must == must, f"{made_of:b} lacks some of {must:b}"
        assert made_of & ~bit & ~must & ~may == 0, f"{made_of:b} has more than {must | may | bit:b}"
        self.must, self.may = made_of, 0

    def failed(self, kind: str, code: Code, bit: int, start: bool) -> None:
        """Note what a step without an answer may have done."""
        if code in (Code.CANCELLED, Code.DEADLINE_EXCEEDED):
            # It may have been executed, and if it starts anew, then without all that was before.
            self.may |= bit | (self.must if start else 0)
            self.must = 0 if start else self.must
        elif start and code is Code.INTERNAL:
            # It was executed, and has failed: what was before is gone, if it was there.
            self.may, self.must = self.may | self.must, 0


class Chaos:
    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._call: Any = channel.unary_unary(
            f"{SERVICE}ModelInfer", pb.ModelInferRequest.SerializeToString, pb.ModelInferResponse.FromString
        )
        self._stream: Any = channel.stream_stream(
            f"{SERVICE}ModelStreamInfer",
            pb.ModelInferRequest.SerializeToString,
            pb.ModelStreamInferResponse.FromString,
        )
        self.ends: dict[str, Counter[Code]] = {kind: Counter() for kind in KINDS}
        self.done = 0

    async def work(self, worker: int) -> None:
        """Run sequences one after the other, on one stream or with calls, until enough steps are done."""
        chance = random.Random(worker)
        stream = self._stream(timeout=600) if worker % 2 else None
        number = 0
        while self.done < STEPS:
            number += 1
            await self._sequence(Sequence(1_000_000 * (worker + 1) + number), chance, stream)
        if stream is not None:
            await stream.done_writing()
            assert await stream.read() is grpc.aio.EOF  # type: ignore[attr-defined]

    async def _sequence(self, sequence: Sequence, chance: random.Random, stream: Any) -> None:
        length = chance.randrange(1, LONGEST)
        while sequence.next < length:
            kind = chance.choice(KINDS)
            if stream is not None and kind in ("hasty", "cancelled"):
                kind = "good"
            end = sequence.next == length - 1 and kind == "good" and chance.random() < 0.8
            request, bit, start = sequence.request(kind, end=end)
            code, text, answer = await self._step(request, kind, chance, stream)
            self.done += 1
            self.ends[kind][code] += 1
            if code is Code.OK:
                sequence.answered(int(np.frombuffer(answer.raw_output_contents[0], np.int64)[0]), bit, start)
            elif "must specify the START flag" in text:
                return
            else:
                sequence.failed(kind, code, bit, start)
                if sequence.must == sequence.may == 0 and code is not Code.INTERNAL:
                    return  # it may never have begun

    async def _step(
        self, request: pb.ModelInferRequest, kind: str, chance: random.Random, stream: Any
    ) -> tuple[Code, str, Any]:
        if stream is not None:
            await stream.write(request)
            message = await asyncio.wait_for(stream.read(), 120)
            status = message.infer_response.parameters["paceline_status"].string_param or "OK"
            return Code[status], message.error_message, message.infer_response
        call = self._call(request, timeout=chance.choice((0.001, 0.005)) if kind == "hasty" else 120)
        if kind == "cancelled":
            await asyncio.sleep(chance.choice((0, 0.002)))
            call.cancel()
        try:
            answer = await call
        except (grpc.aio.AioRpcError, asyncio.CancelledError):
            return await call.code(), await call.details() or "", None
        return Code.OK, "", answer


def processes(server: ServerProcess) -> list[int]:
    """The processes that the server has started for the model."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            arguments = (folder / "cmdline").read_bytes().split(b"\0")
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            continue
        if b"paceline:m" in arguments and parent == server.pid:
            found.append(int(folder.name))
    return found


async def trouble(chaos: Chaos, server: ServerProcess, channel: grpc.aio.Channel, config: Path) -> None:
    """Kill one of the model's processes, or load the model again, each time that some steps are done."""
    load: Any = channel.unary_unary(
        "/inference.GRPCInferenceService/RepositoryModelLoad",
        pb.RepositoryModelLoadRequest.SerializeToString,
        pb.RepositoryModelLoadResponse.FromString,
    )
    for number in range(1, 9):
        while chaos.done < number * STEPS // 10:
            await asyncio.sleep(0.01)
        if number % 4:
            # One that belonged to what was loaded before may end by itself meanwhile.
            with contextlib.suppress(ProcessLookupError):
                for pid in processes(server)[:1]:
                    os.kill(pid, signal.SIGKILL)
        else:
            config.write_text(f"{CONFIG} version_policy {{ latest {{ num_versions: {number} }} }}")
            await load(pb.RepositoryModelLoadRequest(model_name="m"), timeout=120)


async def test_chaos_makes_no_wrong_state_and_leaves_nothing_behind(tmp_path: Path) -> None:
    path = models.write(bits(), tmp_path / "m" / "1" / "model.onnx")
    config = path.parents[1] / "config.pbtxt"
    config.write_text(CONFIG)
    args = ["--model-control-mode", "explicit", "--load-model", "m"]
    with ServerProcess(tmp_path, args=args) as server:
        async with grpc.aio.insecure_channel(server.target) as channel:
            chaos = Chaos(channel)
            troubling = asyncio.create_task(trouble(chaos, server, channel, config))
            await asyncio.gather(*(chaos.work(worker) for worker in range(WORKERS)))
            await troubling
        ends = chaos.ends
        assert ends["good"][Code.OK] > STEPS // 4
        assert {*ends["bad"]} <= {Code.INVALID_ARGUMENT}
        possible = {Code.OK, Code.INTERNAL, Code.INVALID_ARGUMENT, Code.RESOURCE_EXHAUSTED, Code.UNAVAILABLE}
        assert {*ends["good"], *ends["restart"]} <= possible, ends
        assert {*ends["failing"]} <= possible - {Code.OK}, ends
        assert {*ends["hasty"], *ends["cancelled"]} <= {*possible, Code.DEADLINE_EXCEEDED, Code.CANCELLED}, ends

        def nothing_left() -> bool:
            metrics = server.metrics()
            gauges = [
                metrics[f'paceline_sequences{{model="m",state="{state}",version="1"}}'] for state in ("live", "waiting")
            ]
            return not any(gauges) and not metrics['nv_inference_pending_request_count{model="m",version="1"}']

        eventually(nothing_left, "no sequence left", 60)
