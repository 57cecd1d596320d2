"""Writes outputs to CUDA shared memory that the instance hasn't left there itself, on the instance's thread.

Lives here: what stands between an instance and the batcher if clients' shared memory is allowed. Must not: make error
texts for outputs that don't fit or can't be written; what isn't written here is left to the codec, like the outputs of
split requests. The rule: the event loop doesn't wait for a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from time import monotonic_ns
from typing import cast

import numpy as np

from paceline.backends.base import DeviceTensor, Execution
from paceline.backends.spec import Array, Tensors
from paceline.server.errors import GpuLost, InvalidRequest
from paceline.server.memory.reading import ExecuteInputs
from paceline.server.memory.region_tensors import Inputs, TargetedInputs

__all__ = ["writing_outputs"]


def writing_outputs(execute: ExecuteInputs) -> ExecuteInputs:
    """Wrap `execute` for requests that say where outputs belong. Results have to be rows (`ModelSpec.by_rows`)."""

    def execute_and_write(requests: Sequence[Inputs], padded_rows: int) -> Execution:
        done = execute(requests, padded_rows)
        # hot path for those who want their outputs in the response
        if not any(type(inputs) is TargetedInputs for inputs in requests):
            return done
        began_ns = monotonic_ns()
        results = [_left(inputs, result) for inputs, result in zip(requests, done.results, strict=True)]
        return replace(done, results=results, output_ns=done.output_ns + monotonic_ns() - began_ns)

    return execute_and_write


def _left(inputs: Inputs, result: Tensors | Exception) -> Tensors | Exception:
    """`result`, with a DeviceTensor for each output that is in its place now. Unchanged if any output with a target
    doesn't fit, is text or can't be written."""
    if not isinstance(inputs, TargetedInputs) or isinstance(result, Exception):
        return result
    targets = inputs.targets
    rest = {index: array for index in targets if not isinstance(array := result[index], DeviceTensor)}
    if any(array.dtype.hasobject or array.nbytes > targets[index].byte_size for index, array in rest.items()):
        return result
    left = list(result)
    for index, array in rest.items():
        region, offset = targets[index].region, targets[index].offset
        if region.kind != "cuda":
            continue
        try:
            region.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data, offset)
        except (InvalidRequest, GpuLost):
            return result
        left[index] = cast("Array", DeviceTensor(region, 0, array.dtype, array.shape))
    return left
