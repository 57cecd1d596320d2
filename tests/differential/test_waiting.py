"""Requests that wait, are late, or are cancelled: what becomes of them and their sequences, on either server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from paceline.protos import inference_pb2 as pb
from paceline.protos.inference_pb2_grpc import GRPCInferenceServiceStub
from tests.differential.comparing import Call, answer_of
from tests.differential.messages import load
from tests.differential.pair import Both, One, serving_both
from tests.differential.scenes import ADDED, MODELS, asking, step
from tests.differential.test_counts import counts
from tests.differential.test_scenes import counted, differences
from tests.polling import eventually

NEEDED = ("memory", "forgetful", "places", "plain", "chain")
BATCH = "response = answer(model.batch)"
"""How many requests are executed together."""


@pytest.fixture(scope="module")
def keeping(installed: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    with serving_both(tmp_path_factory.mktemp("keeping"), {name: MODELS[name] for name in NEEDED}) as serving:
        yield serving


@pytest.fixture(params=["triton", "here"])
def one(request: pytest.FixtureRequest, keeping: Both) -> One:
    """Either server."""
    found: One = getattr(keeping, request.param)
    return found


def sent(one: One, request: pb.ModelInferRequest, timeout_s: float = 30) -> Any:
    stub = GRPCInferenceServiceStub(one.channel)  # type: ignore[no-untyped-call]
    return stub.ModelInfer.future(request, timeout=timeout_s)


def outcome(call: Any) -> int | str:
    """The number that answers it, or the status."""
    try:
        return int(np.frombuffer(call.result().raw_output_contents[0], "<i8")[0])
    except grpc.FutureCancelledError:
        return "CANCELLED"
    except grpc.RpcError as error:
        failure: Any = error
        return str(failure.code().name)


def held_up(gate: Path, code: str) -> str:
    """`code` for a model, run once there is a file `gate`."""
    return f"import os, time\nwhile not os.path.exists({str(gate)!r}): time.sleep(0.01)\n{code}"


def open_behind_calls(gate: Path, one: One) -> None:
    """Open the gate once the server has heard of what the calls have told it so far."""
    GRPCInferenceServiceStub(one.channel).ServerLive(pb.ServerLiveRequest(), timeout=20)  # type: ignore[no-untyped-call]
    gate.touch()


def behind_one_held_up(one: One, gate: Path, sequence: int, *requests: pb.ModelInferRequest) -> list[Any]:
    """Calls with these steps, which wait behind one that executes until the gate opens, in this order."""
    calls = [sent(one, step(sequence, held_up(gate, ADDED), start=True))]
    for request in requests:
        waiting = counts(one, "memory")["nv_pending_request_count"]
        calls.append(sent(one, request))
        # Only one that is executed at once isn't seen waiting.
        eventually(
            lambda call=calls[-1], waiting=waiting: (
                call.done() or counts(one, "memory")["nv_pending_request_count"] > waiting
            ),
            "a step that has arrived",
        )
    return calls


def test_start_behind_cancelled_step_goes_on_only_here(one: One, keeping: Both, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    calls = behind_one_held_up(one, gate, 1, step(1), step(1), step(1, start=True), step(1, end=True))
    calls[1].cancel()
    open_behind_calls(gate, one)
    expected = ["CANCELLED"] * 3 if one is keeping.triton else ["INVALID_ARGUMENT", 1, 2]
    assert [outcome(call) for call in calls] == [1, "CANCELLED", *expected]


def test_id_used_again_waits_only_here(one: One, keeping: Both, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    _, _, again = calls = behind_one_held_up(one, gate, 5, step(5, end=True), step(5, start=True, end=True))
    if one is keeping.triton:
        assert outcome(again) == 1
    assert again.done() == (one is keeping.triton)
    gate.touch()
    assert [outcome(call) for call in calls] == [1, 2, 1]


def test_slow_step_ends_sequence_only_in_triton(one: One, keeping: Both) -> None:
    assert outcome(sent(one, step(2, "import time; time.sleep(1.5)\n" + ADDED, "forgetful", start=True))) == 1
    expected = "INVALID_ARGUMENT" if one is keeping.triton else 2
    assert outcome(sent(one, step(2, model="forgetful"))) == expected


def test_empty_places_count_only_in_triton(one: One, keeping: Both) -> None:
    seen = [outcome(sent(one, step(number, BATCH, "places", start=True))) for number in (1, 2, 3)]
    seen += [outcome(sent(one, step(number, BATCH, "places", end=True))) for number in (3, 2, 1)]
    assert seen == [1, 2, 3, 3, 2, 1]
    sizes = {1: 2, 2: 2, 3: 2} if one is keeping.triton else {1: 6}
    expected = {f"batches of {size}": count for size, count in sizes.items()}
    eventually(
        lambda: (
            {name: count for name, count in counts(one, "places").items() if name.startswith("batches")} == expected
        ),
        f"{expected}, got {counts(one, 'places')}",
    )
    assert counts(one, "places")["rows"] == 6


def test_sequence_outlives_a_load_that_changes_nothing(one: One) -> None:
    # Triton's model has written beside its file since it was loaded, which is a change.
    assert answer_of(one.channel, Call("", load("memory"))).status == "OK"
    assert outcome(sent(one, step(3, start=True))) == 1
    assert answer_of(one.channel, Call("", load("memory"))).status == "OK"
    assert outcome(sent(one, step(3, end=True))) == 2


def test_only_tritons_ensembles_answer_with_parameters(one: One, keeping: Both) -> None:
    told = sent(one, step(4, "response = answer(1)", "chain", start=True)).result().parameters
    assert {*told} == ({"sequence_id", "sequence_start", "sequence_end"} if one is keeping.triton else set())


def test_cancelled_requests_are_answered_only_in_triton(one: One, keeping: Both, tmp_path: Path) -> None:
    """Of a model that batches nothing dynamically."""
    begun, gate, before = tmp_path / "begun", tmp_path / "gate", counted(one, "plain")
    held = held_up(gate, "response = answer(1)")
    calls = [sent(one, asking("plain", f"open({str(begun)!r}, 'w').close()\n{held}"))]
    eventually(begun.exists, "an execution")
    calls.append(sent(one, asking("plain", "response = answer(2)")))
    eventually(lambda: counts(one, "plain")["nv_pending_request_count"] == 1, "one that waits")
    for call in calls:
        call.cancel()
    open_behind_calls(gate, one)
    expected = {"plain": (2, 0, 2, 2) if one is keeping.triton else (0, 2, 1, 1)}
    eventually(lambda: not differences(one, {"plain": before}, expected), f"{expected}")
