"""Sessions: their options, preparing CUDA for them, and what is freed when."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import onnxruntime as ort  # type: ignore[import-untyped,unused-ignore]
import pytest

from paceline.backends.base import Device, DeviceKind
from paceline.backends.cuda.accelerator import open_streams
from paceline.backends.errors import DeviceError
from paceline.backends.onnx import sessions
from paceline.backends.onnx.options import GraphLevel, OnnxOptions
from paceline.backends.onnx.sessions import (
    OpenSession,
    open_session,
    prepare_cuda,
    run_options,
    session_options,
    staged_run_options,
)
from tests import models
from tests.host_accelerator import HostAccelerator


def test_session_options_have_the_requested_values() -> None:
    made = session_options(
        OnnxOptions(
            graph_level=GraphLevel.EXTENDED,
            intra_op_threads=3,
            inter_op_threads=2,
            parallel=True,
            cpu_mem_arena=False,
            mem_pattern=False,
            session_entries={"session.use_device_allocator_for_initializers": "1"},
        )
    )

    assert made.graph_optimization_level == ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    assert (made.intra_op_num_threads, made.inter_op_num_threads) == (3, 2)
    assert made.execution_mode == ort.ExecutionMode.ORT_PARALLEL
    assert (made.enable_cpu_mem_arena, made.enable_mem_pattern) == (False, False)
    assert made.get_session_config_entry("session.use_device_allocator_for_initializers") == "1"


@pytest.mark.parametrize("level", list(GraphLevel))
def test_session_options_have_each_graph_level(level: GraphLevel) -> None:
    made = session_options(OnnxOptions(graph_level=level))

    assert made.graph_optimization_level == getattr(ort.GraphOptimizationLevel, level.value)


@pytest.mark.parametrize(
    ("said", "hint"),
    [
        ("libcublasLt.so.13: cannot open shared object file: No such file or directory", "install 'nvidia-ml-py"),
        ("libonnxruntime_providers_cuda.so: undefined symbol: cublasCreate_v2", "'onnxruntime-gpu[cuda,cudnn]"),
        ("libonnxruntime_providers_cuda.so: undefined symbol: cuTensorMapEncodeTiled", "driver is too old for it"),
    ],
)
def test_error_of_a_provider_that_cannot_be_loaded_says_what_would_help(said: str, hint: str) -> None:
    def load(path: str) -> None:
        raise OSError(said)

    why = sessions._why_no_cuda(load)
    assert why.startswith(f"{said}; ")
    assert hint in why


def test_session_is_freed_before_the_streams_that_it_computes_on() -> None:
    gone: list[str] = []

    class Part:
        def __init__(self, name: str) -> None:
            self.name = name
            self.accelerator = HostAccelerator()

        def __del__(self) -> None:
            gone.append(self.name)

    session: Any = Part("session")
    streams: Any = Part("streams")
    held = [OpenSession(session, streams)]
    del session, streams
    assert not gone
    held.clear()
    assert gone == ["session", "streams"]


class Entered(HostAccelerator):
    """`inside`: within a block of `current`. `error` is what `synchronize` raises, if given."""

    def __init__(self, error: DeviceError | None = None) -> None:
        super().__init__()
        self.inside = False
        self._error = error

    @contextmanager
    def current(self) -> Iterator[None]:
        self.inside = True
        yield
        self.inside = False

    def synchronize(self) -> None:
        if self._error is not None:
            raise self._error


class Session:
    """A session; `gone` gets whether its device was current when it was freed."""

    def __init__(self, accelerator: Entered, gone: list[bool]) -> None:
        self._accelerator, self._gone = accelerator, gone

    def __del__(self) -> None:
        self._gone.append(self._accelerator.inside)


def test_session_is_freed_while_its_device_is_current_on_the_thread() -> None:
    accelerator, gone = Entered(), list[bool]()
    session: Any = Session(accelerator, gone)
    held = [OpenSession(session, open_streams(accelerator))]
    del session
    held.clear()
    assert gone == [True]


@pytest.mark.parametrize("code", [700, 900])
def test_session_whose_device_cannot_be_waited_for_is_never_freed(code: int) -> None:
    gone: list[bool] = []
    accelerator = Entered(DeviceError(f"the NVIDIA driver failed: cuCtxSynchronize returned {code} (why)"))
    session: Any = Session(accelerator, gone)
    held = [OpenSession(session, open_streams(accelerator))]
    del session
    held.clear()
    gc.collect()
    assert not gone


@pytest.mark.parametrize(("version", "graphs"), [("1.30.2", False), ("1.31.0", True), ("2.0.0", True)])
def test_graphs_are_captured_only_by_versions_that_replay_them_rightly(
    version: str, graphs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ort, "__version__", version)
    path = models.write(models.identity("FP32", ("batch", 2)), tmp_path / "model.onnx")
    opened = open_session("m", path, OnnxOptions(cuda={"enable_cuda_graph": "1"}), Device(), HostAccelerator())
    assert opened.graphs == graphs
    assert caplog.messages == (
        []
        if graphs
        else ["model 'm' runs without CUDA graphs: those of onnxruntime 1.30.2 may be wrong, those of 1.31 aren't"]
    )


def test_runs_that_shrink_the_gpus_arena_are_synchronized() -> None:
    gpu, shrinking = Device(DeviceKind.GPU), OnnxOptions(shrink_arenas=("cpu:0", "gpu:0"))
    made = staged_run_options(shrinking, gpu, None)
    assert made.get_run_config_entry("memory.enable_memory_arena_shrinkage") == "cpu:0;gpu:0"
    with pytest.raises(RuntimeError):
        made.get_run_config_entry("disable_synchronize_execution_providers")
    # With graphs, nothing is shrunk.
    made = staged_run_options(shrinking, gpu, 3)
    assert made.get_run_config_entry("disable_synchronize_execution_providers") == "1"


def test_run_options_always_name_a_graph_or_none_except_for_tensorrts_own_graphs() -> None:
    gpu, shrinking = Device(DeviceKind.GPU), OnnxOptions(shrink_arenas=("cpu:0",))
    for made in (
        run_options(shrinking, Device()),
        run_options(shrinking, gpu),
        staged_run_options(shrinking, gpu, None),
    ):
        assert made.get_run_config_entry("gpu_graph_id") == "-1"
        assert made.get_run_config_entry("memory.enable_memory_arena_shrinkage") == "cpu:0"
    assert run_options(OnnxOptions(), Device()).get_run_config_entry("gpu_graph_id") == "-1"
    assert staged_run_options(OnnxOptions(), gpu, 3).get_run_config_entry("gpu_graph_id") == "3"
    theirs = OnnxOptions(tensorrt={"trt_cuda_graph_enable": "True"})
    with pytest.raises(RuntimeError):
        staged_run_options(theirs, gpu, None).get_run_config_entry("gpu_graph_id")


def test_preparing_cuda_opens_libraries_of_packages_before_those_of_the_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [
        tmp_path / site / "nvidia" / folder / "lib" / f"lib{name}"
        for site, folder, name in (
            ("a", "cudnn", "cudnn.so.9"),
            ("a", "cu13", "cublas.so.13"),
            ("a", "cu13", "cublasLt.so.13"),
            ("b", "cuda_runtime", "cudart.so.12"),
            ("a", "cu13", "unrelated.so.1"),
        )
    ]
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    for site in ("b", "a"):
        monkeypatch.syspath_prepend(tmp_path / site)
    seen: list[str] = []
    prepare_cuda(lambda: seen.append("preload"), lambda path: seen.append(path))
    cudnn, cublas, cublas_lt, cudart = map(str, files[:4])
    assert [one for one in seen if one.startswith((str(tmp_path), "preload"))] == [
        cudart,
        cublas_lt,
        cublas,
        cudnn,
        "preload",
    ]


def test_library_of_a_package_that_cannot_be_opened_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "nvidia" / "cu13" / "lib" / "libcudart.so.13"
    broken.parent.mkdir(parents=True)
    broken.touch()
    monkeypatch.syspath_prepend(tmp_path)
    seen: list[str] = []
    prepare_cuda(lambda: seen.append("preload"))
    assert seen == ["preload"]


def test_preparing_cuda_on_two_threads_leaves_stdout_unchanged() -> None:
    before, inside, go_on = sys.stdout, threading.Event(), threading.Event()

    def first() -> None:
        inside.set()
        assert go_on.wait(30)

    def second() -> None:
        inside.set()

    one = threading.Thread(target=prepare_cuda, args=(first,))
    one.start()
    assert inside.wait(30)
    inside.clear()
    other = threading.Thread(target=prepare_cuda, args=(second,))
    other.start()
    assert not inside.wait(0.05)
    go_on.set()
    for thread in (one, other):
        thread.join(30)
    assert inside.is_set()
    assert sys.stdout is before


def test_missing_cudnn_is_logged_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "_CUDNN", "libcudnn-that-is-nowhere.so")
    sessions._look_for_cudnn.cache_clear()
    for _ in range(2):
        prepare_cuda(lambda: None)
    (message,) = caplog.messages
    assert message.startswith("no cuDNN: libcudnn-that-is-nowhere.so: cannot open shared object file")
    assert "models with convolutions need it" in message
