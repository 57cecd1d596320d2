"""No decision of the server may depend on a clock that can be set. Delays, deadlines, durations and limits use
monotonic clocks; the time of day is for people to read."""

from __future__ import annotations

import ast

from tests.unit.product_modules import modules, tree

# Where the time of day is shown, and nothing is computed with it.
TIME_OF_DAY_USES = {
    "server.telemetry.model_statistics": {"time.time_ns"},  # `last_inference` of ModelStatistics
    "server.telemetry.log": {"time.gmtime"},  # at the beginning of each line of the log
    "server.telemetry.status": {"time.time", "time.localtime", "time.strftime"},  # in the head of the page
    "server.telemetry.spans": {"time.time_ns"},  # OpenTelemetry's spans have the time of day
    "clients.top": {"time.strftime"},  # in the corner of the screen
    "server.bulk.durable": {"time.gmtime", "time.strftime"},  # since when somebody else does a shard
}
MONOTONIC = {
    *("time.monotonic", "time.monotonic_ns", "time.perf_counter", "time.perf_counter_ns"),
    *("time.thread_time", "time.thread_time_ns"),
}
HARMLESS = {"time.sleep", "time.process_time", "time.process_time_ns"}


def clocks(module: str) -> set[str]:
    """What `module` uses of `time`, and what it imports of `datetime`."""
    nodes = list(ast.walk(tree(module)))
    used = {
        f"time.{node.attr}"
        for node in nodes
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "time"
    }
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module in ("time", "datetime"):
            used |= {f"{node.module}.{alias.name}" for alias in node.names}
        if isinstance(node, ast.Import):
            used |= {alias.name for alias in node.names if alias.name == "datetime"}
    return used


def test_each_module_uses_only_monotonic_clocks_unless_listed() -> None:
    used = {module: others for module in modules() if (others := clocks(module) - MONOTONIC - HARMLESS)}
    assert used == TIME_OF_DAY_USES


def test_clocks_are_found_at_all() -> None:
    assert "time.monotonic_ns" in clocks("scheduler.clock")
    assert "time.gmtime" in clocks("server.telemetry.log")
