"""LitServe with its batching, over HTTP: `on_litserve.py PORT NAME FILE DIMS OUTPUT_DIMS`, until SIGTERM.

Written as its users would: an API whose worker has a process of its own, batches of up to 64 requests or what arrives
in 5 ms. A request is a row's bytes, and so is its answer.
"""

import sys
from typing import Annotated, Any

import litserve
import numpy as np
import onnxruntime as ort
from fastapi import Body, Response


class Onnx(litserve.LitAPI):
    def __init__(self, file: str, **settings: Any) -> None:
        super().__init__(**settings)
        self._file = file

    def setup(self, device: str) -> None:
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        self._session = ort.InferenceSession(self._file, options, providers=["CPUExecutionProvider"])

    def decode_request(self, request: Annotated[bytes, Body()]) -> np.ndarray:
        return np.frombuffer(request, np.float32)

    def predict(self, rows: np.ndarray) -> np.ndarray:
        (output,) = self._session.run(None, {"INPUT0": rows})
        return output

    def encode_response(self, row: np.ndarray) -> Response:
        return Response(row.tobytes(), media_type="application/octet-stream")


if __name__ == "__main__":
    api = Onnx(sys.argv[3], max_batch_size=64, batch_timeout=0.005)
    server = litserve.LitServer(api, accelerator="cpu", workers_per_device=1)
    server.run(host="127.0.0.1", port=int(sys.argv[1]), num_api_servers=1, generate_client_file=False)
