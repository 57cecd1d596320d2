"""The gain of shared memory: the same request with its tensor in the message and in shared memory, in turn.

Lives here: one client, one request in flight, one server in a process of its own; medians per round, and their ratio.
Must not: several clients; see `bench.load`. The client writes its tensor into the memory each time, as it would into a
message, and answers are four bytes a row, so that only the way in differs.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import onnx
from onnx import helper

from bench.stats import ratio
from paceline.protos import inference_pb2 as pb
from paceline.protos.inference_pb2_grpc import GRPCInferenceServiceStub
from tests import models
from tests.harness import ServerProcess

_UNLIMITED = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


def _first_element(floats: int) -> onnx.ModelProto:
    """A model with as little work as possible that depends on the input."""
    index = onnx.numpy_helper.from_array(np.array([0], np.int64), "first")
    return models.model(
        [helper.make_node("Gather", ["INPUT0", "first"], ["OUTPUT0"], axis=1)],
        [models.tensor("INPUT0", "FP32", ["batch", floats])],
        [models.tensor("OUTPUT0", "FP32", ["batch", 1])],
        [index],
    )


def _median_us(send: Callable[[], Any], seconds: float) -> float:
    samples: list[float] = []
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        began = time.perf_counter_ns()
        send()
        samples.append((time.perf_counter_ns() - began) / 1e3)
    return statistics.median(samples)


def _senders(stub: Any, floats: int, descriptor: int, key: str) -> tuple[Callable[[], Any], Callable[[], Any]]:
    data = np.ones((1, floats), np.float32)
    stub.SystemSharedMemoryRegister(
        pb.SystemSharedMemoryRegisterRequest(name=f"r{floats}", key=key, byte_size=data.nbytes)
    )
    request = pb.ModelInferRequest(model_name=f"m{floats}")
    tensor = request.inputs.add(name="INPUT0", datatype="FP32", shape=data.shape)
    tensor.parameters["shared_memory_region"].string_param = f"r{floats}"
    tensor.parameters["shared_memory_byte_size"].int64_param = data.nbytes

    def in_message() -> Any:
        request = pb.ModelInferRequest(model_name=f"m{floats}", raw_input_contents=[data.tobytes()])
        request.inputs.add(name="INPUT0", datatype="FP32", shape=data.shape)
        return stub.ModelInfer(request)

    def in_memory() -> Any:
        os.pwrite(descriptor, data, 0)
        return stub.ModelInfer(request)

    assert in_message().raw_output_contents == in_memory().raw_output_contents == [data[0, :1].tobytes()]
    return in_message, in_memory


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.shared_memory", description=__doc__.partition("\n")[0])
    parser.add_argument("kib", nargs="*", type=int, default=[1, 64, 600, 6000], help="tensor sizes in KiB")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=1.0, help="per way and round (default: %(default)s)")
    got = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        for kib in got.kib:
            models.write(_first_element(256 * kib), Path(folder, f"m{256 * kib}", "1", "model.onnx"))
        key = f"/paceline-bench-{os.getpid()}"
        descriptor = os.open(f"/dev/shm{key}", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.ftruncate(descriptor, 1024 * max(got.kib))
            with (
                ServerProcess(folder, args=["--allow-client-shm=true"], fresh=True) as server,
                grpc.insecure_channel(server.target, options=_UNLIMITED) as channel,
            ):
                stub: Any = GRPCInferenceServiceStub(channel)  # type: ignore[no-untyped-call]
                for kib in got.kib:
                    _report(kib, got, *_senders(stub, 256 * kib, descriptor, key))
        finally:
            os.close(descriptor)
            os.unlink(f"/dev/shm{key}")


def _report(kib: int, got: argparse.Namespace, in_message: Callable[[], Any], in_memory: Callable[[], Any]) -> None:
    ways = [in_message, in_memory]
    found: list[list[float]] = [[], []]
    for number in range(got.rounds):
        for which in (0, 1) if number % 2 else (1, 0):
            found[which].append(_median_us(ways[which], got.seconds))
    raw, shared = (statistics.median(one) for one in found)
    spread = ratio(found[0], found[1])
    print(
        f"{kib:>6} KiB: in the message {raw:8.0f} us, in shared memory {shared:8.0f} us, "
        f"ratio {spread.median:.2f} ({spread.low:.2f} to {spread.high:.2f})",
        flush=True,
    )


if __name__ == "__main__":
    main()
