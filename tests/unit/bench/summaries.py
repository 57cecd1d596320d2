"""A small summary for tests of the code that uses summaries."""

from __future__ import annotations

from bench.scenario import parse_reach
from bench.stats import Spread, spread
from bench.summary import Comparison, Measurement, Section, Summary

MACHINE = {
    "processor": "a processor",
    "cores": 2,
    "system": "a system",
    "load_before": 0.1,
    "python": "3",
    "python_step_ns": 1_234,
    "versions": {"grpcio": "1"},
    "protobuf_implementation": "upb",
}


def section(name: str = "unary", *, ratio: float = 0.95, plot: bool = False) -> Section:
    return Section(
        name=name,
        title="A tiny model",
        generator="bench.load",
        how="3 rounds of 1 s each, 0.5 s of warm-up before",
        plot=plot,
        comparisons=(
            Comparison("64 clients", "requests/s / echo", spread([ratio, 0.5, 0.99]), parse_reach(">= 0.9")),
            Comparison("64 clients", "requests/s / a rival", None, parse_reach(">= 1"), "not installed"),
            Comparison("64 clients", "CPU / echo", spread([1.5, 2.0, 1.75]), None),
        ),
        measurements=(
            Measurement("paceline", "1 client", _values(100.0)),
            Measurement("paceline", "64 clients", {**_values(950.0), "rows_per_batch": spread([31.0, 32.0, 33.0])}),
            Measurement("echo", "64 clients", _values(1_000.0)),
        ),
        absent={"a rival": "not installed"},
    )


def summary(*sections: Section) -> Summary:
    return Summary(MACHINE, sections or (section(),))


def _values(rate: float) -> dict[str, Spread]:
    times = {f"p{percent}_ms": spread([percent / 10] * 3) for percent in (50, 90, 99)}
    return {"requests_per_s": spread([rate - 1, rate, rate + 1]), **times}
