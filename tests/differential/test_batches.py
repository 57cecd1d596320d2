"""Which batches form of requests on one stream while a delay lasts: the same on both servers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import pytest

from paceline.protos import inference_pb2 as pb
from tests.differential.messages import floats, infer
from tests.differential.pair import Both, One, serving_both
from tests.differential.repository import model_config
from tests.differential.test_counts import counts
from tests.differential.test_streams import Stream, answered
from tests.polling import eventually


def batching(fields: str) -> str:
    """Longer than any of these streams takes to arrive."""
    return model_config(f"max_batch_size: 4 dynamic_batching {{ max_queue_delay_microseconds: 700000 {fields} }}")


def policy(action: str) -> str:
    fields = f"timeout_action: {action} default_timeout_microseconds: 200000 allow_timeout_override: true"
    return batching(f"default_queue_policy {{ {fields} }}")


MODELS = {
    "delay": batching(""),
    "preferred": batching("preferred_batch_size: 2"),
    "levels": batching("priority_levels: 3 default_priority_level: 2"),
    "rejects": policy("REJECT"),
    "delays": policy("DELAY"),
}


@dataclass(frozen=True, slots=True)
class Burst:
    """Requests of so many `rows` each to `model`, which end in `batches`, by size; the others fail. `parameters` are
    those of the request at each place."""

    model: str
    rows: Sequence[int]
    batches: Mapping[int, int]
    parameters: Sequence[Mapping[str, int]] = ()

    def requests(self) -> list[pb.ModelInferRequest]:
        parameters = [*self.parameters, *[{}] * len(self.rows)]
        return [
            infer(self.model, {"INPUT0": floats(rows, 4)}, parameters=of_it)
            for rows, of_it in zip(self.rows, parameters, strict=False)
        ]


BURSTS = [
    Burst("delay", [1], {1: 1}),
    Burst("delay", [1, 1], {2: 1}),
    Burst("delay", [1, 1, 1, 1], {4: 1}),
    Burst("delay", [1, 1, 1, 1, 1], {4: 1, 1: 1}),
    Burst("delay", [3, 2], {3: 1, 2: 1}),
    Burst("delay", [3, 2, 1], {3: 2}),
    Burst("preferred", [1], {1: 1}),
    Burst("preferred", [1, 1], {2: 1}),
    Burst("preferred", [1, 1, 1], {2: 1, 1: 1}),
    Burst("preferred", [3], {3: 1}),
    Burst("preferred", [1, 3], {1: 1, 3: 1}),
    Burst("levels", [1, 1, 1], {3: 1}, [{"priority": 3}, {"priority": 1}]),
    Burst("levels", [2, 2], {4: 1}, [{"priority": 3}, {"priority": 1}]),
    Burst("levels", [3, 2], {3: 1, 2: 1}, [{"priority": 3}, {"priority": 1}]),
    Burst("levels", [1, 1], {2: 1}, [{"priority": 0}, {"priority": 9}]),
    Burst("rejects", [1], {}),
    Burst("rejects", [1, 1], {}, [{"timeout": 50_000}]),
    Burst("rejects", [1, 1, 1, 1], {4: 1}),
    Burst("delays", [1, 1], {2: 1}, [{"timeout": 50_000}]),
]


@pytest.fixture(scope="module")
def delaying(installed: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    with serving_both(tmp_path_factory.mktemp("delaying"), MODELS) as serving:
        yield serving


def sizes(one: One, model: str) -> dict[int, int]:
    found = counts(one, model)
    return {size: found[f"batches of {size}"] for size in range(1, 5)}


@pytest.mark.parametrize("burst", BURSTS, ids=lambda burst: f"{burst.model} {burst.rows}")
@pytest.mark.parametrize("who", ["triton", "here"])
def test_burst_ends_in_the_same_batches(burst: Burst, who: str, delaying: Both) -> None:
    one: One = getattr(delaying, who)
    before = sizes(one, burst.model)
    expected = {size: count + burst.batches.get(size, 0) for size, count in before.items()}
    replies, status = answered(one.channel, Stream("", burst.requests()))
    failed = sum("error of" in reply for reply in replies)
    assert (len(replies), status) == (len(burst.rows), "OK")
    assert failed == (0 if burst.batches else len(burst.rows))
    # Triton counts a moment after it has answered.
    eventually(lambda: sizes(one, burst.model) == expected, f"{expected}, got {sizes(one, burst.model)}", 5)
