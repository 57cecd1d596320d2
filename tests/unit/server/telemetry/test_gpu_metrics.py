"""Metrics of GPUs. An object with the functions of NVIDIA's management library replaces it, except where its own
refusal to work without a driver is tested, and on a real GPU."""

from __future__ import annotations

import importlib
import threading
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.backends.cuda.driver import count_gpus
from paceline.backends.errors import DeviceError, LoadError
from paceline.server.telemetry.gpu_metrics import GpuCollector, GpuReading, Nvml, open_nvml
from paceline.server.telemetry.metrics import Metrics
from tests.polling import eventually
from tests.rlimits import without_threads

FIRST, SECOND = "GPU-00000000-0000-0000-0000-000000000001", "GPU-00000000-0000-0000-0000-000000000002"


class NVMLError(Exception):
    """Like the library's."""


@dataclass
class Library:
    """Answers as NVML does, with memory and energy proportional to `scale`. GPUs in `lost` refuse every question, all
    GPUs those in `lacks`."""

    known: tuple[str, ...] = (FIRST, SECOND)
    scale: int = 1
    lost: set[str] = field(default_factory=set)
    lacks: set[str] = field(default_factory=set)
    NVMLError: type[Exception] = NVMLError
    starts: bool = True

    def nvmlInit(self) -> None:
        if not self.starts:
            raise NVMLError("Driver/library version mismatch")

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid not in self.known:
            raise NVMLError("Not Found")
        return uuid

    def _answer(self, question: str, uuid: str, value: Any) -> Any:
        if uuid in self.lost or question in self.lacks:
            raise NVMLError("GPU is lost")
        return value

    def nvmlDeviceGetMemoryInfo(self, uuid: str) -> Any:
        return self._answer("memory", uuid, SimpleNamespace(total=1000 * self.scale, used=600 * self.scale))

    def nvmlDeviceGetUtilizationRates(self, uuid: str) -> Any:
        return self._answer("utilization", uuid, SimpleNamespace(gpu=75, memory=3))

    def nvmlDeviceGetPowerUsage(self, uuid: str) -> Any:
        return self._answer("power", uuid, 123_500)

    def nvmlDeviceGetPowerManagementLimit(self, uuid: str) -> Any:
        return self._answer("limit", uuid, 700_000)

    def nvmlDeviceGetTotalEnergyConsumption(self, uuid: str) -> Any:
        return self._answer("energy", uuid, 5_000_000 * self.scale)


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def shown(collector: GpuCollector) -> dict[tuple[str, str], float]:
    return {
        (sample.name, sample.labels["gpu_uuid"]): sample.value
        for metric in collector.collect()
        for sample in metric.samples
    }


# --- the library -----------------------------------------------------------------------------------------------------


def test_reading_is_in_the_units_of_its_field_names() -> None:
    nvml = open_nvml(lambda: [SECOND], lambda name: Library())
    assert nvml.read() == [GpuReading(SECOND, 0.75, 1000, 600, 123.5, 700.0, 5000.0)]


def test_values_that_a_gpu_does_not_report_are_none() -> None:
    nvml = Nvml(Library(lost={FIRST}, lacks={"power", "energy"}), [FIRST, SECOND])
    assert nvml.read() == [
        GpuReading(FIRST, None, None, None, None, None, None),
        GpuReading(SECOND, 0.75, 1000, 600, None, 700.0, None),
    ]


def test_slice_of_a_gpu_is_found_by_its_mig_name() -> None:
    name = FIRST.replace("GPU-", "MIG-")
    assert [one.uuid for one in Nvml(Library(known=(name,)), [FIRST]).read()] == [name]


def test_library_without_a_driver_says_so() -> None:
    """The real library, where it is installed and there is no driver."""
    library = pytest.importorskip("pynvml", reason="nvidia-ml-py isn't installed")
    try:
        library.nvmlInit()
    except library.NVMLError:
        with pytest.raises(DeviceError, match=r"management library failed: NVML Shared Library Not Found$"):
            open_nvml(lambda: [FIRST])
    else:
        library.nvmlShutdown()
        pytest.skip("there is a driver")


@pytest.mark.parametrize(
    ("library", "fault"),
    [
        (Library(starts=False), "NVIDIA's management library failed: Driver/library version mismatch"),
        (Library(known=()), "NVIDIA's management library failed: Not Found"),
    ],
)
def test_failure_of_the_library_is_reported_with_its_reason(library: Library, fault: str) -> None:
    with pytest.raises(DeviceError) as caught:
        open_nvml(lambda: [FIRST], lambda name: library)
    assert str(caught.value) == fault


def test_missing_library_is_reported_with_the_extra_to_install() -> None:
    def load(name: str) -> Any:
        return importlib.import_module(f"no_such_{name}")

    with pytest.raises(DeviceError, match=r"the package nvidia-ml-py isn.t installed: pip install nvidia-ml-py"):
        open_nvml(lambda: [FIRST], load)


def test_missing_driver_is_reported_unchanged() -> None:
    def visible() -> list[str]:
        raise LoadError("no NVIDIA driver")

    with pytest.raises(DeviceError, match=r"^no NVIDIA driver$"):
        open_nvml(visible, lambda name: Library())


@pytest.mark.gpu
def test_reading_of_a_real_gpu_is_plausible() -> None:
    try:
        gpus = count_gpus()
        pytest.importorskip("pynvml", reason="nvidia-ml-py isn't installed")
    except LoadError as error:
        pytest.skip(str(error))
    readings = open_nvml().read()
    assert len(readings) == gpus
    for one in readings:
        assert one.memory_total_bytes is not None
        assert 0 <= (one.memory_used_bytes or 0) <= one.memory_total_bytes
        assert one.utilization is None or 0 <= one.utilization <= 1


# --- the metrics -----------------------------------------------------------------------------------------------------


def test_families_are_tritons_and_energy_counts_from_the_start() -> None:
    library, clock = Library(), Clock()
    collector = GpuCollector(Nvml(library, [FIRST]), patience_s=20, clock=clock)
    metrics = Metrics()
    metrics.add_collector(collector)
    library.scale, clock.now_s = 3, 1.0
    assert shown(collector) == {
        ("nv_gpu_utilization", FIRST): 0.75,
        ("nv_gpu_memory_total_bytes", FIRST): 3000,
        ("nv_gpu_memory_used_bytes", FIRST): 1800,
        ("nv_gpu_power_usage", FIRST): 123.5,
        ("nv_gpu_power_limit", FIRST): 700.0,
        ("nv_energy_consumption", FIRST): 10_000.0,
    }
    text = metrics.text().decode()
    assert f'nv_energy_consumption{{gpu_uuid="{FIRST}"}} 10000\n' in text
    assert "# TYPE nv_energy_consumption counter\n" in text
    assert "# TYPE nv_gpu_utilization gauge\n" in text


def test_scrape_without_a_thread_leaves_gpus_out_once() -> None:
    clock = Clock()
    collector = GpuCollector(Nvml(Library(), [FIRST]), clock=clock)
    clock.now_s = 2
    with without_threads():
        assert shown(collector) == {}
    assert ("nv_gpu_power_usage", FIRST) in shown(collector)


def test_readings_are_at_most_a_second_old_and_not_taken_more_often() -> None:
    library, clock = Library(), Clock()
    collector = GpuCollector(Nvml(library, [FIRST]), patience_s=20, clock=clock)
    library.scale = 2
    clock.now_s = 0.9
    assert shown(collector)["nv_gpu_memory_total_bytes", FIRST] == 1000
    clock.now_s = 1.0
    assert shown(collector)["nv_gpu_memory_total_bytes", FIRST] == 2000


def test_lost_gpu_is_left_out_and_the_others_are_shown() -> None:
    library, clock = Library(), Clock()
    collector = GpuCollector(Nvml(library, [FIRST, SECOND]), patience_s=20, clock=clock)
    library.lost, clock.now_s = {FIRST}, 5.0
    assert {uuid for _, uuid in shown(collector)} == {SECOND}


class Stuck:
    """Answers as soon as `free` is set, as it is at first."""

    def __init__(self, error: Exception | None = None) -> None:
        self.free = threading.Event()
        self.free.set()
        self.asked = 0
        self.error: Exception | None = None

    def read(self) -> list[GpuReading]:
        self.asked += 1
        assert self.free.wait(20)
        if self.error is not None:
            raise self.error
        return [GpuReading(FIRST, float(self.asked), None, None, None, None, None)]


def test_hanging_driver_does_not_hold_up_scrapes_and_is_asked_once(caplog: pytest.LogCaptureFixture) -> None:
    gpus, clock = Stuck(), Clock()
    collector = GpuCollector(gpus, patience_s=0.01, clock=clock)
    gpus.free.clear()
    clock.now_s = 10.0
    assert shown(collector) == {}
    eventually(lambda: gpus.asked == 2, "the driver asked")
    assert shown(collector) == {}
    assert gpus.asked == 2
    (record,) = caplog.records
    assert record.getMessage() == "the GPUs have not answered for 0.01 s; their metrics are left out"
    gpus.free.set()
    eventually(lambda: shown(collector) == {("nv_gpu_utilization", FIRST): 2.0}, "the answer")


def test_failed_reading_leaves_the_metrics_out_until_one_succeeds(caplog: pytest.LogCaptureFixture) -> None:
    gpus, clock = Stuck(), Clock()
    collector = GpuCollector(gpus, patience_s=20, clock=clock)
    gpus.error, clock.now_s = RuntimeError("a bug"), 1.0
    assert shown(collector) == {}
    assert "GPU metrics can't be read" in caplog.text
    gpus.error, clock.now_s = None, 2.0
    assert shown(collector) == {("nv_gpu_utilization", FIRST): 3.0}
