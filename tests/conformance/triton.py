"""tritonclient as the tests use it: both clients behind one interface, conversions between arrays and its objects, and
readings of a server's metrics."""

from __future__ import annotations

import asyncio
import functools
import inspect
import queue
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tritonclient.grpc as triton
from tritonclient.utils import np_to_triton_dtype

from tests.harness import ServerProcess

__all__ = ["Callbacks", "Triton", "assert_same_bits", "executed", "outputs_of", "tensors", "wait_for_queued", "wanted"]

Array = np.ndarray[Any, np.dtype[Any]]


class Triton:
    """Either client; the blocking one is called in a thread, so that both can be awaited."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._client, name)
        return method if inspect.iscoroutinefunction(method) else functools.partial(asyncio.to_thread, method)


class Callbacks:
    """The callback for `async_infer`; `next` waits for the result and error of one call."""

    def __init__(self) -> None:
        self._called: queue.Queue[tuple[Any, Any]] = queue.Queue()

    def __call__(self, result: Any, error: Any) -> None:
        self._called.put((result, error))

    @property
    def none_yet(self) -> bool:
        return self._called.empty()

    def next(self) -> tuple[Any, Any]:
        return self._called.get(timeout=20)


def tensors(arrays: Mapping[str, Array]) -> list[triton.InferInput]:
    """One input per array, of the array's own datatype and shape."""
    made = []
    for name, array in arrays.items():
        made.append(triton.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype)))
        made[-1].set_data_from_numpy(array)
    return made


def wanted(*names: str) -> list[triton.InferRequestedOutput]:
    return [triton.InferRequestedOutput(name) for name in names]


def outputs_of(result: triton.InferResult) -> dict[str, Array]:
    """All outputs, in the order of the response."""
    return {output.name: result.as_numpy(output.name) for output in result.get_response().outputs}


def assert_same_bits(got: Mapping[str, Array], expected: Mapping[str, Array]) -> None:
    """The same names in the same order, and for each the same datatype, shape and bits."""
    assert list(got) == list(expected)
    for name, array in expected.items():
        assert (got[name].dtype, got[name].shape) == (array.dtype, array.shape), name
        assert _bits(got[name]) == _bits(array), f"{name}: expected {array}, got {got[name]}"


def executed(server: ServerProcess, model: str) -> tuple[int, int]:
    """Batches and rows that the server has executed for `model` so far."""
    metrics, labels = server.metrics(), f'{{model="{model}",version="1"}}'
    return int(metrics[f"nv_inference_exec_count{labels}"]), int(metrics[f"nv_inference_count{labels}"])


def wait_for_queued(server: ServerProcess, model: str, requests: int, timeout_s: float = 20) -> None:
    """Return once exactly so many requests of `model` wait in the server's queue."""
    name, end = f'nv_inference_pending_request_count{{model="{model}",version="1"}}', time.monotonic() + timeout_s
    while (queued := server.metrics()[name]) != requests:
        assert time.monotonic() < end, f"expected {requests} requests in the queue of '{model}', got {queued:.0f}"


def _bits(array: Array) -> bytes | Sequence[Any]:
    # An object array's own bytes are addresses.
    return array.tolist() if array.dtype == object else array.tobytes()
