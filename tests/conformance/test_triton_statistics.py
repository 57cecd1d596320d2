"""Statistics as NVIDIA's clients and tools read them: perf_analyzer's windows, Triton's own checks of the metrics."""

from __future__ import annotations

import asyncio
import re
import urllib.request
from typing import Any

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from tests.conformance import zoo
from tests.conformance.triton import Triton, tensors
from tests.harness import ServerProcess

DURATIONS = ("success", "queue", "compute_input", "compute_infer", "compute_output")


def rows(count: int) -> Any:
    return tensors({name: np.ones((count, 16), np.int32) for name in ("INPUT0", "INPUT1")})


async def window(triton: Triton, model: str) -> Any:
    (one,) = (await triton.get_inference_statistics(model)).model_stats
    return one


async def test_statistics_extension_is_advertised_to_perf_analyzer(triton: Triton) -> None:
    assert "statistics" in (await triton.get_server_metadata()).extensions


@pytest.mark.parametrize("version", ["", "1"])
async def test_statistics_of_one_model_name_it_and_its_version(triton: Triton, version: str) -> None:
    (one,) = (await triton.get_inference_statistics("simple_fp64", version)).model_stats
    assert (one.name, one.version) == ("simple_fp64", "1")


async def test_statistics_without_a_name_cover_every_model(triton: Triton) -> None:
    found = [(one.name, one.version) for one in (await triton.get_inference_statistics()).model_stats]
    assert found == sorted(found)
    assert {("simple", "1"), ("mlp", "1"), ("patient", "1")} <= set(found)
    assert len(found) == len(zoo.SIMPLE) + len(zoo.DATATYPES) + 12


async def test_statistics_as_json_have_64_bit_numbers_as_strings(triton: Triton) -> None:
    await triton.infer("counted", tensors({name: np.ones((2, 16), np.int64) for name in ("INPUT0", "INPUT1")}))
    (one,) = (await triton.get_inference_statistics("counted", as_json=True))["model_stats"]
    assert int(one["inference_count"]) == 2 * int(one["execution_count"])
    assert int(one["inference_stats"]["success"]["count"]) == int(one["execution_count"])
    assert [batch["batch_size"] for batch in one["batch_stats"]] == ["2"]


async def test_statistics_of_a_window_match_the_requests_sent_in_it(triton: Triton) -> None:
    """As perf_analyzer does: query, send, query, and divide the difference of the times by the difference of the
    counts."""
    before = await window(triton, "simple")
    await asyncio.gather(*(triton.infer("simple", rows(1 + number % 3)) for number in range(30)))
    after = await window(triton, "simple")
    assert after.inference_count - before.inference_count == 10 * (1 + 2 + 3)
    batches = after.execution_count - before.execution_count
    assert 1 <= batches <= 30
    assert sum(batch.compute_infer.count for batch in after.batch_stats) == after.execution_count
    assert sum(batch.compute_infer.count * batch.batch_size for batch in after.batch_stats) == after.inference_count
    averages_ns = {}
    for name in DURATIONS:
        one, other = getattr(before.inference_stats, name), getattr(after.inference_stats, name)
        assert other.count - one.count == 30
        averages_ns[name] = (other.ns - one.ns) / 30
    assert 0 < sum(averages_ns[name] for name in DURATIONS[1:]) < averages_ns["success"]
    assert (after.inference_stats.cache_hit.count, after.inference_stats.cache_miss.count) == (0, 0)
    assert after.last_inference >= before.last_inference


@pytest.mark.parametrize(("model", "version", "status"), [("nosuch", "", "NOT_FOUND"), ("simple", "9", "NOT_FOUND")])
async def test_statistics_of_an_unknown_model_or_version_are_refused(
    triton: Triton, model: str, version: str, status: str
) -> None:
    with pytest.raises(InferenceServerException, match=f"'{model}'") as raised:
        await triton.get_inference_statistics(model, version)
    assert raised.value.status() == f"StatusCode.{status}"


async def test_metrics_match_the_patterns_of_tritons_tests(triton: Triton, server: ServerProcess) -> None:
    """Their scripts expect the labels in this order, and digits right after them."""
    with pytest.raises(InferenceServerException):
        await triton.infer("product", rows(1))
    url = f"http://127.0.0.1:{server.metrics_port}/metrics"
    with await asyncio.to_thread(urllib.request.urlopen, url, timeout=60) as response:
        text = response.read().decode()
    found = re.search(r'nv_inference_request_failure\{model="product",reason="OTHER",version="1"\} (\d+)\n', text)
    assert found
    assert int(found[1]) >= 1
    counters = re.findall(r'^(nv_inference_\w+)\{model="mlp",(?:reason="\w+",)?version="1"\} \d+$', text, re.MULTILINE)
    assert len(counters) == 8 + 4 + 1
