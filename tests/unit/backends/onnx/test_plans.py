"""Sizes for which ONNX Runtime's convolutions can't be trusted."""

from __future__ import annotations

import pytest

from paceline.backends.errors import ExecutionError, InstanceLost, OutOfMemory, StalePlan
from paceline.backends.onnx.failures import Plans

NODE = "onnx runtime error 1: Non-zero status code returned while running {} node. Name:'{}' Status Message: why"


@pytest.mark.parametrize("operator", ["Conv", "FusedConv", "NhwcConv", "ConvTranspose"])
@pytest.mark.parametrize("kind", [ExecutionError, OutOfMemory])
def test_size_for_which_a_convolution_failed_is_refused(operator: str, kind: type[ExecutionError]) -> None:
    plans = Plans()
    plans.failed(kind(NODE.format(operator, "c")), 4)
    with pytest.raises(InstanceLost, match=r"would compute with an outdated plan: onnx runtime error 1: .* why"):
        plans.check(4)
    plans.check(5)


def test_failures_of_other_operators_do_not_affect_plans() -> None:
    plans = Plans()
    for operator in ("Gather", "MatMul"):
        plans.failed(ExecutionError(NODE.format(operator, "c")), 4)
    plans.failed(ExecutionError("Conv is what the model is called"), 4)
    plans.check(4)


def in_node(name: str) -> ExecutionError:
    return ExecutionError(NODE.format("Conv", name))


def test_sizes_are_trusted_again_after_an_execution_with_another() -> None:
    plans = Plans()
    plans.failed(in_node("first"), 4)
    plans.failed(in_node("second"), 5, (5, 3))
    assert plans.next_rows(4) == 6
    plans.executed()
    plans.check(4)
    plans.check((5, 3))
    assert plans.next_rows(4) == 4


def test_size_is_trusted_again_once_its_convolution_has_failed_for_another() -> None:
    plans = Plans()
    for rows in range(1, 100):
        plans.failed(in_node("first"), rows)
    assert [plans.next_rows(98), plans.next_rows(99)] == [98, 100]


def test_each_failure_of_a_convolution_without_a_name_counts_as_another_one() -> None:
    plans = Plans()
    for rows in (1, 2):
        plans.failed(in_node(""), rows)
        plans.failed(ExecutionError("Error in execution: running Conv node. Status Message: why"), 2 + rows)
    assert plans.next_rows(1) == 5


def test_session_that_only_fails_is_given_up() -> None:
    plans = Plans()
    for rows in range(1, 9):
        plans.failed(in_node(f"node{rows}"), rows)
    assert plans.next_rows(1) == 9
    plans.failed(in_node("another"), 9)
    with pytest.raises(StalePlan):
        plans.next_rows(1)
