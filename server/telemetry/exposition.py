"""Metric families as Prometheus' text format, version 0.0.4, in the spelling that Triton's users expect.

Lives here: the writer. Must not: know any metric. It is ours because the library's appends `_total` to the name of each
counter and writes a million as 1e+06, while scripts made for Triton look for bare names and digits.
Source: prometheus.io/docs/instrumenting/exposition_formats.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping

from prometheus_client.core import Metric

__all__ = ["exposition"]

_LABEL_ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})
_HELP_ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n"})


def exposition(families: Iterable[Metric]) -> str:
    """All of `families`, samples under their own names, labels in alphabetical order, whole numbers as such."""
    return "".join(line for family in families for line in _lines(family))


def _lines(family: Metric) -> Iterator[str]:
    # The library's counters are named without the suffix that their samples bear.
    suffixed = family.type == "counter" and any(sample.name == f"{family.name}_total" for sample in family.samples)
    name = f"{family.name}_total" if suffixed else family.name
    yield f"# HELP {name} {family.documentation.translate(_HELP_ESCAPES)}\n# TYPE {name} {family.type}\n"
    for sample in family.samples:
        yield f"{sample.name}{_labels(sample.labels)} {_number(sample.value)}\n"


def _labels(labels: Mapping[str, str]) -> str:
    pairs = ",".join(f'{name}="{value.translate(_LABEL_ESCAPES)}"' for name, value in sorted(labels.items()))
    return f"{{{pairs}}}" if pairs else ""


def _number(value: float) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return {math.inf: "+Inf", -math.inf: "-Inf"}.get(value, "NaN")
    return str(int(value)) if value == int(value) else repr(value)
