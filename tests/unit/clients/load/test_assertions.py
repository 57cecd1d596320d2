from __future__ import annotations

import pytest

from paceline.clients.load.assertions import AssertionSyntaxError, parse_assertion


@pytest.mark.parametrize(
    ("text", "name", "bound"),
    [
        ("p99<20ms", "p99", 20e6),
        (" p99.9 <= 1.5 s ", "p99.9", 1.5e9),
        ("first.p50<300us", "first.p50", 300e3),
        ("throughput>500", "throughput", 500),
        ("throughput>=5e2/s", "throughput", 500),
        ("error_rate<1%", "error_rate", 0.01),
        ("errors==0", "errors", 0),
        ("cpu<200us", "cpu", 200e3),
        ("stable!=0", "stable", 0),
    ],
)
def test_assertion_is_a_figure_and_a_bound(text: str, name: str, bound: float) -> None:
    found = parse_assertion(text)
    assert (found.name, found.bound) == (name, pytest.approx(bound))


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("p99", "expected a figure"),
        ("p99=20ms", "expected a figure"),
        ("p99<20", "expected a time with its unit"),
        ("p99<20 minutes", "expected a time with its unit"),
        ("p101<1s", "no figure 'p101'"),
        ("speed>1", "no figure 'speed'; there are"),
        ("errors<1%", "errors has no unit '%'"),
        ("throughput>1.2.3", "expected a number"),
        ("throughput>5ms", "throughput has no unit 'ms'"),
    ],
)
def test_assertion_that_is_none_is_refused(text: str, fault: str) -> None:
    with pytest.raises(AssertionSyntaxError, match=fault):
        parse_assertion(text)


@pytest.mark.parametrize(
    ("comparison", "holding"),
    [("<", [1.0]), ("<=", [1.0, 2.0]), (">", [3.0]), (">=", [2.0, 3.0]), ("==", [2.0]), ("!=", [1.0, 3.0])],
)
def test_assertion_holds_as_its_comparison_says(comparison: str, holding: list[float]) -> None:
    assertion = parse_assertion(f"errors{comparison}2")
    assert [value for value in (1.0, 2.0, 3.0) if assertion.holds(value)] == holding


def test_assertion_about_a_figure_that_there_is_none_of_fails() -> None:
    assert not parse_assertion("p99!=5ms").holds(None)
