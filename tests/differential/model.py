"""A model that Triton's Python backend and ours both run: its folder is the same for both.

`parameters` of its configuration select what it does. `does` is `echo` (output i is input i, the default; empty if that
was left out), `pair` (sum and difference of two inputs), `version` (adds its version number) or `not load`; `delay_ms`
is how long it takes; with `fails`, it raises if an element is -1.
"""

import json
import time
from pathlib import Path

import numpy as np

try:
    import triton_python_backend_utils as triton
except ImportError:
    triton = None


class Work:
    """Arrays by name in, arrays by name out, for both servers."""

    def __init__(self, parameters, version):
        self.does = parameters.get("does", "echo")
        self.delay_s = float(parameters.get("delay_ms", 0)) / 1000
        self.fails = "fails" in parameters
        # Name and datatype of each output.
        self.outputs = dict(output.split(":") for output in parameters["outputs"].split())
        self.version = int(version)
        if self.does == "not load":
            raise RuntimeError("not today")

    def __call__(self, inputs):
        time.sleep(self.delay_s)
        if self.fails and any((array == -1).any() for array in inputs.values()):
            raise ValueError("less than nothing")
        if self.does == "pair":
            a, b = inputs["INPUT0"], inputs["INPUT1"]
            return {"OUTPUT0": a + b, "OUTPUT1": a - b}
        if self.does == "version":
            return {"OUTPUT0": inputs["INPUT0"] + np.float32(self.version)}
        rows = len(next(iter(inputs.values())))
        empty = {name: np.zeros((rows, 0), dtype) for name, dtype in self.outputs.items()}
        return {name: inputs.get(name.replace("OUTPUT", "INPUT"), empty[name]) for name in self.outputs}


def parameters_of(config):
    return {key: value["string_value"] for key, value in config["parameters"].items()}


class TritonPythonModel:
    """Triton's interface: requests one by one, even those of a batch."""

    def initialize(self, args):
        self.work = Work(parameters_of(json.loads(args["model_config"])), args["model_version"])

    def execute(self, requests):
        return [triton.InferenceResponse(self.answer(request)) for request in requests]

    def answer(self, request):
        outputs = self.work({tensor.name(): tensor.as_numpy() for tensor in request.inputs()})
        return [triton.Tensor(name, outputs[name]) for name in outputs if name in request.requested_output_names()]


class Model:
    """paceline's interface: all rows of a batch at once."""

    def load(self, context):
        self.work = Work(context.parameters, Path(context.folder).name)

    def execute(self, inputs):
        return self.work(inputs)
