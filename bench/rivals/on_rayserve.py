"""Ray Serve with `@serve.batch`, over gRPC: `on_rayserve.py PORT NAME FILE DIMS OUTPUT_DIMS`, until SIGTERM.

Written as its users would: one replica, batches of up to 64 requests or what arrives in 5 ms, behind Ray's own gRPC
proxy, which is given the protocol's service. Ray of one node, without its dashboard.
"""

import os
import signal
import sys
import threading
from pathlib import Path

REPO = str(Path(__file__).resolve().parents[2])
os.environ |= {"PYTHONPATH": REPO, "RAY_USAGE_STATS_ENABLED": "0"}  # for Ray's processes
sys.path.append(REPO)

import numpy as np  # noqa: E402
import onnxruntime as ort  # noqa: E402
import ray  # noqa: E402
from ray import serve  # noqa: E402
from ray.serve.config import gRPCOptions  # noqa: E402

from paceline.protos import inference_pb2 as pb  # noqa: E402


@serve.deployment(max_ongoing_requests=256)
class Onnx:
    def __init__(self, file: str) -> None:
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        self._session = ort.InferenceSession(file, options, providers=["CPUExecutionProvider"])

    @serve.batch(max_batch_size=64, batch_wait_timeout_s=0.005)
    async def _infer(self, rows: list[np.ndarray]) -> list[np.ndarray]:
        (output,) = self._session.run(None, {"INPUT0": np.stack(rows)})
        return list(output)

    async def ModelInfer(self, request: pb.ModelInferRequest) -> pb.ModelInferResponse:
        output = await self._infer(np.frombuffer(request.raw_input_contents[0], np.float32))
        response = pb.ModelInferResponse(model_name=request.model_name, id=request.id)
        response.outputs.add(name="OUTPUT0", datatype="FP32", shape=(1, *output.shape))
        response.raw_output_contents.append(output.tobytes())
        return response

    async def ModelReady(self, request: pb.ModelReadyRequest) -> pb.ModelReadyResponse:
        return pb.ModelReadyResponse(ready=True)


def main(port: int, file: str) -> None:
    ending = threading.Event()
    # Not whatever cluster there is in this machine: serve.shutdown would end what that serves.
    ray.init("local", include_dashboard=False, object_store_memory=100 << 20, _node_ip_address="127.0.0.1")
    signal.signal(signal.SIGTERM, lambda number, frame: ending.set())
    service = "paceline.protos.inference_pb2_grpc.add_GRPCInferenceServiceServicer_to_server"
    serve.start(
        http_options={"host": "127.0.0.1", "port": port + 1},
        grpc_options=gRPCOptions(port=port, grpc_servicer_functions=[service]),
    )
    serve.run(Onnx.bind(file))
    ending.wait()
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[3])
