from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from paceline.clients.plots import Axis, bars, dots, lines


def numbers(text: str) -> list[float]:
    return [float(one) for one in re.findall(r"-?\d+(?:\.\d+)?", text)]


def test_lines_stay_within_the_drawing() -> None:
    drawn = lines("t", Axis("x"), Axis("y"), {"a": [(0, 1), (5, 100)], "b": [(2, -3)]}, band=(-5, 50))
    root = ElementTree.fromstring(drawn)
    points = [numbers(one.get("points", "")) for one in root.iter("polyline")]
    assert len(points) == 2
    assert all(64 <= x <= 544 and 52 <= y <= 232 for one in points for x, y in zip(one[::2], one[1::2], strict=True))


@pytest.mark.parametrize("values", [[(0.0, 0.0)], [(3.0, 7.0)] * 2, [(0.0, 1e-9), (1.0, 1e12)]])
@pytest.mark.parametrize("is_log", [False, True])
def test_lines_of_any_numbers_are_drawn(values: list[tuple[float, float]], is_log: bool) -> None:
    ElementTree.fromstring(lines("t", Axis("x"), Axis("y", is_log=is_log), {"a": values}))


def test_ticks_are_round_numbers() -> None:
    drawn = lines("t", Axis("x"), Axis("y"), {"a": [(0, 0), (97, 0.37)]})
    texts = [one.text for one in ElementTree.fromstring(drawn).iter("text")]
    assert [text for text in texts if text and text[0].isdigit()] == [
        "0",
        "0.1",
        "0.2",
        "0.3",
        "0",
        "20",
        "40",
        "60",
        "80",
    ]


def test_bars_have_names_and_heights_in_proportion() -> None:
    root = ElementTree.fromstring(bars("t", Axis("rows"), Axis("batches"), {"1": 10.0, "2 <": 5.0}))
    heights = [float(one.get("height", "")) for one in root.iter("rect")]
    assert heights[0] == pytest.approx(2 * heights[1])
    assert "2 <" in [one.text for one in root.iter("text")]


def test_marked_dots_have_names_that_do_not_overlap() -> None:
    marked = {"now <": (1.0, 2.0), "chosen": (1.0, 2.001)}
    root = ElementTree.fromstring(
        dots("t", Axis("x"), Axis("ms", is_log=True), {"a": [(1, 2), (9, 4)]}, marked, level=("bound", 3.0))
    )
    assert len(list(root.iter("circle"))) == 4
    tops = {one.text: float(one.get("y", "")) for one in root.iter("text")}
    assert abs(tops["now <"] - tops["chosen"]) >= 16
    assert {"bound", "2", "3", "4"} <= tops.keys()


def test_plots_without_values_say_so() -> None:
    x, y = Axis("x"), Axis("y")
    for drawn in (bars("t", x, y, {}), lines("t", x, y, {"a": []}), dots("t", x, y, {}, {})):
        assert "nothing to show" in drawn
