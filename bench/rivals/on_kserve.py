"""KServe's Python SDK: `on_kserve.py PORT NAME FILE DIMS OUTPUT_DIMS`, until SIGTERM.

Written as its users would: a Model with `predict`, which the SDK calls on its event loop. It has no batching.
"""

import sys
from typing import Any

import onnxruntime as ort
from kserve import InferOutput, InferRequest, InferResponse, Model, ModelServer


class Onnx(Model):
    def __init__(self, name: str, file: str) -> None:
        super().__init__(name)
        self._file = file

    def load(self) -> bool:
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        self._session = ort.InferenceSession(self._file, options, providers=["CPUExecutionProvider"])
        self.ready = True
        return self.ready

    def predict(self, payload: InferRequest, headers: Any = None) -> InferResponse:
        (output,) = self._session.run(None, {"INPUT0": payload.inputs[0].as_numpy()})
        encoded = InferOutput(name="OUTPUT0", shape=list(output.shape), datatype="FP32")
        encoded.set_data_from_numpy(output)
        return InferResponse(payload.id, self.name, [encoded])


def main(port: int, name: str, file: str) -> None:
    model = Onnx(name, file)
    model.load()
    ModelServer(grpc_port=port, http_port=port + 1, workers=1).start([model])


if __name__ == "__main__":
    arguments = sys.argv[1:]
    sys.argv = sys.argv[:1]  # the SDK parses them itself when it starts
    main(int(arguments[0]), arguments[1], arguments[2])
