"""The guide's decoupled model as NVIDIA's clients ask it, blocking and asyncio, alone and through several processes."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.grpc.aio
from tritonclient.utils import InferenceServerException

from tests.conformance.triton import Callbacks, tensors
from tests.harness import REPO, ServerProcess

GUIDE = REPO / "docs" / "guides" / "python-models.md"
FINAL = "triton_final_response"


def write_guides_model(root: Path) -> None:
    """The model that the guide shows, with its configuration."""
    _, _, after = GUIDE.read_text(encoding="utf-8").partition("## Answering more than once")
    shown, _, _ = after.partition("\n## ")
    blocks = dict(re.findall(r"```(pbtxt|python)\n(.*?)```", shown, re.DOTALL))
    (root / "counter" / "1").mkdir(parents=True)
    (root / "counter" / "config.pbtxt").write_text(blocks["pbtxt"])
    (root / "counter" / "1" / "model.py").write_text(blocks["python"])


@pytest.fixture(scope="module", params=["1", "2"], ids=["alone", "fronts"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    root = tmp_path_factory.mktemp("repository")
    write_guides_model(root)
    with ServerProcess(root, args=("--allow-python-models", "true", "--frontends", request.param)) as serves:
        yield serves


def count_to(number: int) -> Any:
    return tensors({"count": np.array([[number]], np.int32)})


def seen(result: Any) -> tuple[str, int | None, bool]:
    """Id, number if there is one, and whether it is the last."""
    response, numbers = result.get_response(), result.as_numpy("number")
    return response.id, None if numbers is None else int(numbers[0, 0]), response.parameters[FINAL].bool_param


def test_blocking_client_gets_all_answers_of_several_requests(server: ServerProcess) -> None:
    with tritonclient.grpc.InferenceServerClient(server.target) as client:
        called = Callbacks()
        client.start_stream(called)
        counts = {"three": 3, "none": 0, "many": 100}
        for request_id, number in counts.items():
            client.async_stream_infer(
                "counter", count_to(number), request_id=request_id, enable_empty_final_response=True
            )
        answers: dict[str, list[tuple[int | None, bool]]] = {request_id: [] for request_id in counts}
        for _ in range(sum(counts.values()) + len(counts)):
            result, error = called.next()
            assert error is None
            request_id, number, last = seen(result)
            answers[request_id].append((number, last))
        for request_id, number in counts.items():
            assert answers[request_id] == [*((one, False) for one in range(number)), (None, True)]
        client.stop_stream()
        assert called.none_yet


async def test_asyncio_client_iterates_over_the_answers(server: ServerProcess) -> None:
    async def requests() -> AsyncIterator[dict[str, Any]]:
        for request_id in ("a", "b"):
            yield {"model_name": "counter", "inputs": count_to(4), "request_id": request_id}

    async with tritonclient.grpc.aio.InferenceServerClient(server.target) as client:
        answers = [(seen(result), error) async for result, error in client.stream_infer(requests())]
        for request_id in ("a", "b"):
            own = [answer for answer in answers if answer[0][0] == request_id]
            assert own == [((request_id, number, False), None) for number in range(4)]


def test_unary_call_fails_in_the_words_that_clients_look_for(server: ServerProcess) -> None:
    with tritonclient.grpc.InferenceServerClient(server.target) as client:
        text = "ModelInfer RPC doesn't support models with decoupled transaction policy"
        with pytest.raises(InferenceServerException, match=text) as error:
            client.infer("counter", count_to(1))
        assert error.value.status() == "StatusCode.UNIMPLEMENTED"
        config = client.get_model_config("counter").config
        assert config.model_transaction_policy.decoupled
