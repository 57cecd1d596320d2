"""What a load keeps of its answers: copies, counted, until it ends."""

from __future__ import annotations

import tracemalloc
from types import SimpleNamespace

import numpy as np
import pytest

from paceline.backends.batching import shares
from paceline.backends.spec import MISSING, ModelSpec, Tensors, TensorSpec
from paceline.scheduler.waiting import SharedQueueLimits
from paceline.server.bounded_pool import BoundedPool
from paceline.server.codec.answers import Envelope
from paceline.server.codec.codec import ModelCodec
from paceline.server.codec.parameters import NO_PARAMETERS, RequestOptions
from paceline.server.models.kept_responses import KeptResponses
from paceline.server.telemetry.model_statistics import VersionStatistics


def kept_in(pool: BoundedPool[Tensors]) -> KeptResponses:
    return KeptResponses(pool, VersionStatistics(), SharedQueueLimits(0, 0))


def test_kept_outputs_are_copies_of_a_share() -> None:
    batch = np.arange(1_000_000, dtype=np.float32).reshape(1000, 1000)
    pool = BoundedPool[Tensors](10**6)
    responses = kept_in(pool)
    responses.keep(b"key", shares([batch, batch], [0, 1, 1000])[0], [1])
    batch[:] = 0
    found = responses.find(b"key")
    assert found is not None
    assert found[0] is MISSING
    assert found[1].tolist() == [np.arange(1000).tolist()]
    assert (found[1].base, found[1].flags.writeable) == (None, False)
    assert pool.used_bytes < 6_000


@pytest.mark.parametrize("outputs", [1, 3])
def test_entries_take_no_more_memory_than_they_count(outputs: int) -> None:
    pool = BoundedPool[Tensors](10**8)
    responses = KeptResponses(pool, VersionStatistics(), SharedQueueLimits(0, 0), by_rows=True)
    spec = ModelSpec(
        (TensorSpec("a", "FP32", (3,)),), tuple(TensorSpec(f"x{one}", "FP32", (3,)) for one in range(outputs))
    )
    codec, options = ModelCodec("m", "1", spec, 8), RequestOptions(1, (), tuple(range(outputs)), NO_PARAMETERS)
    envelopes = None, Envelope(b"a", b""), Envelope(b"b", b"more")
    tracemalloc.start()
    try:
        for number in range(3000):
            key = number.to_bytes(32, "big")
            responses.keep(key, [np.zeros((1, 3), np.float32)] * outputs, range(outputs))
            for envelope in envelopes:
                asked = SimpleNamespace(message=SimpleNamespace(id=""), options=options, targets={}, envelope=envelope)
                asked.value = responses.find(key)
                assert isinstance(codec.encode([asked])[0], bytes)
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(pool) == 3000
    assert 0.5 * pool.used_bytes < taken <= pool.used_bytes


def test_end_of_one_load_leaves_others_theirs() -> None:
    pool = BoundedPool[Tensors](10**6)
    ended, other = kept_in(pool), kept_in(pool)
    for responses in (ended, other):
        responses.keep(b"key", [np.ones(1)], [0])
    ended.close()
    ended.keep(b"later", [np.ones(1)], [0])
    assert (len(pool), ended.find(b"key"), ended.find(b"later")) == (1, None, None)
    assert other.find(b"key") is not None


@pytest.mark.parametrize(
    "output", [np.zeros(1000), np.array([b"", 1], object)], ids=["too large", "what no message can carry"]
)
def test_what_cannot_be_kept_is_left_out(output: np.ndarray) -> None:  # type: ignore[type-arg]
    pool = BoundedPool[Tensors](2_000)
    responses = kept_in(pool)
    responses.keep(b"key", [output], [0])
    assert (responses.find(b"key"), pool.used_bytes) == (None, 0)
