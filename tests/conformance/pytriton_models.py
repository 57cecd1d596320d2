"""Models behind NVIDIA's Triton, started by PyTriton: `pytriton_models.py PORT`, until SIGTERM.

Run by the Python of an environment that has PyTriton and nothing of this product."""

import os
import signal
import sys
import sysconfig
import threading
import time

import numpy as np
from pytriton.decorators import batch
from pytriton.model_config import DynamicBatcher, ModelConfig, Tensor
from pytriton.triton import Triton, TritonConfig

NEVER = -1000.0
"""A row whose first value is below this makes the whole execution fail; one above 1000 makes it take so many ms."""


@batch
def double(a):
    if (a[:, 0] < NEVER).any():
        raise ValueError("not this row. " + "It was explained at length. " * 1000)
    slowest = float(a[:, :1].max(initial=0))
    if slowest > -NEVER:
        time.sleep(slowest / 1000)
    return [2 * a, -a]


@batch
def shout(text):
    return [np.char.upper(text.astype(bytes))]


@batch
def half(h):
    return [h + h]


def total(requests):
    return [{"sum": request.data["n"].sum(keepdims=True)} for request in requests]


@batch
def several(a):
    yield [a]


def main(port: int) -> None:
    # Triton's Python backend links to a libpython by name: let it find this interpreter's.
    os.environ["LD_LIBRARY_PATH"] = str(sysconfig.get_config_var("LIBDIR"))
    addresses = {"grpc_address": "127.0.0.1", "http_address": "127.0.0.1"}
    config = TritonConfig(grpc_port=port, http_port=port + 1, allow_metrics=False, **addresses)
    ending = threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: ending.set())
    batching = ModelConfig(max_batch_size=8, batcher=DynamicBatcher())
    row = {"dtype": np.float32, "shape": (-1,)}
    with Triton(config=config) as triton:
        triton.bind("double", double, [Tensor(name="a", **row)], [Tensor(name="x", **row), Tensor(name="y", **row)],
                    config=batching)  # fmt: skip
        triton.bind("shout", shout, [Tensor(name="text", dtype=bytes, shape=(1,))],
                    [Tensor(name="said", dtype=bytes, shape=(1,))], config=batching)  # fmt: skip
        triton.bind("half", half, [Tensor(name="h", dtype=np.float16, shape=(2,))],
                    [Tensor(name="g", dtype=np.float16, shape=(2,))], config=batching)  # fmt: skip
        triton.bind("total", total, [Tensor(name="n", **row)], [Tensor(name="sum", dtype=np.float32, shape=(1,))],
                    config=ModelConfig(batching=False))  # fmt: skip
        triton.bind("several", several, [Tensor(name="a", **row)], [Tensor(name="b", **row)],
                    config=ModelConfig(max_batch_size=8, decoupled=True))  # fmt: skip
        triton.run()
        ending.wait()


if __name__ == "__main__":
    main(int(sys.argv[1]))
