"""Requests that their model gets by themselves, on their way to it."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from paceline.backends.base import Execution
from paceline.backends.open_request import ELSEWHERE, OpenRequest
from paceline.backends.spec import ModelSpec, TensorSpec
from paceline.protos import inference_pb2 as pb
from paceline.scheduler.policy import NEVER
from paceline.scheduler.request import SequenceStep
from paceline.scheduler.runner import ANSWERED_ELSEWHERE
from paceline.server.call_facts import NO_PASSED_HEADERS
from paceline.server.codec.parameters import NO_PARAMETERS, RequestOptions
from paceline.server.models.open_requests import handing_over
from paceline.server.requests.in_flight import InFlight
from paceline.server.requests.open_flight import OpenFlight

SPEC = ModelSpec((TensorSpec("x", "FP32", (1,)),), (), batched=True)
INPUTS = (np.ones((1, 1), np.float32),)


@pytest.mark.parametrize(
    ("ends", "step", "handed"),
    [("before", None, []), ("before", SequenceStep(1), [INPUTS]), ("while", None, [INPUTS])],
)
def test_request_that_ends_is_handed_over_whole_or_not(ends: str, step: Any, handed: list[Any]) -> None:
    flight = InFlight(pb.ModelInferRequest(), NEVER, None, NO_PASSED_HEADERS)
    flight.model = SimpleNamespace(for_triton=True, generates=None, decoupled=True)
    flight.options, flight.payload, flight.step = RequestOptions(1, (), (), NO_PARAMETERS), INPUTS, step
    opened, seen = OpenFlight(flight, lambda opened, answer, last: None), list[Any]()

    class Instance:
        def execute_open(self, requests: Sequence[OpenRequest]) -> Execution:
            if ends == "while":
                opened.let_go()
            seen.extend(tuple(one.inputs) for one in requests)
            return Execution([ELSEWHERE] * len(requests), 0, 0, 0)

    if ends == "before":
        opened.let_go()
    instance: Any = Instance()
    execute: Any = handing_over(instance, SPEC)
    assert execute([opened], 1).results == [ANSWERED_ELSEWHERE]
    assert seen == handed
    assert (opened.inputs, opened.given, opened.own_inputs) == ((), (), ())
