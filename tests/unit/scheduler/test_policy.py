"""Which policies are valid, and the queue timeout that follows for one request."""

from __future__ import annotations

import pytest

from paceline.scheduler.policy import NEVER, BatchPolicy, PolicyError, QueuePolicy


@pytest.mark.parametrize(
    "fields",
    [
        {"max_batch_rows": 0},
        {"max_queue_delay_ns": -1},
        {"max_batch_requests": -1},
        {"max_batch_rows": 4, "preferred_batch_rows": (5,)},
        {"max_batch_rows": 4, "preferred_batch_rows": (0,)},
    ],
)
def test_invalid_policy_is_refused_naming_the_field(fields: dict[str, object]) -> None:
    with pytest.raises(PolicyError, match=list(fields)[-1]):
        BatchPolicy(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("fields", [{"max_queue_size": -1}, {"default_timeout_ns": -1}])
def test_queue_policy_with_a_negative_bound_is_refused_naming_the_field(fields: dict[str, int]) -> None:
    with pytest.raises(PolicyError, match=next(iter(fields))):
        QueuePolicy(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("policy", "timeout_ns", "expected"),
    [
        (QueuePolicy(), 0, NEVER),
        (QueuePolicy(), 5, NEVER),
        (QueuePolicy(allow_timeout_override=True), 5, 1_005),
        (QueuePolicy(default_timeout_ns=50), 5, 1_050),
        (QueuePolicy(default_timeout_ns=50, allow_timeout_override=True), 5, 1_005),
        (QueuePolicy(default_timeout_ns=50, allow_timeout_override=True), 500, 1_050),
    ],
)
def test_queue_timeout_is_the_shorter_of_the_policys_and_an_allowed_override(
    policy: QueuePolicy, timeout_ns: int, expected: int
) -> None:
    assert policy.timeout_at_ns(1_000, timeout_ns) == expected
