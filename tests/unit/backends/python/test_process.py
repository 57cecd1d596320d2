"""How the processes of Python models die, how that is reported, and how they are ended."""

from __future__ import annotations

import fcntl
import gc
import os
import signal
import termios
import threading
import weakref
from array import array
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from queue import Queue

import numpy as np
import pytest

from paceline.backends.base import ProvidesBuffers
from paceline.backends.errors import ExecutionError, LoadError, ProcessEndedBeforeBatch, ProcessError
from paceline.backends.python.backend import PythonBackend
from paceline.backends.python.instance import PythonInstance
from paceline.backends.python.process import ModelProcess
from paceline.backends.spec import Array, ModelSpec, TensorSpec
from paceline.backends.transport.blocking_link import BlockingLink
from tests import fronts, puppet
from tests.polling import eventually
from tests.rlimits import without_threads
from tests.unit.backends.python_models import CLASS, CPU, SPEC, is_alive, model_source, run, serving

pytestmark = pytest.mark.usefixtures("processes_as_usual")


def unread_bytes(link: BlockingLink) -> int:
    """How much of what was sent the other end hasn't read, according to the kernel."""
    kept = array("i", [0])
    fcntl.ioctl(link._socket, termios.TIOCOUTQ, kept)
    return kept[0]


def loads(folder: Path) -> list[str]:
    return (folder / "loads").read_text().splitlines()


@pytest.mark.parametrize(
    ("what", "words"), [(puppet.EXIT, "ended with exit status 3"), (puppet.SEGFAULT, "was killed by SIGSEGV")]
)
def test_crash_fails_its_batch_and_ends_the_instance_with_its_reason(
    instance: PythonInstance, folder: Path, what: int, words: str
) -> None:
    (pid,) = run(instance, puppet.PID)
    ends: Queue[BaseException] = Queue()
    instance.when_lost(ends.put)
    assert not instance.has_executed
    with pytest.raises(ProcessError, match=f"^the model's process {words} while it executed this batch$") as error:
        run(instance, what)
    assert not isinstance(error.value, ProcessEndedBeforeBatch)
    assert str(ends.get(timeout=20)) == f"the model's process {words}"
    assert not instance.has_executed
    assert not is_alive(pid)
    with pytest.raises(ProcessEndedBeforeBatch, match=f"^the model's process {words}, before it had begun this batch$"):
        run(instance, 4)
    assert len(loads(folder)) == 1


def test_death_of_an_idle_process_is_reported_also_to_later_callbacks(instance: PythonInstance) -> None:
    (pid,) = run(instance, puppet.PID)
    ends: Queue[BaseException] = Queue()
    instance.when_lost(ends.put)
    assert run(instance, 4) == [40]
    assert instance.has_executed
    os.kill(pid, signal.SIGKILL)
    assert isinstance(ends.get(timeout=20), ProcessError)
    with without_threads():
        instance.when_lost(ends.put)
    assert str(ends.get(timeout=20)) == "the model's process was killed by SIGKILL"


def test_death_of_a_process_before_it_reads_a_batch_is_distinguished_from_a_crash(instance: PythonInstance) -> None:
    (pid,) = run(instance, puppet.PID)
    os.kill(pid, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as asking:
        answer = asking.submit(run, instance, 4)
        link = instance._process._link  # type: ignore[union-attr]
        eventually(lambda: unread_bytes(link) > 0, "the batch is on its way")
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(ProcessEndedBeforeBatch, match="was killed by SIGKILL, before it had begun this batch"):
            answer.result(30)


def test_instance_of_a_file_whose_declared_tensors_have_changed_is_refused(folder: Path) -> None:
    path = puppet.write_puppet(folder)
    model = PythonBackend().open(model_source(path), CPU)
    first = model.instance(SPEC, CPU)
    path.write_text(path.read_text().replace('"INT64", [-1, 1]', '"FP32", [-1, 1]'))
    with pytest.raises(LoadError, match="model 'm': the tensors that its file declares have changed; load it again"):
        model.instance(SPEC, CPU)
    pids = [int(one.split()[0]) for one in loads(folder)]
    eventually(lambda: not is_alive(pids[1]), "the process that was of no use gone")
    assert is_alive(pids[0])
    first.close()
    model.close()


@pytest.mark.parametrize("end", ["close", "abandon"])
def test_requested_end_is_not_reported(instance: PythonInstance, end: str) -> None:
    (pid,) = run(instance, puppet.PID)
    ends: Queue[BaseException] = Queue()
    instance.when_lost(ends.put)
    threads = {*threading.enumerate()}
    getattr(instance, end)()
    eventually(lambda: not is_alive(pid), "the process gone")
    eventually(lambda: not any("end of m" in one.name for one in threads & {*threading.enumerate()}), "all was told")
    assert ends.empty()


@pytest.mark.parametrize("what", [puppet.HANG, puppet.GRAB])
def test_hanging_instance_that_is_abandoned_fails_its_batch_and_ends(
    instance: PythonInstance, folder: Path, what: int
) -> None:
    (pid,) = run(instance, puppet.PID)
    with ThreadPoolExecutor(1) as threads:
        hanging = threads.submit(run, instance, what)
        eventually((folder / "hangs").exists, "the model hanging")
        instance.abandon()
        with pytest.raises(ProcessError, match="was killed by SIGKILL while it executed this batch"):
            hanging.result(20)
    assert not is_alive(pid)
    with pytest.raises(ExecutionError, match="the instance is closed"):
        run(instance, 1)
    assert len(loads(folder)) == 1, "no other process is started"


def test_abandoning_a_model_ends_an_instance_that_is_being_loaded(folder: Path) -> None:
    text = f"""
import pathlib, threading
HERE = pathlib.Path(__file__).parent
{CLASS}
    def load(self, context):
        if (HERE / "slow").exists():
            (HERE / "slow").unlink()
            threading.Event().wait()
"""
    folder.mkdir()
    (folder / "model.py").write_text(text)
    model = PythonBackend().open(model_source(folder / "model.py"), CPU)
    first = model.instance(model.spec, CPU)
    (folder / "slow").touch()
    with ThreadPoolExecutor(1) as loading:
        second = loading.submit(model.instance, model.spec, CPU)
        eventually(lambda: not (folder / "slow").exists(), "it loads")
        model.abandon()
        with pytest.raises(LoadError, match="was killed by SIGKILL while loading"):
            second.result(30)
    with pytest.raises(LoadError, match="its process"):
        model.instance(model.spec, CPU)
    first.close()
    model.close()


def test_signals_that_ask_a_process_group_to_end_are_left_to_the_server(instance: PythonInstance) -> None:
    (pid,) = run(instance, puppet.PID)
    os.kill(pid, signal.SIGTERM)
    os.kill(pid, signal.SIGINT)
    assert run(instance, puppet.PID) == [pid]


def test_close_calls_the_models_close_and_leaves_nothing_behind(folder: Path) -> None:
    gc.collect()
    # Compared as a set and not counted: some disappear meanwhile, as processes of earlier tests are still being cleaned
    # up.
    before = _held()
    source = model_source(puppet.write_puppet(folder))
    model = PythonBackend().open(source, CPU)
    instances = [model.instance(SPEC, CPU) for _ in range(2)]
    pids = [run(instance, puppet.PID)[0] for instance in instances]
    for instance in instances:
        instance.close()
    model.close()
    assert (folder / "closed").exists()
    assert not any(map(is_alive, pids))
    with pytest.raises(ExecutionError, match="the instance is closed"):
        run(instances[0], 1)
    del instances, instance, model
    gc.collect()
    eventually(lambda: _held() <= before, "nothing that wasn't there before")


def test_closed_instance_has_no_memory_although_it_is_still_referenced(instance: PythonInstance) -> None:
    """By a batcher, say, until the garbage collector runs."""
    gc.collect()  # what errors of other tests have kept alive
    before = _memory()
    run(instance, 1)
    assert before
    gc.disable()
    try:
        instance.close()
        eventually(lambda: not before & _memory(), "its memory is given back")
    finally:
        gc.enable()


def _memory() -> set[str]:
    return {line for line in Path("/proc/self/maps").read_text().splitlines() if "paceline-tensors" in line}


def _held() -> set[object]:
    """This process's descriptors with the files behind them, its threads, and its mappings of tensors."""
    held: set[object] = {*threading.enumerate()}
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # closed meanwhile, as that of the listing is
            file = os.stat(f"/proc/self/fd/{descriptor}")
            held.add((descriptor, file.st_dev, file.st_ino))
    return held | _memory()


def test_close_that_takes_too_long_is_killed(folder: Path) -> None:
    folder.mkdir()
    (folder / "model.py").write_text(f"{CLASS}    def close(self): __import__('threading').Event().wait()")
    process = ModelProcess(model_source(folder / "model.py", close_s=0.1), CPU)
    process.load()
    process.close()
    assert process.end == "was killed by SIGKILL"
    assert not is_alive(process.pid)


def test_processes_started_by_the_model_end_with_its_process(folder: Path) -> None:
    text = f"""
import subprocess, sys
{CLASS.replace("FP32", "INT64")}
    def load(self, context):
        self.child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    def execute(self, inputs):
        return {{"y": inputs["x"][:, 0] * 0 + self.child.pid}}
"""
    spec = ModelSpec((TensorSpec("x", "INT64", (4,)),), (TensorSpec("y", "INT64", ()),), batched=True)
    with serving(folder, text, spec) as instance:
        (result,) = instance.execute([(np.zeros((1, 4), np.int64),)]).results
        assert not isinstance(result, Exception)
        (pid,) = result[0].tolist()
        assert is_alive(pid)
    # Whether it is reaped isn't up to this process.
    eventually(lambda: not fronts.is_alive(pid), "what it has started gone")


WIDE = """
class Model:
    inputs = {"x": ("FP32", [-1, 5000]), "t": ("BYTES", [-1, 5000])}
    outputs = {"y": ("FP32", [-1])}
    def execute(self, inputs):
        return {"y": inputs["x"].max(axis=1) + inputs["x"].flags.writeable}
"""
WIDE_SPEC = ModelSpec(
    (TensorSpec("x", "FP32", (5000,)), TensorSpec("t", "BYTES", (5000,))), (TensorSpec("y", "FP32", ()),), batched=True
)


class RecordingBuffers(PythonInstance):
    """Records the buffers that it gives."""

    def __init__(self, spec: ModelSpec, process: ModelProcess) -> None:
        super().__init__(spec, process)
        self.rooms: list[Array] = []

    def buffer(self, index: int, shape: tuple[int, ...]) -> Array | None:
        room = super().buffer(index, shape)
        if room is not None:
            self.rooms.append(room)
        return room


@pytest.fixture
def counting(tmp_path: Path) -> Iterator[RecordingBuffers]:
    (tmp_path / "model.py").write_text(WIDE)
    instance = RecordingBuffers(WIDE_SPEC, ModelProcess(model_source(tmp_path / "model.py"), CPU))
    assert instance._process is not None
    instance._process.load()
    yield instance
    instance.close()


def test_inputs_made_in_buffers_of_an_instance_reach_its_process(counting: RecordingBuffers) -> None:
    texts = np.full((8, 5000), b"t", object)
    assert isinstance(counting, ProvidesBuffers)
    assert counting.buffer(0, (0, 5000)) is None
    assert counting.buffer(1, (8, 5000)) is None, "texts have no size of their own"
    for value in (1, 2):
        room = counting.buffer(0, (8, 5000))
        assert room is not None
        assert room.dtype == np.float32
        room[...] = value
        (result,) = counting.execute([(room, texts)]).results
        assert not isinstance(result, Exception)
        np.testing.assert_array_equal(result[0], [value] * 8)
    counting.close()
    assert counting.buffer(0, (8, 5000)) is None


def test_batches_are_stacked_in_buffers_that_are_free_afterwards_even_if_they_fail(counting: RecordingBuffers) -> None:
    process = counting._process
    assert process is not None
    wide = [(np.full((8, 5000), value, np.float32), np.full((8, 5000), b"", object)) for value in (1, 2)]
    results = counting.execute(wide).results
    assert [np.unique(one[0]).tolist() for one in results if not isinstance(one, Exception)] == [[1], [2]]
    assert [np.unique(room).tolist() for room in counting.rooms] == [[1, 2]]
    counting.rooms.clear()
    odd = (np.zeros((8, 5000), np.float32), np.zeros((8, 4000), object))
    with pytest.raises(ExecutionError, match="don't fit together"):
        counting.execute([wide[0], odd])
    assert len(counting.rooms) == 1
    assert process._link.used_bytes == 0
    counting.rooms.clear()
    counting.execute([(one[:1], two[:1]) for one, two in wide])
    assert counting.rooms == [], "of small ones copies cost less"


def test_process_of_an_abandoned_and_closed_instance_is_freed_without_garbage_collector(
    counting: RecordingBuffers,
) -> None:
    process = counting._process
    assert process is not None
    counting.when_lost(lambda _: None)
    gone = weakref.ref(process)
    gc.collect()
    gc.disable()
    try:
        process.kill()
        process.wait_ended()
        counting.close()
        del process
        eventually(lambda: gone() is None, "no reference")
    finally:
        gc.enable()
