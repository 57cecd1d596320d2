"""The same requests to both servers: what their statistics and metrics count."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from paceline.protos import inference_pb2 as pb
from paceline.protos.inference_pb2_grpc import GRPCInferenceServiceStub
from tests.differential.comparing import Call, answer_of
from tests.differential.messages import floats, infer, load, unload, wanting
from tests.differential.pair import Both, One
from tests.polling import eventually

_SAMPLE = re.compile(r"^nv_inference_(\w+?)\{(.*)\} (\d+)$")
_PARTS = ("queue", "compute_input", "compute_infer", "compute_output")

GOOD, TWO = {"INPUT0": floats(1, 4)}, {"INPUT0": floats(2, 4)}
BAD = {"INPUT0": -np.ones((3, 4), np.float32)}


@dataclass(frozen=True, slots=True)
class Series:
    """Requests to model `fails`, one after the other; `counts` is what both servers count, `triton` and `here` what
    only one of them does."""

    what: str
    requests: Sequence[pb.ModelInferRequest]
    counts: Mapping[str, int]
    triton: Mapping[str, int] = field(default_factory=dict)
    here: Mapping[str, int] = field(default_factory=dict)


def counted(requests: int, **rows: int) -> dict[str, int]:
    """The counts of so many answered requests of one batch each; `b1=2` are two batches of one row."""
    batches = {f"batches of {name[1:]}": count for name, count in rows.items()}
    total = sum(int(name[1:]) * count for name, count in rows.items())
    parts = dict.fromkeys(("success", *_PARTS), requests)
    metrics = {"nv_request_success": requests, "nv_count": total, "nv_exec_count": requests}
    return {"rows": total, "executions": requests, **parts, **batches, **metrics}


def refused(requests: int, reason: str) -> dict[str, int]:
    return {"fail": requests, f"nv_request_failure {reason}": requests}


FAILED = {**refused(2, "BACKEND")}
SERIES = [
    Series("answered", [infer("fails", GOOD)] * 3 + [infer("fails", TWO)], counted(4, b1=3, b2=1)),
    Series("the model raises", [infer("fails", BAD), infer("fails", BAD)], FAILED,
           triton={"executions": 2, "batches of 3": 2, "nv_exec_count": 2}),
    Series("refused", [infer("fails", {"INPUT0": floats(1, 3)}), infer("fails"), infer("fails", {"X": floats(1, 4)})],
           {}, here=refused(3, "OTHER")),
    Series("refused by version", [infer("fails", GOOD, version="9")], {}),
    Series("an output that isn't", [wanting(infer("fails", GOOD), "OUTPUT9")], {}, here=refused(1, "OTHER")),
]  # fmt: skip


def counts(one: One, model: str) -> Counter[str]:
    """All that statistics and metrics count for `model`, each under a unique name."""
    stub = GRPCInferenceServiceStub(one.channel)  # type: ignore[no-untyped-call]
    (told,) = stub.ModelStatistics(pb.ModelStatisticsRequest(name=model), timeout=20).model_stats
    found = Counter({"rows": told.inference_count, "executions": told.execution_count})
    for name in ("success", "fail", *_PARTS):
        found[name] = getattr(told.inference_stats, name).count
    found.update({f"batches of {batch.batch_size}": batch.compute_infer.count for batch in told.batch_stats})
    for line in one.exposition().splitlines():
        if (sample := _SAMPLE.match(line)) and f'model="{model}"' in sample[2] and "duration" not in sample[1]:
            reason = re.search(r'reason="(\w+)"', sample[2])
            found[f"nv_{sample[1]}{' ' + reason[1] if reason else ''}"] += int(sample[3])
    return found


@pytest.mark.parametrize("series", SERIES, ids=lambda series: series.what)
def test_counts_of_requests(series: Series, both: Both) -> None:
    for one, own in ((both.triton, series.triton), (both.here, series.here)):
        before, expected = counts(one, "fails"), {**series.counts, **own}
        for request in series.requests:
            answer_of(one.channel, Call("", request))
        # Triton counts a moment after it has answered.
        eventually(
            lambda one=one, before=before, expected=expected: counts(one, "fails") - before == Counter(expected),
            f"{expected}, got {counts(one, 'fails') - before}",
        )


def families(one: One) -> dict[str, tuple[str, ...]]:
    """Label names by metric name, for metrics with Triton's prefix."""
    found = {}
    for line in one.exposition().splitlines():
        if line.startswith("nv_"):
            name, _, labels = line.rpartition(" ")[0].partition("{")
            found[name] = tuple(label.partition("=")[0] for label in labels.rstrip("}").split(",") if label)
    return found


def test_metrics_have_tritons_names_and_labels(both: Both) -> None:
    triton, here = families(both.triton), families(both.here)
    own = {"nv_model_load_duration_secs"}
    """Triton has it since a later version."""
    assert set(here) == own | set(triton) - {"nv_pinned_memory_pool_total_bytes", "nv_pinned_memory_pool_used_bytes"}
    assert {name: here[name] for name in set(here) & set(triton)} == {
        name: triton[name] for name in here if name in triton
    }


def test_statistics_restart_with_a_load_and_metrics_with_a_load_after_an_unload(both: Both) -> None:
    name = "serial"
    for one in (both.triton, both.here):
        answer_of(one.channel, Call("", infer(name, GOOD)))
        eventually(lambda one=one: counts(one, name)["nv_count"] == 1, "the answer counted")
        os.utime(one.repository / name / "config.pbtxt")
        assert answer_of(one.channel, Call("", load(name))).status == "OK"
        after = counts(one, name)
        assert (after["success"], after["rows"], after["nv_count"]) == (0, 0, 1)
        assert answer_of(one.channel, Call("", unload(name))).status == "OK"
        series = f'nv_inference_count{{model="{name}"'
        eventually(lambda one=one, series=series: series not in one.exposition(), "no series")
        assert answer_of(one.channel, Call("", load(name))).status == "OK"
        assert counts(one, name)["nv_count"] == 0
