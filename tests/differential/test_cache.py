"""Which requests are answered with kept responses."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np
import pytest

from paceline.protos import inference_pb2 as pb
from paceline.protos.inference_pb2_grpc import GRPCInferenceServiceStub
from tests.differential.comparing import Call, answer_of
from tests.differential.messages import load
from tests.differential.pair import BY_NAME, Both, One, serving_both
from tests.differential.scenes import MODELS, SLOW, asking

_KEPT = "response_cache { enable: true }"
KEEPING = {
    "plain": MODELS["plain"],
    "keeps": f"{MODELS['plain']} dynamic_batching {{ }} {_KEPT}",
    "chain": f"{MODELS['chain']} {_KEPT}",
}
_NEXT = "response = answer(vars(model).setdefault('numbers', iter(range(1, 99))).__next__())"
_TEXT = f"if 'z' in request.requested_output_names():\n    response = text('a')\nelse:\n    {_NEXT}"


@dataclass(frozen=True, slots=True)
class Series:
    """Requests, one after the other, and their answers: letters stand for numbers, the same letter for the same; `+`
    for several outputs, `-` for none, `!` for an error."""

    what: str
    requests: Sequence[pb.ModelInferRequest]
    triton: str
    here: str


SERIES = [
    Series("equal ones", [asking("keeps", _NEXT, number=number) for number in (1, 1, 2, 1)], "AABA", "AABA"),
    Series("of an ensemble", [asking("chain", _NEXT, number=number) for number in (1, 1, 2, 1)], "AABA", "AABA"),
    Series("other ids and priorities", [asking("keeps", _NEXT, "id", 3), asking("keeps", _NEXT, number=3, priority=1)],
           "AA", "AA"),
    Series("other custom parameters", [asking("keeps", _NEXT, number=4, mine=mine) for mine in (1, 2)], "AA", "AB"),
    Series("other outputs", [asking("keeps", _TEXT, number=5, outputs=wanted) for wanted in (["y"], ["z", "y"])],
           "AA", "A+"),
    Series("errors", [asking("keeps", "response = error('no')", number=6)] * 2, "!-", "!!"),
    Series("exceptions", [asking("keeps", "raise ValueError('no')", number=7)] * 2, "!-", "!!"),
]  # fmt: skip


@pytest.fixture(scope="module")
def keeping(installed: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    flags = (*BY_NAME, "--cache-config=local,size=1048576")
    with serving_both(tmp_path_factory.mktemp("keeping"), KEEPING, flags) as serving:
        yield serving


def shown(calls: Sequence[Any]) -> str:
    """The answers in the letters of a series."""
    letters: dict[int, str] = {}
    found = ""
    for call in calls:
        try:
            contents = call.result().raw_output_contents
        except grpc.RpcError:
            found += "!"
            continue
        if len(contents) == 1:
            number = int(np.frombuffer(contents[0], "<i8")[0])
            found += letters.setdefault(number, "ABC"[len(letters)])
        else:
            found += "+" if contents else "-"
    return found


def sent(one: One, request: pb.ModelInferRequest) -> Any:
    stub = GRPCInferenceServiceStub(one.channel)  # type: ignore[no-untyped-call]
    return stub.ModelInfer.future(request, timeout=30)


def ended(call: Any) -> Any:
    call.exception()
    return call


@pytest.mark.parametrize("series", SERIES, ids=lambda series: series.what)
@pytest.mark.parametrize("who", ["triton", "here"])
def test_series_has_these_kept_answers(series: Series, who: str, keeping: Both) -> None:
    one: One = getattr(keeping, who)
    assert shown([ended(sent(one, request)) for request in series.requests]) == getattr(series, who)


def test_load_ends_kept_answers_only_here(keeping: Both) -> None:
    request = asking("keeps", "response = answer(os.getpid())", number=8)
    for one, expected in ((keeping.triton, "AA"), (keeping.here, "AB")):
        calls = [ended(sent(one, request))]
        os.utime(one.repository / "keeps" / "1" / "model.py")
        assert answer_of(one.channel, Call("", load("keeps"))).status == "OK"
        assert shown([*calls, ended(sent(one, request))]) == expected


def test_equal_requests_at_a_time_execute_once_only_here(keeping: Both) -> None:
    request = asking("keeps", f"{SLOW}{_NEXT}", number=9)
    for one, expected in ((keeping.triton, "ABC"), (keeping.here, "AAA")):
        assert shown([ended(call) for call in [sent(one, request) for _ in range(3)]]) == expected
