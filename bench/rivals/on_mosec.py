"""mosec with its dynamic batching, over HTTP: `on_mosec.py PORT NAME FILE DIMS OUTPUT_DIMS`, until SIGTERM.

Written as its users would: a worker in a process of its own, batches of up to 64 requests or what arrives in 5 ms. A
request is a row's bytes, and so is its answer.
"""

import os
import sys

import numpy as np
import onnxruntime as ort
from mosec import Server, Worker


class Onnx(Worker):
    def __init__(self) -> None:
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        self._session = ort.InferenceSession(os.environ["MODEL"], options, providers=["CPUExecutionProvider"])

    def deserialize(self, data: bytes) -> np.ndarray:
        return np.frombuffer(data, np.float32)

    def forward(self, data: list[np.ndarray]) -> list[np.ndarray]:
        (output,) = self._session.run(None, {"INPUT0": np.stack(data)})
        return list(output)

    def serialize(self, data: np.ndarray) -> bytes:
        return data.tobytes()


if __name__ == "__main__":
    port, _, file = sys.argv[1:4]
    sys.argv = [sys.argv[0], "--address", "127.0.0.1", "--port", port]  # which mosec parses itself
    server = Server()
    server.append_worker(Onnx, max_batch_size=64, max_wait_time=5, env=[{"MODEL": file}], route="/predict")
    server.run()
