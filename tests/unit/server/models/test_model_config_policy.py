"""From `dynamic_batching` in the user's units to the batcher's policy in rows and nanoseconds."""

from __future__ import annotations

import pytest
from google.protobuf import text_format

from paceline.backends.spec import ModelSpec, TensorSpec
from paceline.protos import model_config_pb2 as pb
from paceline.scheduler.policy import BatchPolicy, QueuePolicy
from paceline.server.errors import ConfigError
from paceline.server.models.model_config import plan

OWN = ModelSpec((TensorSpec("a", "FP32", (-1, 2)),), (TensorSpec("x", "FP32", (-1, 2)),))
FIXED = ModelSpec((TensorSpec("a", "FP32", (2,)),), (TensorSpec("x", "FP32", (2,)),))


def policy(batching: str, own: ModelSpec = OWN, rows: int = 8) -> BatchPolicy:
    text = f"max_batch_size: {rows} dynamic_batching {{ {batching} }}"
    return plan(text_format.Parse(text, pb.ModelConfig()), own).policy


def test_policy_of_empty_dynamic_batching_is_greedy_without_bounds() -> None:
    assert policy("") == BatchPolicy(max_batch_rows=8, grows_always=False)


@pytest.mark.parametrize(("us", "ns"), [(0, 0), (1, 1_000), (100_000, 100_000_000), (2**64 - 1, (2**64 - 1) * 1_000)])
def test_policy_delay_is_given_in_microseconds_and_kept_in_nanoseconds(us: int, ns: int) -> None:
    assert policy(f"max_queue_delay_microseconds: {us}").max_queue_delay_ns == ns


def test_policy_preferred_sizes_are_kept() -> None:
    made = policy("preferred_batch_size: [ 6, 2 ]")
    assert made.preferred_batch_rows == (6, 2)
    assert made.preferred == {2, 6}


def test_policy_without_preferred_sizes_prefers_the_largest_batch() -> None:
    assert policy("").preferred == {8}


@pytest.mark.parametrize("size", [0, -1, 9])
def test_policy_preferred_size_out_of_range_is_refused_in_the_users_terms(size: int) -> None:
    with pytest.raises(ConfigError) as caught:
        policy(f"preferred_batch_size: [ 4, {size} ]")
    assert str(caught.value) == (f"dynamic_batching.preferred_batch_size: expected 1 to max_batch_size, 8, got {size}")


def test_policy_preferred_size_of_a_model_without_batch_axis_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        policy("preferred_batch_size: [ 2 ]", FIXED, rows=0)
    assert str(caught.value) == (
        "dynamic_batching.preferred_batch_size: expected none, as the model has no batch axis "
        "(max_batch_size 0), got [2]"
    )


@pytest.mark.parametrize(("own", "rows"), [(OWN, 8), (FIXED, 0)], ids=["batched", "not batched"])
def test_policy_queue_bounds_hold_with_and_without_a_batch_axis(own: ModelSpec, rows: int) -> None:
    queue = "max_queue_size: 5 default_timeout_microseconds: 250 allow_timeout_override: true"
    assert policy(f"default_queue_policy {{ {queue} }}", own, rows).queue == QueuePolicy(
        max_queue_size=5, default_timeout_ns=250_000, allow_timeout_override=True
    )


def test_policy_queue_bounds_at_their_limits_are_accepted() -> None:
    queue = f"max_queue_size: {2**32 - 1} default_timeout_microseconds: {2**64 - 1}"
    made = policy(f"default_queue_policy {{ {queue} }}").queue
    assert (made.max_queue_size, made.default_timeout_ns) == (2**32 - 1, (2**64 - 1) * 1_000)
