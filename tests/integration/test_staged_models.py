"""Models whose batches are staged as for a GPU, in a real server; the CPU computes."""

from __future__ import annotations

import asyncio
import logging
import threading
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from paceline.backends.onnx.backend import OnnxBackend
from paceline.protos import inference_pb2 as pb
from tests import models
from tests.host_accelerator import HostAccelerator
from tests.integration.serving import failure_of, serving
from tests.polling import eventually_async
from tests.wire import infer

CONFIG = """
    max_batch_size: 8 dynamic_batching { }
    input { name: "INPUT0" data_type: TYPE_FP32 dims: 2 } output { name: "OUTPUT0" data_type: TYPE_FP32 dims: 2 }
    %s
"""
# A name that no other test's thread has, not even one that hangs forever.
LABELS = 'model="staged",version="1"'
SIZES = 'parameters { key: "paceline.batch_sizes" value { string_value: "1,4,8" } }'
LIMIT = 'parameters { key: "paceline.execution_timeout_ms" value { string_value: "300" } }'


class Gated(HostAccelerator):
    """An accelerator on which nothing completes while its gate is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.gate.set()

    def event(self) -> Any:
        event, gate = super().event(), self.gate
        synchronize = event.synchronize

        def wait() -> None:
            gate.wait(60)
            synchronize()

        event.synchronize = wait  # type: ignore[method-assign]
        return event


def write(repository: Path, more: str = "") -> None:
    folder = repository / "staged" / "1"
    folder.mkdir(parents=True)
    node = models.helper.make_node("Neg", ["INPUT0"], ["OUTPUT0"])
    tensors = [models.tensor(name, "FP32", ["batch", 2]) for name in ("INPUT0", "OUTPUT0")]
    models.write(models.model([node], tensors[:1], tensors[1:]), folder / "model.onnx")
    (repository / "staged" / "config.pbtxt").write_text(CONFIG % more)


def asking(value: float, rows: int = 1) -> pb.ModelInferRequest:
    return infer("staged", {"INPUT0": np.full((rows, 2), value, np.float32)})


def answer(response: pb.ModelInferResponse) -> list[float]:
    return np.frombuffer(response.raw_output_contents[0], np.float32).tolist()  # type: ignore[no-any-return]


def threads() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("staged_1_")}


@pytest.mark.parametrize("more", ["", SIZES])
async def test_model_is_warm_in_all_sizes_and_gives_each_request_its_own_answer(more: str, tmp_path: Path) -> None:
    write(tmp_path, more)
    accelerator = HostAccelerator()
    backend = OnnxBackend(accelerators=lambda device: accelerator)
    async with serving(tmp_path, backends={"onnxruntime": backend}) as served:
        assert threads() == {"staged_1_0_0", "staged_1_0_1"}
        config = (await served.stub.ModelConfig(pb.ModelConfigRequest(name="staged"))).config
        assert [group.count for group in config.instance_group] == [1]
        allocations = accelerator.allocations
        for _ in range(3):
            sent = [(n, 1 + n % 3) for n in range(60)]
            answers = await asyncio.gather(*(served.infer(asking(n, rows)) for n, rows in sent))
            assert [answer(one) for one in answers] == [[-n, -n] * rows for n, rows in sent]
        # Buffers that answers hold while they leave come on top of the two slots' own.
        assert accelerator.allocations <= allocations + 8
        assert await served.metric("nv_inference_count", LABELS) == 3 * sum(rows for _, rows in sent)
    assert threads() == set()


async def test_hang_in_one_slot_has_the_instance_replaced(tmp_path: Path) -> None:
    write(tmp_path, LIMIT)
    made: list[Gated] = []

    def accelerator(device: object) -> Gated:
        made.append(Gated())
        return made[-1]

    backend = OnnxBackend(accelerators=accelerator)
    async with serving(tmp_path, backends={"onnxruntime": backend}) as served:
        (first,) = made
        first.gate.clear()
        assert (await failure_of(served.infer(asking(1, 8))))[0] is grpc.StatusCode.INTERNAL
        assert answer(await served.infer(asking(5))) == [-5, -5]
        assert len(made) == 2
        assert await served.metric("paceline_hung_executions", LABELS) == 1
        assert threads() >= {"staged_1_1_0", "staged_1_1_1"}
        first.gate.set()
        await eventually_async(lambda: threads() == {"staged_1_1_0", "staged_1_1_1"}, "the old instance to be closed")
    assert threads() == set()


async def test_model_with_open_dims_stays_cold_and_the_log_says_what_helps(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path)
    (tmp_path / "staged" / "config.pbtxt").write_text("")
    models.write(models.identity("FP32", ("batch", "n")), tmp_path / "staged" / "1" / "model.onnx")
    backend = OnnxBackend(accelerators=lambda device: HostAccelerator())
    with caplog.at_level(logging.INFO, "paceline.server.warmup"):
        async with serving(tmp_path, backends={"onnxruntime": backend}) as served:
            assert answer(await served.infer(asking(3))) == [3, 3]
    assert (
        "model 'staged' is served without warm-up, as not all its dims are known; set model_warmup" in caplog.messages
    )
