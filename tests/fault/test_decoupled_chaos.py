"""Many requests of a decoupled model that answers, fails, hangs, forgets and dies, while callers cancel and go."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from paceline.backends.python.decoupled import DecoupledInstance
from paceline.protos import inference_pb2 as pb
from paceline.server.config import Settings
from tests import open_puppet
from tests.integration.serving import Served, serving
from tests.integration.streams import Stream
from tests.polling import eventually_async
from tests.wire import infer

# What the model does, and what its caller hears: numbers, then the end or an error.
DEEDS: Mapping[str, tuple[str, list[int], str]] = {
    "answers": ("for n in range(20): send(n)\nrequest.end()", [*range(20)], ""),
    "ends with its answer": ("send(0)\nsend(1, True)", [0, 1], ""),
    "says nothing": ("request.end()", [], ""),
    "answers on a thread": ("thread(lambda: ([send(n) for n in range(40)], request.end()))", [*range(40)], ""),
    "fails": ("send(0)\nrequest.fail('no')", [0], "no"),
    "raises": ("send(0)\nraise ValueError('no')", [0], "ValueError: no"),
    "forgets": ("send(0)", [0], "dropped the request"),
    "waits until cancelled": ("send(0)\nmodel.kept.append(request)", [0], "was cancelled"),
    "sends until cancelled": (
        "thread(lambda: [send(1) for _ in iter(lambda: request.cancelled, True)])", [1] * 100_000, "was cancelled"
    ),
    "loops until cancelled": ("send(0)\nwhile not request.cancelled: pass\nrequest.end()", [0], "was cancelled"),
    "dies": ("send(0)\nos._exit(3)", [0], "exit status 3"),
}  # fmt: skip
DEATH = "exit status 3"


def asking(deed: str, request_id: str) -> pb.ModelInferRequest:
    request = infer("m", {"x": np.array([[1]], np.int64)})
    request.id = request_id
    request.parameters["run"].string_param = DEEDS[deed][0]
    request.parameters["triton_enable_empty_final_response"].bool_param = True
    return request


class Caller:
    """A stream with requests, some of which it cancels after some of their answers, and what it hears of each."""

    def __init__(self, served: Served, name: str, deeds: list[str], chance: random.Random) -> None:
        self._stream = Stream(served, timeout_s=60)
        self._deeds = {f"{name} {number}": deed for number, deed in enumerate(deeds)}
        # After how many answers requests are cancelled: some of all, and those that end in no other way.
        self._patience = {one: chance.choice([0, 1, 3]) for one in self._deeds if chance.random() < 0.2}
        for one, deed in self._deeds.items():
            if deed.endswith("cancelled"):
                self._patience[one] = chance.choice([0, 1])
        self.heard: defaultdict[str, list[int]] = defaultdict(list)
        self.errors: dict[str, str] = {}

    async def call(self, *, leaves: bool) -> None:
        """Ask, and listen to the last answer of each; or, if it `leaves`, go after some."""
        await self._stream.send(*[asking(deed, request_id) for request_id, deed in self._deeds.items()])
        for request_id, patience in self._patience.items():
            if not patience:
                await self._cancel(request_id)
        left = set(self._deeds)
        while left and not (leaves and len(left) <= len(self._deeds) // 2):
            message = await self._stream.message()
            response = message.infer_response
            if response.outputs:
                self.heard[response.id].append(int(np.frombuffer(response.raw_output_contents[0], np.int64)[0]))
                if len(self.heard[response.id]) == self._patience.get(response.id):
                    await self._cancel(response.id)
            if message.error_message:
                self.errors[response.id] = message.error_message
            if response.parameters["triton_final_response"].bool_param:
                left.remove(response.id)
        self._stream.call.cancel()

    async def _cancel(self, request_id: str) -> None:
        cancelling = pb.InferParameter(bool_param=True)
        await self._stream.send(pb.ModelInferRequest(id=request_id, parameters={"paceline_cancel": cancelling}))

    def check(self, *, may_die: bool) -> None:
        """What was heard of each request is what its deed says, as far as nobody ended it before."""
        for request_id, deed in self._deeds.items():
            _, numbers, text = DEEDS[deed]
            heard, error = self.heard[request_id], self.errors.get(request_id, "")
            assert heard == numbers[: len(heard)], (request_id, deed)
            if error:
                fits = text and text in error
                assert fits or "was cancelled" in error or (may_die and DEATH in error), (request_id, deed, error)


@pytest.mark.parametrize("dies", [False, True])
@pytest.mark.parametrize("seed", range(3))
async def test_nothing_is_lost_or_left_behind(tmp_path: Path, seed: int, dies: bool) -> None:
    chance = random.Random(seed)
    open_puppet.write(tmp_path, "max_batch_size: 1 instance_group { count: 2 }")
    # Where the model loops until it is cancelled, nothing else of its instance begins.
    deeds = [deed for deed in DEEDS if dies or deed != "dies"]
    async with serving(tmp_path, settings=Settings(paths=(tmp_path,), allow_python_models=True)) as served:
        model = served.server.repository.get("m", "")
        callers = [Caller(served, str(name), chance.choices(deeds, k=30), chance) for name in range(4)]
        await asyncio.gather(*(caller.call(leaves=caller is callers[0]) for caller in callers))
        for caller in callers:
            caller.check(may_die=dies)
        assert model.open_requests is not None
        await eventually_async(lambda: not len(model.open_requests), "no request is open")
        await eventually_async(lambda: not model.batcher.waiting_requests, "none waits")
        statistics = model.statistics
        assert statistics.requests.count + statistics.failed == 4 * 30
        last = Caller(served, "last", ["answers"], random.Random(1))
        await last.call(leaves=False)
        await eventually_async(lambda: not len(model.open_requests), "no request is open")
        for instance in set(model.instances.runners.values()):
            assert isinstance(instance, DecoupledInstance)
            process = instance._process
            await eventually_async(lambda process=process: process is None or not process._open, "its process has none")
