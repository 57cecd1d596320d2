"""The benchmark measures real servers, and fails if something of ours doesn't work."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench import gpu, gpu_models, gpu_plan, gpu_steps, overload
from bench.document import markdown
from bench.gpu_processes import serving
from bench.rounds import Settings
from bench.run import run
from bench.scenario import parse
from bench.steps import BenchError
from bench.summary import Section, load
from paceline.backends.cuda.driver import count_gpus
from paceline.backends.errors import LoadError
from tests import models as tiny_models
from tests.harness import REPO, ServerProcess, write_identity
from tests.lengths import whole_measurement

SHORT = Settings(rounds=2, seconds=0.1, warmup_s=0.2, rivals=False)
TINY = {"server": "paceline", "model": "tiny"}


def scenario(**keys: Any) -> Mapping[str, Any]:
    return {"title": "a title", "clients": 2, "subject": TINY, **keys}


def test_run_measures_product_and_floor_in_every_round() -> None:
    references = [{"server": "kserve"}, {"transport": "stream"}]
    (result,) = run([parse("tiny", scenario(reference=references))], SHORT)
    assert [one.server for one in result.absent] == ["kserve"]
    assert not any(one.failed for one in result.absent.values())
    assert result.generator == "paceline load"
    for (side, _), found in result.series.items():
        assert len(found["requests_per_s"]) == 2, side
        assert min(found["requests_per_s"]) > 0, side


@whole_measurement
def test_open_loop_run_reports_how_many_were_answered_in_time() -> None:
    some = {"title": "t", "rates": [100], "subject": TINY}
    late = {"title": "t", "rates": [100], "deadline_s": 1e-6, "subject": TINY, "reference": [{"measure": "p99_ms"}]}
    result, too_late = run([parse("some", some), parse("late", late)], replace(SHORT, rounds=1))
    ((_, found),) = result.series.items()
    assert result.generator == "paceline load"
    assert max(found["answered"]) <= 1
    ((_, found),) = too_late.series.items()
    assert not too_late.absent
    assert (found["requests_per_s"], found["answered"]) == ([0.0], [0.0])
    assert "p99_ms" not in found


def test_run_of_a_product_that_does_not_start_fails_with_the_reason() -> None:
    (result,) = run([parse("tiny", scenario(subject={**TINY, "args": ["--no-such-flag"]}))], SHORT)
    (absence,) = result.absent.values()
    assert absence.failed
    assert "--no-such-flag" in absence.reason


@whole_measurement
def test_overload_measures_peak_surplus_and_the_time_after() -> None:
    case = overload.Case("few", ("--max-queued-requests=8",), 60.0)
    found = overload.measure(case, 0.5)
    assert list(found) == ["1x", "10x", "after"]
    assert found["10x"].refused > 0
    assert all(one.answered_per_s > 0 and one.too_late == 0 for one in found.values())
    lines = overload.table(case, [found, found]).splitlines()
    assert [line.partition("|")[2].split("|")[0].strip() for line in lines[4:]] == ["1x", "10x", "after"]


@whole_measurement
def test_command_writes_results_and_prints_the_table(tmp_path: Path) -> None:
    out = tmp_path / "results" / "found.json"
    done = command("stacking", "--quick", "--seconds", "0.02", "--out", str(out))
    assert "one memcpy of the same bytes" in done.stdout
    assert done.returncode == 0
    assert json.loads(out.read_text())["scenarios"]["stacking"]["ratios"][0]["ratio"]["median"] > 0


def test_command_with_an_unknown_scenario_lists_the_known_ones(tmp_path: Path) -> None:
    done = command("nope", "--out", str(tmp_path / "found.json"))
    assert done.returncode == 1
    assert "bench: no such scenario: nope; there are: fixed-batch, " in done.stderr
    assert not list(tmp_path.iterdir())


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "bench", *arguments], cwd=REPO, capture_output=True, text=True, timeout=60, check=False
    )


@whole_measurement
@pytest.mark.timeout(240)
def test_gpu_benchmark_on_a_cpu_makes_a_document(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    done = python("bench.gpu", "--device", "cpu", "--quick", "--models", "bert_base_fp32", "--out", str(out))
    assert done.returncode == 0, done.stderr
    found = load(out.read_text())
    kinds = ["gpu-lengths", "gpu-sequences", "gpu-generations"]
    assert [one.name for one in found.sections] == [*kinds, "gpu-correct", "gpu-bert-base-fp32", "gpu-frontends"]
    assert not any(section.absent for section in found.sections)
    assert [one.verdict for one in found.sections[3].comparisons] == ["reached"]
    for section in found.sections[4:5]:
        assert {one.who for one in section.measurements} >= {"paceline", "run_with_iobinding", "paceline at 70 %"}
        assert not any(one.reach for one in section.comparisons)
    assert "rows/s / run_with_iobinding, which waits for each batch" in markdown(found, "figures")


@whole_measurement
def test_gpu_benchmark_whose_server_dies_measures_the_rest(tmp_path: Path) -> None:
    doomed: set[str] = set()

    class Plan(gpu_plan.Plan):
        def check(self) -> None:
            while doomed:
                os.kill(int(doomed.pop()), signal.SIGKILL)

    chosen = [one for one in gpu_models.chosen("cpu", gpu_models.QUICK) if one.name == "resnet50_fp32"]
    before = children()
    sections = gpu.run(Plan("cpu", 1, 0.1, 0.1, 1, 1, 0.0, quick=True), ["models", "frontends"], chosen, tmp_path)
    assert not next(sections).absent
    doomed |= children() - before
    found = last_of(sections)
    assert "UNAVAILABLE" in found["gpu-resnet50-fp32"].absent["resnet50_fp32"]
    assert not found["gpu-frontends"].absent


@whole_measurement
def test_gpu_benchmark_measures_what_it_can_and_says_why_not_the_rest(tmp_path: Path) -> None:
    class Plan(gpu_plan.Plan):
        @property
        def on_gpu(self) -> bool:
            return True

    good = next(one for one in gpu_models.chosen("cpu", gpu_models.QUICK) if one.name == "bert_base_fp32")
    bad = replace(good, name="bad", sizes=(8, 4))  # which isn't how sizes are written
    plan = Plan("cpu", 1, 0.1, 0.1, 1, 1, time.monotonic() + 60, quick=True)
    found = last_of(gpu.run(plan, ["models"], [bad, good], tmp_path))
    assert list(found["gpu-correct"].absent) == ["bad"]
    assert "paceline.batch_sizes" in found["gpu-correct"].absent["bad"]
    assert "see gpu-correct" in found["gpu-bad"].absent["bad"]
    assert re.search("NVIDIA driver|nvidia-ml-py|NVML", found["gpu-bert-base-fp32"].absent["GPU busy"])
    assert {one.who for one in found["gpu-bert-base-fp32"].measurements} >= {"paceline", "run_with_iobinding"}


def test_server_that_does_not_end_is_killed_and_reported(tmp_path: Path) -> None:
    write_identity(tmp_path)
    with pytest.raises(BenchError, match="did not end"), serving(tmp_path, 1, end_s=0.2) as server:
        os.kill(server.pid, signal.SIGSTOP)
    assert server.returncode == -signal.SIGKILL


def last_of(sections: Iterable[Section]) -> Mapping[str, Section]:
    """Each section as it was at last, by name."""
    return {one.name: one for one in sections}


def children() -> set[str]:
    """Processes that this thread has started."""
    return set(Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text().split())


def test_region_of_a_failed_step_is_removed_from_the_server(tmp_path: Path) -> None:
    tiny_models.write(tiny_models.identity("FP32"), tmp_path / "tiny" / "1" / "model.onnx")
    with ServerProcess(tmp_path, args=["--allow-client-shm=true"]) as server:
        for _ in range(2):
            with pytest.raises(BenchError, match="no answer"), gpu_steps.region(server, np.zeros(16, np.float32)):
                raise BenchError("no answer")


def test_region_in_use_has_no_file_that_would_outlive_a_killed_bench(tmp_path: Path) -> None:
    tiny_models.write(tiny_models.identity("FP32"), tmp_path / "tiny" / "1" / "model.onnx")
    server = ServerProcess(tmp_path, args=["--allow-client-shm=true"])
    with server, gpu_steps.region(server, np.zeros(16, np.float32)) as name:
        assert not Path("/dev/shm", name).exists()


def test_gpu_benchmark_without_a_gpu_fails_with_the_reason(tmp_path: Path) -> None:
    if can_use_gpu():
        pytest.skip("there is a GPU")
    out = tmp_path / "x"
    done = python("bench.gpu", "--device", "cuda", "--quick", "--only", "models", "--models", "bert", "--out", str(out))
    assert done.returncode == 1
    assert [list(one.absent) for one in load(out.read_text()).sections] == [["paceline"]]
    assert "paceline did not start" in done.stderr
    assert "no NVIDIA driver" in done.stderr


def can_use_gpu() -> bool:
    try:
        return count_gpus() > 0
    except LoadError:
        return False


def python(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", module, *arguments], cwd=REPO, capture_output=True, text=True, timeout=200, check=False
    )
