"""Many clients during one reload after another: no request is refused or answered wrongly, and nothing stays open."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from paceline.backends.errors import LoadError
from paceline.backends.spec import Tensors
from tests.harness import touch
from tests.integration.controlling import all_left, explicit, index, load, polling
from tests.integration.serving import Served, echo_model, failure_of, serving
from tests.memory_models import MemoryModel
from tests.wire import infer

pytestmark = pytest.mark.usefixtures("frontends")

CLIENTS, RELOADS = 32, 8
CONFIG = """max_batch_size: 8
    dynamic_batching { max_queue_delay_microseconds: 300 }
    instance_group { count: 2 }
    parameters { key: "paceline.split_oversized" value { string_value: "true" } }"""


def generation(number: int) -> MemoryModel:
    """A model that adds 1000 times `number` to its input."""

    def compute(inputs: Tensors) -> Tensors:
        return [array + np.float32(number * 1000) for array in inputs]

    return MemoryModel(echo_model().spec, compute, latency=lambda rows: 0.0005)


class Traffic:
    """Clients that send requests in a loop. Every fourth client's requests are larger than a batch."""

    def __init__(self, served: Served) -> None:
        self._served = served
        self._ended = False
        self.answered = 0
        self.generations: set[int] = set()
        self.latest = 0

    async def client(self, number: int) -> None:
        rows = 20 if number % 4 == 0 else 1 + number % 3
        asked = np.full((rows, 2), number, np.float32)
        while not self._ended:
            oldest = self.latest
            answer = await self._served.infer(infer("m", {"a": asked}))
            got = np.frombuffer(answer.raw_output_contents[0], np.float32).reshape(rows, 2) - asked
            values = set((got / 1000).ravel().tolist())
            assert len(values) == 1, f"one request answered by several loads of the model: {values}"
            came_from = int(values.pop())
            assert came_from >= oldest, "a request answered by what no longer serves"
            self.generations.add(came_from)
            self.answered += 1

    async def more(self, answers: int) -> None:
        """Return once `answers` more requests are answered."""
        goal = self.answered + answers
        while self.answered < goal:
            await asyncio.sleep(0)

    def end(self) -> None:
        self._ended = True


@pytest.mark.parametrize("mode", ["explicit", "poll"])
async def test_reload_under_load_loses_and_refuses_no_request(tmp_path: Path, mode: str) -> None:
    generations = [generation(number) for number in range(RELOADS + 1)]
    models = {"m": generations[0]}
    settings = explicit(tmp_path, load=("m",)) if mode == "explicit" else polling(tmp_path)
    async with serving(tmp_path, models, config=CONFIG, settings=settings) as served:
        traffic = Traffic(served)
        clients = [asyncio.create_task(traffic.client(number)) for number in range(CLIENTS)]
        for number, model in enumerate(generations[1:], 1):
            # One answer for each client may be from the generation before; one more can't be.
            await traffic.more(CLIENTS + 1)
            models["m"] = model
            if mode == "explicit":
                touch(tmp_path / "m")
                await load(served, "m")
            else:
                (tmp_path / "m" / "config.pbtxt").write_text(f'backend: "memory" {CONFIG} # {number}' + " " * number)
                assert await served.server.poller.poll_once()
                assert not await served.server.poller.poll_once()
                await served.server.poller.ended()
            traffic.latest = number
        await traffic.more(CLIENTS + 1)
        traffic.end()
        await asyncio.gather(*clients)
        await all_left(served)
        assert traffic.generations == set(range(RELOADS + 1))
        assert [model.open_instances for model in generations] == [0] * RELOADS + [2]
        assert [model.closed for model in generations] == [True] * RELOADS + [False]
        assert await index(served) == [("m", "1", "READY", "")]
        assert served.waiting("m") == 0


async def test_failed_reload_under_load_affects_no_request(tmp_path: Path) -> None:
    class Broken(MemoryModel):
        def instance(self, *args: object) -> object:  # type: ignore[override]
            raise LoadError("no memory")

    good, bad = generation(0), Broken(echo_model().spec)
    models: dict[str, MemoryModel] = {"m": good}
    async with serving(tmp_path, models, config=CONFIG, settings=explicit(tmp_path, load=("m",))) as served:
        traffic = Traffic(served)
        clients = [asyncio.create_task(traffic.client(number)) for number in range(CLIENTS)]
        models["m"] = bad
        touch(tmp_path / "m")
        for _ in range(RELOADS):
            await traffic.more(CLIENTS)
            assert (await failure_of(load(served, "m")))[1] == "load failed for model 'm': no memory"
        traffic.end()
        await asyncio.gather(*clients)
        assert traffic.generations == {0}
        assert (good.closed, good.open_instances, bad.closed) == (False, 2, True)
