"""A request with more rows than a batch may have, executed in parts and joined again.

For models whose configuration has `paceline.split_oversized`. The parts are views; the joined outputs are one copy.

Lives here: cutting, submitting the parts while there is room, joining. Must not: decide which requests are split.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from paceline.backends.open_request import OpenRequest
from paceline.backends.remote_messages import RemoteRequest
from paceline.backends.spec import Tensors
from paceline.scheduler.answering import notify
from paceline.scheduler.batcher import Batcher
from paceline.scheduler.policy import BatchPolicy
from paceline.scheduler.request import AnyRequest, Request
from paceline.server.codec.remote import joined
from paceline.server.models.ensemble_config import Runnable
from paceline.server.requests.in_flight import Payload

WholeRequest = Request[Payload, Tensors]

_MANY = 2**31

_Join = Callable[[Sequence[Any], Sequence[int]], Any]  # results as another server returns them, of unknown tensors


class Parts:
    """Executes the request `whole` in parts as large as batches may be; to the request it stands for the batcher.

    `join` joins results that aren't plain arrays; it also gets the rows of each part. If a part fails, the request
    fails with its error, and the other parts are cancelled. `task` ends when all parts have.
    """

    def __init__(self, whole: WholeRequest, batcher: Batcher[Payload, Tensors], join: _Join | None = None) -> None:
        self._whole = whole
        whole.batcher = self
        self.task = asyncio.ensure_future(_execute(whole, batcher, join))
        self.task.add_done_callback(self._on_end)

    def on_cancel(self, request: AnyRequest) -> None:
        self.task.cancel()

    def _on_end(self, task: asyncio.Task[tuple[Tensors, AnyRequest]]) -> None:
        whole, error = self._whole, None if task.cancelled() else task.exception()
        if task.cancelled():
            whole.cancel()
        elif whole.done():
            pass  # it was cancelled, and its parts have ended nevertheless
        elif error is not None:
            whole.fail(error)
        else:
            results, last = task.result()
            # Those of the last part.
            whole.batch_facts, whole.waited_ns = last.batch_facts, last.waited_ns
            whole.succeed(results)
        whole.batcher = None  # which leads back to it
        del error, task, self  # the error leads to this frame, which must not lead back to it
        notify([whole])


async def _execute(
    whole: WholeRequest, batcher: Batcher[Payload, Tensors], join: _Join | None
) -> tuple[Tensors, AnyRequest]:
    """The joined results, and the last part."""
    payload = whole.payload
    limit, rows = batcher.policy.max_batch_rows, whole.rows
    shares = [min(limit, rows - start) for start in range(0, rows, limit)]
    parts: list[AnyRequest] = []
    ended = asyncio.Event()
    try:
        for start, share in zip(range(0, rows, limit), shares, strict=True):
            part: AnyRequest = Request(
                _rows_of(payload, start, start + share),
                share,
                whole.key,
                size_bytes=whole.size_bytes * share // rows,
                sizes=whole.sizes,
                priority=whole.priority,
                timeout_ns=whole.timeout_ns,
                deadline_ns=whole.deadline_ns,
                tag=whole.tag,
            )
            part.on_answers = lambda requests: ended.set()
            await _until_fewer(_parts_at_once(batcher.policy, part.size_bytes, part.priority), parts, ended)
            for refusal in batcher.submit([part]):
                if refusal is not None:
                    raise refusal
            parts.append(part)
        await _until_fewer(1, parts, ended)
        results = [one.value for one in parts]
    except BaseException:
        while parts:
            parts.pop().cancel()
        # The error's traceback has this frame, which must not lead back to the error, and keep shared memory open.
        part = whole = None  # type: ignore[assignment]
        payload = ()
        raise
    joint = join(results, shares) if join else [joined(*column) for column in enumerate(zip(*results, strict=True))]
    return joint, parts[-1]


def _rows_of(payload: Payload, start: int, stop: int) -> Payload:
    """These rows of each input; views. Of a request to another server, the parts have no id."""
    assert not isinstance(payload, (OpenRequest, Runnable))  # such a model's configuration may not ask for parts
    if isinstance(payload, RemoteRequest):
        return payload._replace(inputs=tuple(array[start:stop] for array in payload.inputs), id="")
    return tuple(array[start:stop] for array in payload)


def _parts_at_once(policy: BatchPolicy, bytes_of_part: int, priority: int) -> int:
    """How many parts fit into an empty queue: a request must not be refused for the room that it takes up itself."""
    bounds = (
        policy.queue_policy(policy.level_of(priority)).max_queue_size,
        policy.limits.max_rows and max(1, policy.limits.max_rows // policy.max_batch_rows),
        policy.limits.max_bytes and max(1, policy.limits.max_bytes // max(1, bytes_of_part)),
    )
    return min((bound for bound in bounds if bound), default=_MANY)


async def _until_fewer(unfinished: int, parts: Sequence[AnyRequest], ended: asyncio.Event) -> None:
    """Wait until fewer than `unfinished` parts are unfinished; `ended` is set when one ends. Raises the error of one
    that failed."""
    while True:
        for failed in parts:
            if failed.ended and not failed.answered:
                try:
                    failed.result()
                finally:
                    del failed  # its error's traceback has this frame
        if sum(not part.ended for part in parts) < unfinished:
            return
        ended.clear()
        await ended.wait()
