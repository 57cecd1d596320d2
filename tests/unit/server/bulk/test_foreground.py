"""What is shown of a running job, and when."""

from __future__ import annotations

import asyncio
import io
import json

import pytest

from paceline.scheduler.testing import ManualClock
from paceline.server.bulk.foreground import Progress
from paceline.server.bulk.tally import Tally
from paceline.server.bulk.values import BadRow
from tests.polling import eventually_async

SECOND_NS = 1_000_000_000


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


async def shown(kind: str, out: io.StringIO) -> str:
    """What `out` has after a job of 4000 rows, of which 1000 were done before and 1500 now, at 500 rows/s."""
    clock, tally = ManualClock(), Tally(doing="running", units=4, rows=4000, planned_share=1)
    tally.units_before, tally.rows_before, tally.rows_bad_before = 1, 1000, 4
    progress = Progress(tally, kind, out, clock.now_ns)
    async with progress:
        for _ in range(3):
            clock.advance(SECOND_NS)
            tally.rows_read += 500
            tally.rows_executed += 498
            tally.add_bad([BadRow(number, "not a number") for number in (7, 8)])
            tally.executions += 20
            tally.elements, tally.filled_elements = tally.elements + 1000, tally.filled_elements + 50
            progress.draw()
    return out.getvalue()


LAST = "running: 2,500 of 4,000 rows (62 %), 500 rows/s, 3 s left, 24.9 rows/batch, 5.0 % padding, 10 bad"


async def test_lines_say_how_far_and_how_fast() -> None:
    lines = (await shown("lines", io.StringIO())).splitlines()
    assert lines[0] == "running: 1,000 of 4,000 rows (25 %), 4 bad"
    assert lines[-1] == LAST
    assert len(lines) == 5


async def test_auto_is_lines_without_a_terminal() -> None:
    assert (await shown("auto", io.StringIO())).splitlines()[-1] == LAST


async def test_auto_is_lines_on_a_terminal_that_can_only_print(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    assert (await shown("auto", Terminal())).splitlines()[-1] == LAST


async def test_auto_is_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    text = await shown("auto", Terminal())
    assert "━" in text
    assert text.endswith("\x1b[?25h")  # the cursor is back
    last = text.rpartition("running")[2]
    assert "2,500 of 4,000 rows (62 %)" in last
    assert "500 rows/s, 3 s left, 24.9 rows/batch, 5.0 % padding, 10 bad" in last


async def test_before_the_plan_only_what_is_done_is_told() -> None:
    out = io.StringIO()
    async with Progress(Tally(doing="trying batch sizes"), "lines", out, ManualClock().now_ns):
        pass
    assert out.getvalue().splitlines()[0] == "trying batch sizes"


async def test_calls_of_one_row_are_no_batches() -> None:
    out = io.StringIO()
    tally = Tally(doing="running", rows=9, planned_share=1, rows_read=3, rows_executed=3, executions=3)
    async with Progress(tally, "lines", out, ManualClock().now_ns):
        pass
    assert out.getvalue().splitlines()[0] == "running: 3 of 9 rows (33 %)"


async def test_bar_of_unknown_length_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    out = Terminal()
    async with Progress(Tally(), "bar", out, ManualClock().now_ns):
        pass
    assert "starting" in out.getvalue()
    assert "━" in out.getvalue()


async def test_json_lines_have_every_number() -> None:
    lines = [json.loads(line) for line in (await shown("json", io.StringIO())).splitlines()]
    assert lines[0]["rows_per_s"] is None
    expected = {
        "doing": "running",
        "waiting": "",
        "elapsed_s": 3.0,
        "rows_done": 2500,
        "rows_total": 4000,
        "rows_are_estimated": False,
        "rows_per_s": 500.0,
        "rows_per_batch": 24.9,
        "padding": 0.05,
        "left_s": 3.0,
        "units": 4,
        "units_before": 1,
        "units_done": 0,
        "rows": 4000,
        "rows_before": 1000,
        "rows_bad_before": 4,
        "rows_read": 1500,
        "rows_written": 0,
        "rows_bad": 6,
        "planned_share": 1,
        "executions": 60,
        "rows_executed": 1494,
        "elements": 3000,
        "filled_elements": 150,
    }
    assert lines[-1] == expected


async def test_why_it_waits_is_told_at_once() -> None:
    out, tally = io.StringIO(), Tally(doing="trying batch sizes")
    async with Progress(tally, "lines", out, ManualClock().now_ns):
        tally.waiting = "server host:1: Connection refused; trying again"
        await eventually_async(lambda: out.getvalue().count("\n") == 2, "a second line")
    assert out.getvalue().splitlines()[1] == f"trying batch sizes: {tally.waiting}"


async def test_none_shows_nothing_at_all() -> None:
    assert await shown("none", Terminal()) == ""


async def test_closed_stderr_shows_nothing() -> None:
    progress = Progress(Tally(), "auto", None, ManualClock().now_ns)
    async with progress:
        progress.draw()


async def test_estimated_total_is_called_so() -> None:
    out = io.StringIO()
    async with Progress(Tally(rows=30, planned_share=0.5), "lines", out, ManualClock().now_ns):
        pass
    assert out.getvalue().splitlines()[0] == "starting: 0 of about 60 rows (0 %)"


async def test_progress_draws_by_itself() -> None:
    out = io.StringIO()
    async with Progress(Tally(), "json", out, ManualClock().now_ns):
        await eventually_async(lambda: out.getvalue().count("\n") == 2, "a second line")


async def test_drawing_ends_when_the_job_fails() -> None:
    out = io.StringIO()
    tasks = asyncio.all_tasks()
    with pytest.raises(ValueError, match="the job's own"):
        async with Progress(Tally(), "lines", out, ManualClock().now_ns):
            raise ValueError("the job's own")
    assert asyncio.all_tasks() == tasks
    assert len(out.getvalue().splitlines()) == 2
