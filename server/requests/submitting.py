"""Handing checked requests to their model's batcher.

Lives here: what the batcher is told about a request, whether it comes alone, in parts or with others like it. Must not:
do what comes before (checks: `codec`) or after (`inference`), or wait for anything.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

from paceline.backends.remote_messages import RemoteRequest
from paceline.backends.spec import Tensors
from paceline.scheduler.batch_queue import Alike
from paceline.scheduler.pending import Pending
from paceline.server.codec.codec import memory_bytes
from paceline.server.codec.decoded import DecodedRequest
from paceline.server.codec.open_codec import OpenCodec
from paceline.server.codec.passing import PassedOn
from paceline.server.codec.short_way import AlikeRequests, Targets
from paceline.server.codec.splitting import submit_parts
from paceline.server.memory.region_tensors import Inputs, TargetedInputs
from paceline.server.models.repository import ServedModel
from paceline.server.requests.in_flight import InFlight

__all__ = ["submit", "submit_alike", "submit_remote"]


# hot path: see bench/
def submit(flight: InFlight, model: ServedModel, decoded: DecodedRequest, arrived_ns: int) -> asyncio.Future[Any]:
    """Hand the request, which arrived at `arrived_ns` (0: now), to the batcher. Returns the batcher's future, or a task
    of `submit_parts` if the request is split."""
    options, inputs, targets = decoded.options, decoded.inputs, decoded.targets
    keywords = _submit_keywords(flight, decoded)
    if 0 < model.max_batch_rows < options.rows:
        whole = asyncio.ensure_future(submit_parts(model.batcher, inputs, options.rows, options.key, **keywords))
        model.in_parts(whole)
        return whole
    payload = _with_targets(model, inputs, targets)
    return model.batcher.submit(payload, options.rows, options.key, arrived_ns=arrived_ns, **keywords)


# hot path: see bench/
def submit_alike(flights: Sequence[InFlight], model: ServedModel, alike: AlikeRequests) -> Sequence[Pending[Any, Any]]:
    """The same for consecutive requests that ask for the same. Takes none of them if one may have to be refused or was
    withdrawn. Then each is to be submitted by itself: `submit` has the error texts."""
    if any(flight.gone or flight.cancelled for flight in flights):
        return ()
    options, inputs, targets = alike
    if model.writes_outputs and any(targets):
        inputs = [_with_targets(model, *tensors) for tensors in zip(inputs, targets, strict=True)]
    parameters = options.parameters
    return model.batcher.submit_alike(
        inputs,
        Alike(options.rows, options.key, options.size_bytes, parameters.priority, parameters.timeout_ns),
        [flight.began_ns for flight in flights],
        [flight.deadline_ns for flight in flights],
    )


def _with_targets(model: ServedModel, inputs: Inputs, targets: Targets) -> Inputs:
    """`inputs`, with `targets` if an output belongs on a GPU: it is left or written there on the instance's thread,
    which has to know."""
    if targets and model.writes_outputs and any(one.region.kind == "cuda" for one in targets.values()):
        return TargetedInputs.to(targets, inputs)
    return inputs


def submit_remote(
    flight: InFlight, model: ServedModel, decoded: DecodedRequest, passed_on: PassedOn, arrived_ns: int
) -> asyncio.Future[Any]:
    """The same for a model that another server executes. `passed_on` goes along: what that server needs besides
    tensors."""
    # Inputs are never in shared memory here: that and another server exclude each other.
    options, inputs = decoded.options, cast("Tensors", decoded.inputs)
    payload = RemoteRequest(
        inputs, options.outputs, flight.deadline_ns, flight.request.id, *passed_on, spec=options.spec
    )
    key = options.key, passed_on.key
    keywords = _submit_keywords(flight, decoded)
    if 0 < model.max_batch_rows < options.rows:
        parts = submit_parts(
            model.batcher,
            inputs,
            options.rows,
            key,
            join=model.codec.join if isinstance(model.codec, OpenCodec) else None,
            payload_of=lambda inputs: payload._replace(inputs=inputs, id=""),
            **keywords,
        )
        whole = asyncio.ensure_future(parts)
        model.in_parts(whole)
        return whole
    return model.batcher.submit(payload, options.rows, key, arrived_ns=arrived_ns, **keywords)


def _submit_keywords(flight: InFlight, decoded: DecodedRequest) -> dict[str, Any]:
    """The keyword arguments of `Batcher.submit` for any request, whole or in parts."""
    parameters, known_bytes = decoded.options.parameters, decoded.options.size_bytes
    return {
        "size_bytes": known_bytes if known_bytes >= 0 else sum(map(memory_bytes, decoded.inputs)),
        "priority": parameters.priority,
        "timeout_ns": parameters.timeout_ns,
        "rpc_deadline_ns": flight.deadline_ns,
        "tag": flight.watch,
    }
