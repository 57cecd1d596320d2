"""MLServer with its adaptive batching: `on_mlserver.py PORT NAME FILE DIMS OUTPUT_DIMS`, until SIGTERM.

Written as its users would: a custom runtime of a few lines, batches of up to 64 requests or what arrives in 5 ms. Its
default, a worker process beside the server, is kept.
"""

import asyncio
import sys

import onnxruntime as ort
from mlserver import MLModel, MLServer, ModelSettings, Settings
from mlserver.codecs import NumpyCodec
from mlserver.types import InferenceRequest, InferenceResponse


class Onnx(MLModel):
    async def load(self) -> bool:
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        self._session = ort.InferenceSession(self.settings.parameters.uri, options, providers=["CPUExecutionProvider"])
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        rows = NumpyCodec.decode_input(payload.inputs[0])
        (output,) = self._session.run(None, {"INPUT0": rows})
        encoded = NumpyCodec.encode_output("OUTPUT0", output)
        return InferenceResponse(model_name=self.name, outputs=[encoded])


async def main(port: int, name: str, file: str) -> None:
    settings = Settings(
        host="127.0.0.1",
        http_port=port + 1,
        grpc_port=port,
        metrics_endpoint=None,
        debug=False,
        grpc_max_message_length=-1,
    )
    server = MLServer(settings)
    model = ModelSettings(
        name=name,
        implementation="on_mlserver.Onnx",
        parameters={"uri": file},
        max_batch_size=64,
        max_batch_time=0.005,
    )
    await server.start([model])


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), sys.argv[2], sys.argv[3]))
