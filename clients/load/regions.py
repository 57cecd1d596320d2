"""Inputs and outputs in the host's shared memory, which the server reads and writes: messages then hold only names.

Lives here: one object of shared memory for all requests of a load. Must not: send the load. The server has to be on
this machine. Requests with the same contents that are under way at the same time have one room for their outputs, in
which they overwrite each other; nobody reads them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.shared_memory import SharedMemory
from typing import Any

from paceline.clients.errors import InferenceError
from paceline.clients.load.control import ControlClient
from paceline.protos import inference_pb2 as pb


@contextmanager
def in_shared_memory(
    client: ControlClient, requests: Sequence[pb.ModelInferRequest], is_stream: bool = False
) -> Iterator[list[pb.ModelInferRequest]]:
    """The same requests, with their tensors in memory that the server knows as long as the context lasts. Each is sent
    once before, over a stream if the load is, to learn how large its outputs are. Raises InferenceError, as of a server
    that doesn't allow it."""
    sizes = [client.output_sizes(request, is_stream) for request in requests]
    size = sum(sum(map(len, request.raw_input_contents)) for request in requests)
    size += sum(sum(output.values()) for output in sizes)
    # One byte more than all tensors: offsets have to be within it, also that of an empty tensor after all others.
    memory = SharedMemory(create=True, size=size + 1)
    name = f"paceline-load-{memory.name}"
    try:
        client.register(name, f"/{memory.name}", memory.size)
        yield list(_placed(requests, sizes, name, memory))
    finally:
        # A signal may come when the server has registered it and hasn't said so. No other region has that name. A
        # server that has ended since, or was started anew, doesn't know it, which mustn't hide what the load has met.
        try:
            with suppress(InferenceError):
                client.unregister(name)
        finally:
            memory.close()
            memory.unlink()


def _placed(
    requests: Sequence[pb.ModelInferRequest], sizes: Sequence[dict[str, int]], region: str, memory: Any
) -> Iterator[pb.ModelInferRequest]:
    at = 0

    def place(tensor: Any, size: int) -> None:
        nonlocal at
        tensor.parameters["shared_memory_region"].string_param = region
        tensor.parameters["shared_memory_byte_size"].int64_param = size
        tensor.parameters["shared_memory_offset"].int64_param = at
        at += size

    for request, outputs in zip(requests, sizes, strict=True):
        placed = pb.ModelInferRequest()
        placed.CopyFrom(request)
        for tensor, raw in zip(placed.inputs, request.raw_input_contents, strict=True):
            memory.buf[at : at + len(raw)] = raw
            place(tensor, len(raw))
        placed.ClearField("raw_input_contents")
        placed.ClearField("outputs")
        for name, size in outputs.items():
            place(placed.outputs.add(name=name), size)
        yield placed
