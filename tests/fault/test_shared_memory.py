"""Shared memory is taken away at the worst moments, over and over, from a server in a separate process: one that
touched it through a mapping would die of SIGBUS."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from paceline.protos import inference_pb2 as pb
from paceline.protos.inference_pb2_grpc import GRPCInferenceServiceStub
from tests import models
from tests.harness import ServerProcess
from tests.polling import eventually
from tests.shared_objects import SharedObject, add_shared_input, held_by, request_shared_output, shared_object
from tests.wire import infer

COLUMNS = 20_000
ROW = 4 * COLUMNS
OK, INVALID = grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Model `copy` returns its rows of 80 KB; `pick` looks up elements by its indices, and trusts them once checked."""
    folder = tmp_path_factory.mktemp("repository")
    models.write(models.identity("FP32", ("batch", COLUMNS)), folder / "copy" / "1" / "model.onnx")
    models.write(models.gather(size=COLUMNS), folder / "pick" / "1" / "model.onnx")
    with ServerProcess(folder, args=["--allow-client-shm=true"]) as started:
        yield started
        assert started.returncode is None


@pytest.fixture
def stub(server: ServerProcess) -> Iterator[Any]:
    with grpc.insecure_channel(server.target) as channel:
        stub: Any = GRPCInferenceServiceStub(channel)  # type: ignore[no-untyped-call]
        yield stub
        stub.SystemSharedMemoryUnregister(pb.SystemSharedMemoryUnregisterRequest())
        eventually(lambda: held_by(server.pid) == (0, 0), "nothing held open by the server")
        neighbour = infer("copy", {"INPUT0": np.ones((1, COLUMNS), np.float32)})
        assert stub.ModelInfer(neighbour, timeout=60).raw_output_contents[0] == neighbour.raw_input_contents[0]


@pytest.fixture
def memory() -> Iterator[SharedObject]:
    with shared_object(8 * ROW) as made:
        yield made


def register(stub: Any, memory: SharedObject, name: str = "r") -> None:
    stub.SystemSharedMemoryRegister(
        pb.SystemSharedMemoryRegisterRequest(name=name, key=memory.key, byte_size=8 * ROW), timeout=60
    )


def in_shared_memory(rows: int = 1, slot: int = 0, target: int | None = None) -> pb.ModelInferRequest:
    request = pb.ModelInferRequest(model_name="copy")
    add_shared_input(request, "INPUT0", "FP32", [rows, COLUMNS], "r", rows * ROW, slot * ROW)
    if target is not None:
        request_shared_output(request, "OUTPUT0", "r", rows * ROW, target * ROW)
    return request


def test_truncation_at_any_moment_fails_requests_but_never_the_server_or_neighbours(
    stub: Any, memory: SharedObject
) -> None:
    """Requests are in flight while the object goes through all sizes; answers other than errors are what the memory
    held."""
    chance = random.Random(3)
    register(stub, memory)
    sent = np.ones((1, COLUMNS), np.float32)
    outcomes: list[Any] = []
    for _ in range(150):
        memory.resize(8 * ROW)
        calls = [
            stub.ModelInfer.future(in_shared_memory(1 + slot % 3, slot, target=4 if slot % 2 else None), timeout=60)
            for slot in range(4)
        ]
        neighbour = stub.ModelInfer.future(infer("copy", {"INPUT0": sent}), timeout=60)
        while not all(call.done() for call in calls):
            memory.resize(chance.choice([0, 1, 4095, 4096, ROW, 3 * ROW, 4 * ROW + 7, 8 * ROW]))
        outcomes += [call.code() for call in calls]
        assert neighbour.result().raw_output_contents[0] == sent.tobytes()
    assert set(outcomes) == {OK, INVALID}


def test_indices_changed_while_the_model_runs_never_reach_it_unchecked(stub: Any, memory: SharedObject) -> None:
    """ONNX Runtime checks all indices before it uses the first."""
    register(stub, memory)
    request = pb.ModelInferRequest(model_name="pick")
    add_shared_input(request, "INPUT0", "INT64", [1, COLUMNS], "r", 2 * ROW)
    bad, good = (2**45).to_bytes(8, "little"), bytes(8)
    codes = []
    for _ in range(300):
        memory.put(good, 2 * ROW - 8)
        call = stub.ModelInfer.future(request, timeout=60)
        while not call.done():
            memory.put(bad, 2 * ROW - 8)
            memory.put(good, 2 * ROW - 8)
        codes.append(call.code())
    assert set(codes) <= {OK, grpc.StatusCode.INTERNAL}
    assert OK in codes


def test_register_use_and_unregister_200_times_leaves_nothing_open(
    server: ServerProcess, stub: Any, memory: SharedObject
) -> None:
    memory.put(np.ones((2, COLUMNS), np.float32))
    descriptors = Path(f"/proc/{server.pid}/fd")

    def cycle() -> None:
        register(stub, memory)
        stub.ModelInfer(in_shared_memory(2, target=4), timeout=60)
        stub.SystemSharedMemoryUnregister(pb.SystemSharedMemoryUnregisterRequest(name="r"), timeout=60)

    cycle()
    eventually(lambda: held_by(server.pid) == (0, 0), "nothing held open by the server")
    before = len(list(descriptors.iterdir()))
    for _ in range(200):
        cycle()
    eventually(lambda: held_by(server.pid) == (0, 0), "nothing held open by the server")
    assert len(list(descriptors.iterdir())) <= before
    assert memory.get(2 * ROW, 4 * ROW) == memory.get(2 * ROW)
