"""A checked request, as its codec returns it and as the batcher and the codec's `encode` take it.

Lives here: the values. Must not: check anything (`server.codec.codec`).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass

from paceline.backends.remote_messages import RemoteRequest
from paceline.backends.spec import ModelSpec
from paceline.server.codec.parameters import RequestParameters
from paceline.server.memory.client_memory import NOWHERE
from paceline.server.memory.region_tensors import Inputs, Span

__all__ = ["DecodedRequest", "Payload", "RequestOptions"]

Payload = Inputs | RemoteRequest
"""What a model's batcher takes: the inputs or, for another server, also what else it has to know."""


@dataclass(slots=True)
class RequestOptions:
    """What a request asks for, apart from its tensors. Requests of equal `key` may share a batch. `outputs` are the
    indices of the wanted outputs, in the order asked for; `classes` has, by index, those of which only some classes are
    wanted, and how many. `spec` describes the request's tensors if its model doesn't. `size_bytes` is the size of all
    its inputs, -1 if that has to be counted. `plain`: nothing but raw outputs is wanted."""

    rows: int
    key: Hashable
    outputs: tuple[int, ...]
    parameters: RequestParameters
    classes: Mapping[int, int] | None = None
    spec: ModelSpec | None = None
    size_bytes: int = -1
    plain: bool = True


class DecodedRequest:
    """A request that fits its model.

    `inputs` are in the spec's order, views of the message where the datatype allows, or still in shared memory.
    `targets` says, by index, which outputs belong in shared memory, and where.
    """

    __slots__ = ("inputs", "options", "targets")

    def __init__(self, inputs: Inputs, options: RequestOptions, targets: Mapping[int, Span] = NOWHERE) -> None:
        self.inputs = inputs
        self.options = options
        self.targets = targets
