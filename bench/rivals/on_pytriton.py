"""PyTriton, with Triton's own server in its wheel: `on_pytriton.py PORT NAME FILE DIMS OUTPUT_DIMS`, until SIGTERM.

Written as its users would: a function over a batch, which Triton's dynamic batcher calls through its Python backend.
"""

import os
import signal
import sys
import sysconfig
import threading

import numpy as np
import onnxruntime as ort
from pytriton.decorators import batch
from pytriton.model_config import DynamicBatcher, ModelConfig, Tensor
from pytriton.triton import Triton, TritonConfig


def dims(text: str) -> tuple[int, ...]:
    return tuple(int(dim) for dim in text.split(","))


def main(port: int, name: str, file: str, input_dims: str, output_dims: str) -> None:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(file, options, providers=["CPUExecutionProvider"])

    @batch
    def infer(INPUT0: np.ndarray) -> list[np.ndarray]:
        outputs: list[np.ndarray] = session.run(None, {"INPUT0": INPUT0})
        return outputs

    # Triton's Python backend links to a libpython by its name: let it find the one of this interpreter.
    os.environ["LD_LIBRARY_PATH"] = str(sysconfig.get_config_var("LIBDIR"))
    addresses = {"grpc_address": "127.0.0.1", "http_address": "127.0.0.1"}
    config = TritonConfig(grpc_port=port, http_port=port + 1, allow_metrics=False, **addresses)
    ending = threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: ending.set())
    with Triton(config=config) as triton:
        triton.bind(
            name,
            infer,
            inputs=[Tensor(name="INPUT0", dtype=np.float32, shape=dims(input_dims))],
            outputs=[Tensor(name="OUTPUT0", dtype=np.float32, shape=dims(output_dims))],
            config=ModelConfig(max_batch_size=64, batcher=DynamicBatcher()),
        )
        triton.run()
        ending.wait()


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:6])
