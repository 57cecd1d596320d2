"""One inference request, from message to message, whichever RPC brought it.

Lives here: the order of the steps. Must not: checks (codec), look-ups (repository), waiting policy (batcher) or what
belongs to one RPC alone.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import Any, cast

from backends.base import Tensors
from backends.remote_messages import RemoteRequest
from protos import inference_pb2 as pb
from scheduler.observer import Drop
from scheduler.pending import Pending
from server.batch_facts import tell_facts, told_facts
from server.calls import NOTHING_SENT, Sent, TraceParent, leaves_by
from server.codec import AnyResponse, tensor_bytes
from server.decoded import DecodedRequest
from server.errors import ServerStopping
from server.log import debugging
from server.open_codec import OpenCodec
from server.passing import NOTHING_CARRIED, Carried, carried_by
from server.quiet import until_quiet
from server.region_tensors import Directed
from server.repository import Repository, ServedModel
from server.shortcuts import Envelope
from server.splitting import submit_parts
from server.started import Call, Started
from server.tracing import Tracer
from server.watching import RequestWatch
from server.wire_request import AnyRequest

__all__ = ["AnyPending", "Inference"]

_NAMELESS = pb.ModelInferRequest()

AnyPending = Pending[Any, Any]


class Inference:
    """Answers inference requests while `serving`; while it is `ready` they should come. `tracer` may want to know
    when."""

    def __init__(self, repository: Repository, tracer: Tracer | None = None) -> None:
        self._repository = repository
        self._tracer = tracer or Tracer()
        self._spans = self._tracer.spans
        self.serving = self.ready = False
        self._refused = 0

    @property
    def reads_parents(self) -> bool:
        """Whether the `parent` of a request makes any difference; if not, nobody needs to look for it."""
        return self._spans is not None

    # hot path: see bench/
    async def infer(
        self,
        request: AnyRequest,
        rpc_deadline_ns: int,
        parent: TraceParent | None = None,
        sent: Sent = NOTHING_SENT,
    ) -> AnyResponse:
        """The answer to `request`, whose caller gives up at `rpc_deadline_ns` on the monotonic clock, and traces it as
        part of `parent`. `sent` are headers for another server, should one execute it.

        Cancelling it takes the request out of the queue. Raises what `server.errors` has a status for.
        """
        began_ns = time.monotonic_ns()
        call = Call(self, partial(self.start, request, rpc_deadline_ns, parent, sent, began_ns))
        self.announce(request, call.start)
        try:
            await call
            return call.answer()
        except asyncio.CancelledError:
            call.give_up()
            raise
        finally:
            # An error has a traceback, that this frame, and this frame, by the call, would have what the request used:
            # shared memory would stay open until the garbage collector comes by.
            del call

    # hot path: see bench/
    def announce(self, request: AnyRequest, start: Callable[[], None]) -> None:
        """`start`, which mustn't raise, will `start` the request: have it called when it is time for that."""
        model = self._repository.find(request.model_name, request.model_version)
        if model is None or not self.serving:
            start()
        else:
            model.batcher.announce(start)

    # hot path: see bench/
    def start(
        self,
        request: AnyRequest,
        rpc_deadline_ns: int,
        parent: TraceParent | None,
        sent: Sent,
        began_ns: int,
    ) -> Started:
        """Check `request`, which came at `began_ns`, and hand it to its model's batcher. Raises what is found now; the
        rest `finish` does."""
        watch = (
            RequestWatch(request, parent, self._spans, began_ns) if self._spans is not None or debugging.on else None
        )
        model = None
        try:
            if not self.serving:
                raise self._refusal(self._repository.find(request.model_name, request.model_version))
            model = self._repository.get(request.model_name, request.model_version)
            decoded = model.codec.decode(request)
            if decoded.asked.parameters.deadline_ns:
                own_ns = leaves_by(decoded.asked.parameters.deadline_ns / 1e9, began_ns)
                rpc_deadline_ns = min(rpc_deadline_ns, own_ns)
            if watch is not None:
                watch.on_taken(model.version, decoded.asked.rows)
            if model.remote:
                carried = carried_by(request, sent)
                pending = _submit_remote(model, request.id, decoded, rpc_deadline_ns, watch, carried, began_ns)
            else:
                pending = _submit(model, decoded, rpc_deadline_ns, watch, began_ns)
        except Exception as error:
            if model is not None:
                model.statistics.on_failure(error, time.monotonic_ns() - began_ns)
            if watch is not None:
                watch.on_failure(error)
            raise
        return Started(request, model, decoded, pending, began_ns, watch)

    # hot path: see bench/
    def take(
        self,
        model: ServedModel,
        decoded: DecodedRequest,
        request_id: str,
        rpc_deadline_ns: int,
        parent: TraceParent | None,
        began_ns: int,
        carried: Carried = NOTHING_CARRIED,
    ) -> Started:
        """As `start`, for a request that was looked up and checked elsewhere, from `began_ns` on. `carried` is for
        another server, should one execute it."""
        request, watch = pb.ModelInferRequest(id=request_id) if request_id else _NAMELESS, None
        if self._spans is not None or debugging.on:
            request = pb.ModelInferRequest(model_name=model.name, model_version=model.version, id=request_id)
            watch = RequestWatch(request, parent, self._spans, began_ns)
            watch.on_taken(model.version, decoded.asked.rows)
        if not self.serving:
            refusal = self._refusal(model)
            if watch is not None:
                watch.on_failure(refusal)
            raise refusal
        try:
            if model.remote:
                pending = _submit_remote(model, request_id, decoded, rpc_deadline_ns, watch, carried, 0)
            else:
                pending = _submit(model, decoded, rpc_deadline_ns, watch, 0)
        except Exception as error:
            model.statistics.on_failure(error, time.monotonic_ns() - began_ns)
            if watch is not None:
                watch.on_failure(error)
            raise
        return Started(request, model, decoded, pending, began_ns, watch)

    # hot path: see bench/
    def finish(self, started: Started, envelope: Envelope | None = None) -> AnyResponse:
        """The answer, once `started.pending` is done; bytes in `envelope`. Raises what came instead.
        The caller must not keep `started`: what was raised would keep it."""
        pending = started.pending
        try:
            results = pending.result()
            if not isinstance(pending, Pending):
                results, pending = results
            model, decoded = started.model, started.decoded
            answer = model.codec.encode(started.request, decoded, results, envelope)
            if decoded.asked.parameters.batch_info and isinstance(answer, pb.ModelInferResponse) and pending.facts:
                tell_facts(answer, model.batch_id_prefix, told_facts(pending.facts))
        except BaseException as error:
            started.on_failure(error)
            raise
        else:
            self._on_success(started, pending)
            return answer
        finally:
            del started, pending  # an error leads to this frame, and it mustn't lead back to the error

    # hot path: see bench/
    def finish_as(self, started: Started, send: Callable[[Started, Tensors, AnyPending], None]) -> None:
        """As `finish`, for an answer of another form: `send` gets the results and what knows the facts of them, and
        raises what comes instead."""
        pending = started.pending
        try:
            results = pending.result()
            if not isinstance(pending, Pending):
                results, pending = results
            send(started, results, pending)
        except BaseException as error:
            started.on_failure(error)
            raise
        else:
            self._on_success(started, pending)
        finally:
            del started, pending  # an error leads to this frame, and it mustn't lead back to the error

    def give_up(self, started: Started) -> None:
        """Instead of `finish`: nobody waits for the answer any more."""
        started.pending.cancel()
        started.on_failure(asyncio.CancelledError())

    def check_serving(self) -> None:
        """Raises ServerStopping, and counts it, while nothing is taken."""
        if not self.serving:
            raise self._refusal(None)

    async def refuse_until_quiet(self) -> None:
        """Refuse requests until hardly any come, a second at most."""
        self.serving = self.ready = False
        await until_quiet(lambda: self._refused)

    def _on_success(self, started: Started, pending: AnyPending) -> None:
        """Count the request as one that has its answer."""
        model = started.model
        model.statistics.on_success(time.monotonic_ns() - started.began_ns)
        if started.watch is not None:
            started.watch.on_success(pending.facts)
        if self._tracer.active and (facts := pending.facts) is not None:
            self._tracer.record(model.name, model.version, started.request.id, started.began_ns, facts)

    def _refusal(self, model: ServedModel | None) -> ServerStopping:
        """What a request, or a call that hasn't brought one yet, gets once the server stops; counted as its model's if
        there is one."""
        self._refused += 1
        error = ServerStopping()
        if model is not None:
            model.statistics.on_drop(Drop.CLOSED)
            model.statistics.on_failure(error, 0)
        return error


# hot path: see bench/
def _submit(
    model: ServedModel, decoded: DecodedRequest, rpc_deadline_ns: int, watch: RequestWatch | None, arrived_ns: int
) -> asyncio.Future[Any]:
    """Have the batcher run the request, which came at `arrived_ns` (0: now): what it gives back, or for a request that
    is split a task of `submit_parts`."""
    asked, inputs, targets = decoded.asked, decoded.inputs, decoded.targets
    if 0 < model.max_batch_rows < asked.rows:
        how = _how(model, decoded, rpc_deadline_ns, watch)
        whole = asyncio.ensure_future(submit_parts(model.batcher, inputs, asked.rows, asked.key, **how))
        model.in_parts(whole)
        return whole
    if targets and model.leaves_outputs and any(one.region.kind == "cuda" for one in targets.values()):
        inputs = Directed.to(targets, inputs)
    parameters = asked.parameters
    return model.batcher.submit(
        inputs,
        asked.rows,
        asked.key,
        size_bytes=_size_bytes(decoded) if model.counts_bytes else 0,
        priority=parameters.priority,
        timeout_ns=parameters.timeout_ns,
        rpc_deadline_ns=rpc_deadline_ns,
        tag=watch,
        arrived_ns=arrived_ns,
    )


def _size_bytes(decoded: DecodedRequest) -> int:
    known = decoded.asked.size_bytes
    return known if known >= 0 else sum(map(tensor_bytes, decoded.inputs))


def _submit_remote(
    model: ServedModel,
    request_id: str,
    decoded: DecodedRequest,
    rpc_deadline_ns: int,
    watch: RequestWatch | None,
    carried: Carried,
    arrived_ns: int,
) -> asyncio.Future[Any]:
    """The same for a model that another server executes: what else than tensors that needs to know goes along."""
    # Never in shared memory: that and another server exclude each other.
    asked, inputs = decoded.asked, cast("Tensors", decoded.inputs)
    payload = RemoteRequest(inputs, asked.outputs, rpc_deadline_ns, request_id, *carried, spec=asked.spec)
    key = asked.key, carried.key
    how = _how(model, decoded, rpc_deadline_ns, watch)
    if 0 < model.max_batch_rows < asked.rows:
        parts = submit_parts(
            model.batcher,
            inputs,
            asked.rows,
            key,
            join=model.codec.join if isinstance(model.codec, OpenCodec) else None,
            payload_of=lambda inputs: payload._replace(inputs=inputs, id=""),
            **how,
        )
        whole = asyncio.ensure_future(parts)
        model.in_parts(whole)
        return whole
    return model.batcher.submit(payload, asked.rows, key, arrived_ns=arrived_ns, **how)


def _how(
    model: ServedModel, decoded: DecodedRequest, rpc_deadline_ns: int, watch: RequestWatch | None
) -> dict[str, Any]:
    parameters = decoded.asked.parameters
    return {
        "size_bytes": _size_bytes(decoded) if model.counts_bytes else 0,
        "priority": parameters.priority,
        "timeout_ns": parameters.timeout_ns,
        "rpc_deadline_ns": rpc_deadline_ns,
        "tag": watch,
    }
