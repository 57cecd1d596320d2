"""Python models written for Triton that are decoupled, and what responses say besides their outputs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import triton_puppet
from tests.integration.decoupled_serving import Told, rest
from tests.integration.serving import Served
from tests.integration.streams import Stream
from tests.integration.triton_serving import BATCHED, asking, number, served
from tests.polling import eventually_awaited

DECOUPLED = f"{BATCHED} model_transaction_policy {{ decoupled: true }}"
SENDER = "s = request.get_response_sender()\n"


async def answers(served: Served, code: str) -> list[Told]:
    """All answers to a request on a stream of its own, without its id."""
    stream = Stream(served)
    await stream.send(asking(SENDER + code))
    return [(told[1], told[2]) for told in await rest(stream)]  # type: ignore[misc]


@pytest.mark.usefixtures("frontends")
async def test_sender_answers_as_often_as_it_likes(tmp_path: Path) -> None:
    async with served(tmp_path, DECOUPLED) as started:
        for code, expected in (
            ("for n in range(3): s.send(answer(n))\ns.send(flags=final)", [(0, False), (1, False), (2, False)]),
            ("s.send(answer(1)); s.send(answer(2), final)", [(1, False), (2, True)]),
            ("s.send(flags=final)", []),
            ("s.send(error('one')); s.send(answer(3), final)", [("one", False), (3, True)]),
            ("s.send(error('all'), flags=final)", [("all", True)]),
            ("s.send(answer(1)); thread(lambda: s.send(answer(2), final))", [(1, False), (2, True)]),
            ("s.send(answer(1))", [(1, False), ("model 'm': the model dropped the request without ending it", True)]),
        ):
            assert await answers(started, code) == expected


async def test_sending_after_the_end_is_an_exception(tmp_path: Path) -> None:
    code = """
s.send(answer(1), final)
try: s.send(answer(2))
except pb_utils.TritonModelException as error: model.said = str(error)
"""
    async with served(tmp_path, DECOUPLED) as started:
        assert await answers(started, code) == [(1, True)]
        assert await answers(started, "s.send(error(model.said), final)") == [
            ("Unable to send response. Response sender has been closed.", True)
        ]


async def test_returned_responses_fail_a_decoupled_batch(tmp_path: Path) -> None:
    async with served(tmp_path, DECOUPLED) as started:
        ((said, last),) = await answers(started, "model.returns = lambda responses: [answer(1)]")  # type: ignore[misc]
        assert "the execute function must return None" in str(said)
        assert last


async def test_coroutines_of_decoupled_models_go_on_together(tmp_path: Path) -> None:
    source = triton_puppet.SOURCE.replace(
        "        responses = [self.run(request) for request in requests]\n",
        "        for request in requests:\n"
        "            await self.wait(request)\n        responses = [self.run(request) for request in requests]\n",
    ).replace("def execute(self", "async def execute(self")
    source += """
    async def wait(self, request):
        if request.request_id() == "waits":
            self.going = asyncio.Event()
            await self.going.wait()
        if request.request_id() == "raises":
            raise ValueError("in the middle")
"""
    # Nothing else is in the batch of the one that waits.
    async with served(tmp_path, DECOUPLED.replace("max_batch_size: 8", "max_batch_size: 1"), source) as started:
        stream = Stream(started)
        await stream.send(asking(f"{SENDER}s.send(answer(1), final)", "waits"))
        await eventually_awaited(lambda: _says(started, "s.send(answer(int(hasattr(model, 'going'))), final)"), "waits")
        assert await answers(started, "model.going.set(); s.send(answer(2), final)") == [(2, True)]
        assert number((await stream.message()).infer_response) == 1
        await stream.send(asking(f"{SENDER}s.send(answer(1), final)", "raises"))
        assert (await stream.message()).error_message == "model 'm': ValueError: in the middle"


async def _says(served: Served, code: str) -> bool:
    return await answers(served, code) == [(1, True)]


async def test_model_is_told_that_nobody_waits(tmp_path: Path) -> None:
    code = SENDER + "model.kept.append((request, s))"
    asked = "s.send(answer(int(all(a.is_cancelled() and b.is_cancelled() for a, b in model.kept))), final)"
    async with served(tmp_path, DECOUPLED) as started:
        stream = Stream(started)
        await stream.send(asking(code))
        await eventually_awaited(lambda: _says(started, "s.send(answer(len(model.kept)), final)"), "the model has it")
        stream.call.cancel()
        await eventually_awaited(lambda: _says(started, asked), "it is cancelled")


PARAMETERS = {"a": True, "b": 3, "c": 1.5, "d": "text"}


@pytest.mark.usefixtures("frontends")
async def test_parameters_of_responses_reach_the_caller(tmp_path: Path) -> None:
    async with served(tmp_path) as started:
        response = await started.infer(asking(f"response = answer(4, parameters={PARAMETERS})"))
        assert number(response) == 4
        told = {key: getattr(one, one.WhichOneof("parameter_choice")) for key, one in response.parameters.items()}
        assert told == PARAMETERS
        assert not (await started.infer(asking())).parameters


async def test_parameters_of_each_answer_are_its_own(tmp_path: Path) -> None:
    code = "s.send(answer(1, parameters={'n': 1})); s.send(answer(2)); s.send(answer(3, parameters={'n': 3}), final)"
    async with served(tmp_path, DECOUPLED) as started:
        stream = Stream(started)
        await stream.send(asking(SENDER + code))
        told = [(await stream.message()).infer_response.parameters for _ in range(3)]
        assert [one["n"].int64_param if "n" in one else None for one in told] == [1, None, 3]
        assert [one["triton_final_response"].bool_param for one in told] == [False, False, True]
