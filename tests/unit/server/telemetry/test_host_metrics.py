"""Metrics of the machine, from files as /proc has them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from paceline.server.telemetry import host_metrics
from paceline.server.telemetry.host_metrics import HostCollector
from tests.polling import eventually

MEMINFO = "MemTotal:       1000 kB\nMemFree:         100 kB\nMemAvailable:    400 kB\n"


def write(proc: Path, cpu: str, meminfo: str = MEMINFO) -> None:
    (proc / "stat").write_text(f"{cpu}\ncpu0 1 1 1 1 1 1 1 1 0 0\nintr 5\n")
    (proc / "meminfo").write_text(meminfo)


def read(collector: HostCollector) -> dict[str, float]:
    return {sample.name: sample.value for metric in collector.collect() for sample in metric.samples}


def test_used_memory_is_what_is_not_available_without_swapping(tmp_path: Path) -> None:
    write(tmp_path, "cpu 1 2 3 4 5 6 7 8 0 0")
    found = read(HostCollector(tmp_path))
    assert found["nv_cpu_memory_total_bytes"] == 1000 * 1024
    assert found["nv_cpu_memory_used_bytes"] == 600 * 1024


def test_utilization_is_the_busy_share_since_the_previous_scrape(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, "cpu 100 0 0 1000 0 0 0 0 0 0")
    collector = HostCollector(tmp_path)
    assert read(collector)["nv_cpu_utilization"] == 0
    # Busy: 10 + 20 + 5 + 3 + 2 + 10 = 50; waiting: 100 idle and 50 for a disk.
    write(tmp_path, "cpu 110 20 5 1100 50 3 2 10 99 99")
    eventually(lambda: read(collector)["nv_cpu_utilization"] == 0.25, "a second scrape a second later")
    monkeypatch.setattr(host_metrics, "_SHORTEST_S", 3600.0)
    write(tmp_path, "cpu 210 20 5 1100 50 3 2 10 99 99")
    assert read(collector)["nv_cpu_utilization"] == 0.25


@pytest.mark.parametrize("cpu", ["", "cpu", "cpu 1 2 3", "cpu a b c d e f g h", "processor 1 2 3 4 5 6 7 8"])
@pytest.mark.parametrize("meminfo", ["", "MemTotal: 5 kB\n", "MemTotal:\n", "MemTotal: x kB\nMemAvailable: 1 kB\n"])
def test_malformed_files_give_no_metrics(tmp_path: Path, cpu: str, meminfo: str) -> None:
    write(tmp_path, cpu, meminfo)
    assert read(HostCollector(tmp_path)) == {}


def test_machine_without_such_files_has_no_metrics(tmp_path: Path) -> None:
    assert read(HostCollector(tmp_path / "nowhere")) == {}


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux")
def test_metrics_of_this_machine_are_plausible() -> None:
    found = read(HostCollector())
    assert 0 <= found["nv_cpu_utilization"] <= 1
    assert 0 < found["nv_cpu_memory_used_bytes"] < found["nv_cpu_memory_total_bytes"]
