"""The outcome of a load as text for people and as a JSON object for programs.

Lives here: pure formatting. Must not: figures. Times are in milliseconds, and names in JSON say so.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from paceline.clients.load.assertions import Assertion
from paceline.clients.load.histogram import Histogram, Interval
from paceline.clients.load.outcome import PERCENTS, Outcome
from paceline.clients.options import one_line

_LONGEST_REASON: Final = 300
"""Characters of what a server said that the text has."""

Verdict = tuple[Assertion, float | None]
"""An assertion, and the value of its figure."""


def written_time(ns: float | None) -> str:
    """Three digits with a unit."""
    if ns is None:
        return "-"
    unit, size = next(((unit, size) for unit, size in (("s", 1e9), ("ms", 1e6)) if ns >= 0.9995 * size), ("us", 1e3))
    value = ns / size
    return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f} {unit}"


def written_reason(said: str) -> str:
    """What a server said, on one line that isn't too long."""
    reason = one_line(said)
    return reason if len(reason) <= _LONGEST_REASON else reason[:_LONGEST_REASON] + "…"


def outcome_text(outcome: Outcome, heading: str, verdicts: Sequence[Verdict] = ()) -> str:
    """A few lines: what was sent, how fast answers came, what failed, the server's own figures, the generator's; which
    assertions hold."""
    total, measured = outcome.total, outcome.measured
    rows = [
        ("measured", _measured(outcome)),
        ("throughput", _with_interval(f"{total.answered / measured.seconds:.1f} requests/s", outcome)),
        ("latency", _times(total.latencies)),
    ]
    intervals = [
        f"p{percent:g} {written_time(one[0])} to {written_time(one[1])}"
        for percent, one in outcome.latency_intervals.items()
        if one is not None
    ]
    if intervals:
        rows.append(("", f"95 %: {'  '.join(intervals)}"))
    if outcome.has_many_answers:
        what = "tokens" if total.tokens else "answers"
        rows.append(("first answer", _times(total.first)))
        rows.append((f"per {what.removesuffix('s')}", _times(total.gaps)))
        rows.append((what, f"{outcome.value('tokens'):.1f}/s"))
    rows.append(("errors", f"{total.failed} of {total.due} requests"))
    for status, durations in total.errors.items():
        after = written_time(durations.percentile_ns(50))
        rows.append(("", f"{status} {durations.count}, after {after}: {written_reason(total.reasons[status])}"))
    rows.append(("server", _served(outcome)))
    rows.append(("generator", _generator(outcome)))
    rows += [("caution", doubt) for doubt in outcome.doubts()]
    lines = [heading, "", *(f"{name:<14}{text}".rstrip() for name, text in rows)]
    return "\n".join([*lines, *([""] if verdicts else []), *map(_verdict_line, verdicts)])


def _measured(outcome: Outcome) -> str:
    measured = outcome.measured
    stable = {None: "", True: ", the last three windows, which agree", False: ", windows that don't agree"}
    return f"{outcome.total.due} requests in {measured.seconds:.3g} s{stable[measured.period.is_stable]}"


def _with_interval(text: str, outcome: Outcome) -> str:
    found = outcome.throughput_interval
    return text if found is None else f"{text}  ({found[0]:.1f} to {found[1]:.1f})"


def _times(histogram: Histogram) -> str:
    if not histogram.count:
        return "-"
    parts = [f"p{percent:g} {written_time(histogram.percentile_ns(percent))}" for percent in PERCENTS]
    return "  ".join([f"mean {written_time(histogram.mean_ns)}", *parts, f"max {written_time(histogram.longest_ns)}"])


def _served(outcome: Outcome) -> str:
    served = outcome.served
    if served is None:
        return "tells no statistics"
    parts = [f"{written_time(mean * 1e6)} {name.replace('_', ' ')}" for name, mean in served.means_ms.items() if mean]
    if served.rows_per_batch is not None:
        parts.append(f"{served.rows_per_batch:.2f} rows per batch")
    parts.append(f"{served.batches} batches")
    return ", ".join(parts)


def _generator(outcome: Outcome) -> str:
    parts = []
    if outcome.is_open:
        lags = [f"p{percent:g} {written_time(outcome.total.lags.percentile_ns(percent))}" for percent in (50, 99)]
        parts.append(f"sent late by {'  '.join(lags)}")
    parts.append(f"{written_time(outcome.value('cpu'))} of processor time per request")
    parts.append(f"{outcome.cores:.2f} of {outcome.processes} core{'s' if outcome.processes > 1 else ''}")
    return ", ".join(parts)


def _verdict_line(verdict: Verdict) -> str:
    assertion, value = verdict
    if value is None:
        got = "none"
    elif assertion.is_duration:
        got = written_time(value)
    else:
        got = f"{100 * value:.4g}%" if assertion.is_percent else f"{value:.6g}"
    return f"{'holds' if assertion.holds(value) else 'FAILS'}  {assertion.text}  (got {got})"


def outcome_json(outcome: Outcome, about: Mapping[str, Any], verdicts: Sequence[Verdict]) -> str:
    """Everything that is known; what there is none of is null."""
    total, measured = outcome.total, outcome.measured
    served = outcome.served
    document = {
        **about,
        "seconds": measured.seconds,
        "stable": measured.period.is_stable,
        "requests": total.due,
        "throughput_per_s": total.answered / measured.seconds,
        "throughput_interval_per_s": outcome.throughput_interval,
        "offered_per_s": total.due / measured.seconds,
        "latency_ms": _times_ms(total.latencies),
        "latency_intervals_ms": {
            f"p{percent:g}": _interval_ms(one) for percent, one in outcome.latency_intervals.items()
        },
        "first_answer_ms": _times_ms(total.first) if outcome.has_many_answers else None,
        "per_token_ms": _times_ms(total.gaps) if outcome.has_many_answers else None,
        "tokens_per_s": outcome.value("tokens") if outcome.has_many_answers else None,
        "errors": {
            status: {"count": one.count, "reason": total.reasons.get(status, ""), "duration_ms": _times_ms(one)}
            for status, one in total.errors.items()
        },
        "server": served
        and {
            "succeeded": served.succeeded,
            "failed": served.failed,
            "rows": served.rows,
            "batches": served.batches,
            "rows_per_batch": served.rows_per_batch,
            "means_ms": dict(served.means_ms),
            "batches_by_rows": {str(rows): count for rows, count in served.executions.items()},
        },
        "generator": {
            "processes": outcome.processes,
            "lag_ms": _times_ms(total.lags) if outcome.is_open else None,
            "cpu_us_per_request": total.cpu_ns / total.due / 1e3 if total.due else None,
            "cores": outcome.cores,
        },
        "doubts": list(outcome.doubts()),
        "assertions": [{"text": assertion.text, "holds": assertion.holds(value)} for assertion, value in verdicts],
    }
    return json.dumps(document)


def _times_ms(histogram: Histogram) -> dict[str, float] | None:
    if not histogram.count:
        return None
    percentiles = {f"p{percent:g}": (histogram.percentile_ns(percent) or 0.0) / 1e6 for percent in PERCENTS}
    return {"mean": (histogram.mean_ns or 0.0) / 1e6, **percentiles, "max": histogram.longest_ns / 1e6}


def _interval_ms(interval: Interval | None) -> list[float] | None:
    return None if interval is None else [bound / 1e6 for bound in interval]
