"""A transformer as KServe's users write one: doubles the input, and adds one to the output.

Takes the flags that KServe gives a transformer, and calls its predictor with KServe's own client.
"""

import argparse
from typing import Any

from kserve import InferInput, InferRequest, InferResponse, Model, ModelServer, model_server


class Doubling(Model):
    def preprocess(self, payload: InferRequest, headers: Any = None) -> InferRequest:
        (given,) = payload.inputs
        tensor = InferInput(given.name, list(given.shape), "FP32")
        tensor.set_data_from_numpy(given.as_numpy().astype("float32") * 2)
        return InferRequest(model_name=self.name, infer_inputs=[tensor], request_id=payload.id)

    def postprocess(self, result: InferResponse, headers: Any = None, response_headers: Any = None) -> InferResponse:
        (output,) = result.outputs
        output.set_data_from_numpy(output.as_numpy() + 1, binary_data=False)
        return result


if __name__ == "__main__":
    given, _ = argparse.ArgumentParser(parents=[model_server.parser], conflict_handler="resolve").parse_known_args()
    model = Doubling(given.model_name)
    model.ready = True
    ModelServer(workers=1).start([model])
