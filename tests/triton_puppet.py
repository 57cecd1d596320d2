"""A Python model written for Triton that runs what its requests say, for tests of what happens then.

Lives here: its source, and making a repository of it. Must not: assertions.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["SOURCE", "TENSORS", "write"]

SOURCE = """
import asyncio, json, os, threading
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.args = args
        self.decoupled = pb_utils.using_decoupled_model_transaction_policy(json.loads(args["model_config"]))
        self.kept, self.returns = [], None

    def execute(self, requests):
        self.batch, self.requests = len(requests), requests
        responses = [self.run(request) for request in requests]
        returns, self.returns, self.requests = self.returns, None, None
        return returns(responses) if returns else None if self.decoupled else responses

    def run(self, request):
        def answer(value=0, **more):
            return pb_utils.InferenceResponse([pb_utils.Tensor("y", np.array([[value]], np.int64))], **more)

        def text(value):
            return pb_utils.InferenceResponse([
                pb_utils.Tensor("y", np.array([[0]], np.int64)), pb_utils.Tensor("z", np.array([[value]], np.object_)),
            ])

        def thread(function):
            threading.Thread(target=function).start()

        def error(message, code=pb_utils.TritonError.INTERNAL):
            return pb_utils.InferenceResponse(error=pb_utils.TritonError(message, code))

        final = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
        scope = {**globals(), **locals(), "model": self, "response": None}
        exec(json.loads(request.parameters()).get("run", "response = answer(1)"), scope)
        return scope["response"]
"""

TENSORS = """
input { name: "x" data_type: TYPE_INT64 dims: [ 1 ] }
output { name: "y" data_type: TYPE_INT64 dims: [ 1 ] }
output { name: "z" data_type: TYPE_STRING dims: [ 1 ] }
"""


def write(root: Path, config: str = "max_batch_size: 8 dynamic_batching { }", source: str = SOURCE) -> Path:
    """Model `m` in the repository `root`. A request's parameter `run` is code that may set `response`; it finds
    `request`, `model`, `pb_utils`, `answer(value)`, `text(value)`, `error(message, code)`, `final` and
    `thread(function)`. Its folder."""
    folder = root / "m"
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.py").write_text(source)
    if config:
        (folder / "config.pbtxt").write_text(f'backend: "python" {config}')
    return folder
