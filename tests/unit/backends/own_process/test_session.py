"""Sessions in a separate process: their results, and which process they get."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest

from paceline.backends.errors import ExecutionError, InstanceError, LoadError, OutOfMemory, ProcessError
from paceline.backends.onnx.options import OnnxOptions
from paceline.backends.own_process.session import _SOURCE, Job, OwnProcessSession, _Idle, _started
from paceline.backends.python.process import ModelProcess
from paceline.backends.spec import Array, ModelSpec, TensorSpec
from tests import models, odd_models
from tests.operators import build_library, twice
from tests.polling import eventually
from tests.unit.backends.python_models import is_alive

ONE = np.ones((1, 1), np.float32)
FOUR = np.arange(4, dtype=np.float32).reshape(2, 2)


def job(folder: Path, model: onnx.ModelProto, datatype: str = "FP32", **options: object) -> tuple[Job, ModelSpec]:
    path = models.write(model, folder / "model.onnx")
    spec = ModelSpec((TensorSpec("INPUT0", datatype, (-1, -1)),), (TensorSpec("OUTPUT0", datatype, (-1, -1)),))
    return Job("m", path, OnnxOptions(**options)), spec  # type: ignore[arg-type]


def fragile(folder: Path) -> tuple[Job, ModelSpec]:
    """A model that ends its process if there are fewer than four elements, and otherwise doubles them."""
    return job(folder, twice(), op_libraries=(build_library(folder / "twice.so", least=4),))


def process_of(apart: OwnProcessSession) -> ModelProcess:
    process = apart._process
    assert process is not None
    return process


@pytest.mark.parametrize(
    ("datatype", "given"),
    [("FP32", FOUR), ("BF16", FOUR.astype(np.uint16)), ("BYTES", FOUR.astype(bytes).astype(object))],
)
def test_run_gives_outputs_of_any_datatype(tmp_path: Path, datatype: str, given: Array) -> None:
    with OwnProcessSession(*job(tmp_path, models.identity(datatype, ("batch", None)), datatype)) as apart:
        (output,) = apart.run([given])
    assert output.dtype == given.dtype
    np.testing.assert_array_equal(output, given)


def test_run_with_invalid_inputs_is_an_error_and_the_process_keeps_running(tmp_path: Path) -> None:
    with OwnProcessSession(*job(tmp_path, models.identity("FP32", ("batch", 2)))) as apart:
        with pytest.raises(ExecutionError, match="invalid dimensions") as caught:
            apart.run([ONE])
        assert not isinstance(caught.value, InstanceError)
        process = process_of(apart)
        assert apart.run([FOUR])[0].tolist() == FOUR.tolist()
        assert process_of(apart) is process


def test_run_of_a_model_that_cannot_be_opened_is_an_error(tmp_path: Path) -> None:
    broken, spec = job(tmp_path, models.identity())
    broken.path.write_bytes(b"none")
    with OwnProcessSession(broken, spec) as apart, pytest.raises(InstanceError, match="can't open"):
        apart.run([ONE])


def test_run_that_ends_the_process_says_how_and_the_next_session_gets_another(tmp_path: Path) -> None:
    model = fragile(tmp_path)
    with OwnProcessSession(*model) as apart, pytest.raises(ProcessError, match="was killed by SIGFPE"):
        apart.run([ONE])
    with OwnProcessSession(*model) as apart:
        assert apart.run([FOUR])[0].tolist() == (2 * FOUR).tolist()


def test_process_is_reused_while_it_lives(tmp_path: Path) -> None:
    model = job(tmp_path, models.identity())
    with OwnProcessSession(*model) as apart:
        apart.run([FOUR])
        first = process_of(apart)
    with OwnProcessSession(*model) as apart:
        apart.run([FOUR])
        assert process_of(apart) is first
    os.kill(first.pid, signal.SIGKILL)
    eventually(lambda: first.ended, "the process ended")
    with OwnProcessSession(*model) as apart:
        assert apart.run([FOUR])[0].tolist() == FOUR.tolist()
        assert process_of(apart) is not first


def test_idle_process_keeps_nothing_of_the_last_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes_as_usual: None
) -> None:
    """Weights of 64 MiB, which are read into memory. A forked process keeps what it has freed, as servers do."""
    monkeypatch.setattr("paceline.backends.own_process.session._idle", _Idle())
    saved = tmp_path / "model.onnx"
    weights = {"save_as_external_data": True, "location": "weights.bin", "size_threshold": 0}
    onnx.save_model(models.mlp((1024, 16384)), saved, **weights)
    spec = ModelSpec((TensorSpec("INPUT0", "FP32", (-1, 1024)),), (TensorSpec("OUTPUT0", "FP32", (-1, 16384)),))
    with OwnProcessSession(Job("m", saved, OnnxOptions()), spec) as apart:
        apart.run([np.ones((1, 1024), np.float32)])
        pid = process_of(apart).pid
        open_kib = anonymous_kib(pid)
    assert open_kib - anonymous_kib(pid) > 60 * 1024


def anonymous_kib(pid: int) -> int:
    """Source: proc_pid_status(5)."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))


def test_process_that_is_idle_for_a_while_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.backends.own_process.session._idle", _Idle())
    monkeypatch.setattr("paceline.backends.own_process.session._IDLE_S", 0.01)
    # It gets to its end on a busy machine, too.
    monkeypatch.setattr("paceline.backends.own_process.session._SOURCE", replace(_SOURCE, close_s=60))
    processes = []
    for _ in range(2):
        with OwnProcessSession(*job(tmp_path, models.identity())) as apart:
            processes.append(process_of(apart))
        eventually(lambda: processes[-1].ended, "the process ended")
    assert [process.end for process in processes] == ["ended with exit status 0"] * 2


def test_run_gets_another_process_if_the_reused_one_has_ended_for_another_reason(tmp_path: Path) -> None:
    model = job(tmp_path, models.identity())
    with OwnProcessSession(*model) as apart:
        apart.run([FOUR])
        first = process_of(apart)
    with OwnProcessSession(*model) as apart:
        assert process_of(apart) is first
        os.kill(first.pid, signal.SIGKILL)
        assert apart.run([FOUR])[0].tolist() == FOUR.tolist()
        assert process_of(apart) is not first


def test_process_started_when_nobody_waits_any_more_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, started = job(tmp_path, models.identity()), list[ModelProcess]()
    with OwnProcessSession(*model) as apart:
        apart.run([FOUR])
    apart = OwnProcessSession(*model).__enter__()
    process_of(apart).kill()

    def start() -> ModelProcess:
        apart.__exit__(TimeoutError, None, None)
        started.append(_started())
        return started[0]

    monkeypatch.setattr("paceline.backends.own_process.session._started", start)
    with pytest.raises(ProcessError, match="nobody waits"):
        apart.run([FOUR])
    eventually(lambda: started[0].ended, "its end")


def test_busy_process_is_killed_when_nobody_waits_any_more(tmp_path: Path) -> None:
    library = build_library(tmp_path / "twice.so", endless=4)
    apart = OwnProcessSession(*job(tmp_path, twice(), op_libraries=(library,)))
    with ThreadPoolExecutor(1) as threads:
        with suppress(TimeoutError), apart:
            apart.run([ONE])
            hanging = threads.submit(apart.run, [FOUR])
            raise TimeoutError
        with pytest.raises(ProcessError, match="was killed by SIGKILL"):
            hanging.result(30)
    assert not is_alive(process_of(apart).pid)


def test_execution_that_hangs_is_ended_with_its_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = build_library(tmp_path / "twice.so", endless=4)
    with OwnProcessSession(*job(tmp_path, twice(), op_libraries=(library,))) as apart:
        apart.run([ONE])
        monkeypatch.setattr("paceline.backends.own_process.session._HANGS_S", 0.1)
        with pytest.raises(InstanceError, match=r"^an execution took longer than 0\.1 s$") as caught:
            apart.run([FOUR])
    assert not isinstance(caught.value, ProcessError)
    assert not is_alive(process_of(apart).pid)


def test_execution_that_allocates_too_much_fails_and_its_process_goes_on(tmp_path: Path) -> None:
    with OwnProcessSession(*job(tmp_path, odd_models.growing())) as apart:
        assert apart.run([np.array([[1000.0]], np.float32)])[0].tolist() == [[0]]
        process = process_of(apart)
        with pytest.raises(OutOfMemory):
            apart.run([np.array([[200_000_000]], np.float32)])
        assert apart.run([np.array([[1000.0]], np.float32)])[0].tolist() == [[0]]
    with OwnProcessSession(*job(tmp_path, models.identity())) as apart:
        assert process_of(apart) is process
        assert apart.run([FOUR])[0].tolist() == FOUR.tolist()


def test_killed_process_counts_as_lack_of_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.backends.own_process.session._idle", _Idle())
    with OwnProcessSession(*job(tmp_path, models.identity())) as apart:
        apart.run([FOUR])
        os.kill(process_of(apart).pid, signal.SIGKILL)
        with pytest.raises(OutOfMemory, match="was killed by SIGKILL, as the system does when memory runs out"):
            apart.run([FOUR])


def test_session_without_a_process_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    monkeypatch.setattr("paceline.backends.own_process.session._idle", _Idle())
    with (
        pytest.raises(LoadError, match="can't be run: No such file"),
        OwnProcessSession(*job(tmp_path, models.identity())),
    ):
        pass
