"""Requests of models with a response cache: answered from what was kept, or together by one execution, or executed.

Lives here: what makes requests equal, who waits for whose execution, and who is told what at its end. Must not: keep
answers (`server.models.kept_responses`), execute, or make messages: a request gets outputs here, and is answered and
counted like any other. The rules: an execution belongs to none of the requests that wait for it, so that one that goes
harms no other. What came to an end because a request's own time was up is tried again for the others; any other error
is everybody's, as equal requests would meet the same. No error is kept.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Sequence
from hashlib import sha256
from time import monotonic_ns
from typing import NamedTuple, TypeVar, cast

import grpc
import numpy as np

from paceline.backends.batching import Packed
from paceline.backends.open_request import Told
from paceline.backends.spec import MISSING, Array
from paceline.protos.datatypes import by_name
from paceline.protos.tensors import encode_raw
from paceline.scheduler.observer import FULL
from paceline.scheduler.request import AnyRequest, OnAnswers
from paceline.server.codec.parameters import is_reserved
from paceline.server.codec.wire_request import AnyMessage, step_in
from paceline.server.errors import as_value, status_of
from paceline.server.memory.reading import read_now
from paceline.server.memory.region_tensors import Inputs, RegionTensor
from paceline.server.models.kept_responses import KeptResponses
from paceline.server.requests.in_flight import InFlight, Payload

_READ_AT_ONCE_BYTES = 2**16
"""Up to this size, inputs are read and hashed on the event loop: 50 us, which is what a thread costs it. SHA-256 takes
0.7 ns a byte where the CPU has instructions for it."""

_TEXT = by_name("BYTES")

ErrorT = TypeVar("ErrorT", bound=BaseException)

HandOver = Callable[[Sequence[InFlight]], Sequence[Exception | None]]


class ResponseCache:
    """`hand_over` gives requests to their model to be executed, and returns why it refuses any, as `Batcher.submit`. To
    the requests it stands for the batcher."""

    def __init__(self, hand_over: HandOver) -> None:
        self._hand_over = hand_over
        # Executions that haven't ended, by what has to be equal to wait for one.
        self._under_way: dict[Hashable, _Execution] = {}
        self._waits: dict[InFlight, _Wait] = {}

    # hot path: see bench/
    def submit(self, flights: Sequence[InFlight]) -> None:
        """Take requests of one model that were read as one group. They end when they are answered, refused or
        cancelled; `on_answers` is called then, not before this returns."""
        responses: KeptResponses = flights[0].model.responses
        led: list[_Execution] = []
        for flight in flights:
            responses.answers.expect(flight)
            flight.batcher = self
            began_ns = monotonic_ns()
            if not _is_cached(flight):
                led += self._wait_for_one(flight, cast("Inputs", flight.payload), b"", 0)
            elif flight.size_bytes <= _READ_AT_ONCE_BYTES:
                try:
                    inputs, key = _read(*_asked(flight))
                except Exception as error:  # noqa: BLE001 - the caller must get an answer
                    responses.answers.fail(flight, as_value(error))
                else:
                    led += self._look_up(flight, inputs, key, began_ns)
            elif (full := responses.enter(flight)) is not None:
                responses.answers.drop(flight, FULL[full.what], full)
            else:
                flight.model.in_parts(asyncio.ensure_future(self._read_elsewhere(flight, *_asked(flight))))
        self._execute(led)
        if len(led) < len(flights):
            responses.answers.notify_soon()

    async def _read_elsewhere(
        self, flight: InFlight, inputs: Inputs, outputs: Sequence[int], message: AnyMessage
    ) -> None:
        """Read and hash large inputs on a thread. Nothing is found meanwhile but this model, which holds on until this
        has ended."""
        responses: KeptResponses = flight.model.responses
        began_ns = monotonic_ns()
        try:
            inputs, key = await asyncio.to_thread(_read, inputs, outputs, message)
        except Exception as error:  # noqa: BLE001 - the caller must get an answer
            responses.answers.fail(flight, as_value(error))
            return
        finally:
            responses.leave(flight)
        if not flight.ended:
            self._execute(self._look_up(flight, inputs, key, began_ns))
            responses.answers.notify()

    # hot path
    def _look_up(self, flight: InFlight, inputs: Inputs, key: bytes, began_ns: int) -> Sequence[_Execution]:
        """Answer the request if its answer is kept, to be told of by `notify`; else, as `_wait_for_one`."""
        responses: KeptResponses = flight.model.responses
        kept = responses.find(key)
        look_ns = monotonic_ns() - began_ns
        if kept is None:
            return self._wait_for_one(flight, inputs, key, look_ns)
        responses.statistics.cache_hit.add(look_ns)
        responses.answers.succeed((flight,), (kept,))
        return ()

    def _wait_for_one(self, flight: InFlight, inputs: Inputs, key: bytes, look_ns: int) -> Sequence[_Execution]:
        """Have a request wait for an execution, which it took `look_ns` to find out. Returns it if it isn't under way.
        Without a `key`, it shares none, and nothing of its answer is kept."""
        responses: KeptResponses = flight.model.responses
        # Those of other urgency would be held up, or preferred.
        alike = (responses, key, flight.priority, flight.timeout_ns) if key else flight
        execution = self._under_way.get(alike)
        if execution is None or execution.ended:
            execution = self._under_way[alike] = _Execution(flight, inputs, key, alike, self._on_done)
            self._waits[flight] = _Wait(execution, look_ns)
            execution.waiting[flight] = None
            if key:
                responses.statistics.cache_miss.add(look_ns)
            return (execution,)
        if (full := responses.enter(flight)) is not None:
            responses.answers.drop(flight, FULL[full.what], full)
            return ()
        if execution.all_ended is None:
            execution.all_ended = asyncio.get_running_loop().create_future()
            flight.model.in_parts(execution.all_ended)
        timer = None
        if flight.deadline_ns < execution.deadline_ns:
            left_s = max(0, flight.deadline_ns - monotonic_ns()) / 1e9
            timer = asyncio.get_running_loop().call_later(left_s, self._on_late, flight)
        self._waits[flight] = _Wait(execution, look_ns, timer)
        execution.waiting[flight] = None
        flight.payload = ()  # the execution has equal ones
        return ()

    def _execute(self, executions: Sequence[_Execution]) -> None:
        """Have `executions`, of one group, executed."""
        while executions:
            try:
                refusals: Sequence[Exception | None] = self._hand_over(executions)
            except Exception as error:  # noqa: BLE001 - the callers must get their answers
                refusals = [as_value(error), *(_twin(error) for _ in executions[1:])]
            again: list[_Execution] = []
            for execution, refusal in zip(executions, refusals, strict=False):
                if refusal is not None:
                    again += self._fail(execution, refusal)
            executions = again

    def _on_done(self, executions: list[_Execution]) -> None:
        """Executions have ended: their requests do, too, except those that need another one."""
        answered = [execution for execution in executions if execution.answered]
        for execution in answered:
            self._succeed(execution)
        for answers in {execution.model.responses.answers for execution in answered}:
            answers.notify()
        for execution in executions:
            if not execution.answered:
                error = None if execution.cancelled() else execution.exception()
                self._execute(self._fail(execution, error or asyncio.CancelledError()))
        # Last, as nobody who waits for an answer has to wait for its copy.
        for execution in answered:
            # What a model says of an answer besides its outputs isn't kept, so neither are they.
            if execution.key_of_answer and type(execution.value) is not Told:
                assert execution.options is not None
                responses: KeptResponses = execution.model.responses
                began_ns = monotonic_ns()
                responses.keep(execution.key_of_answer, execution.value, execution.options.outputs)
                responses.statistics.cache_miss.ns += monotonic_ns() - began_ns
            execution.let_go()
            execution.inputs = ()

    def _succeed(self, execution: _Execution) -> None:
        responses: KeptResponses = execution.model.responses
        waiting = self._end(execution)
        for flight, wait in waiting.items():
            if flight is execution.leader:
                flight.batch_facts, flight.waited_ns = execution.batch_facts, execution.waited_ns
            else:
                responses.statistics.cache_hit.add(wait.look_ns)
        responses.answers.succeed([*waiting], [execution.value] * len(waiting))

    def _fail(self, execution: _Execution, error: BaseException) -> list[_Execution]:
        """Tell those whom `error` concerns; the others wait for another execution. Returns it if it isn't under way."""
        responses: KeptResponses = execution.model.responses
        inputs = execution.inputs
        waiting = self._end(execution)
        execution.let_go()
        own = status_of(error) is grpc.StatusCode.DEADLINE_EXCEEDED
        led: list[_Execution] = []
        for flight, wait in waiting.items():
            if flight is execution.leader:
                self._tell(flight, error)
            elif own:
                led += self._wait_for_one(flight, inputs, execution.key_of_answer, wait.look_ns)
            else:
                responses.statistics.cache_miss.add(wait.look_ns)
                self._tell(flight, _twin(error))
        return led

    def _tell(self, flight: InFlight, error: BaseException) -> None:
        if isinstance(error, Exception):
            flight.model.responses.answers.fail(flight, error)
        else:
            flight.cancel()

    def _end(self, execution: _Execution) -> dict[InFlight, _Wait]:
        """Nobody waits for it any more. Returns those who did, in order."""
        if self._under_way.get(execution.alike) is execution:
            del self._under_way[execution.alike]
        if execution.all_ended is not None:
            execution.all_ended.set_result(None)
        return {flight: self._leave(flight) for flight in [*execution.waiting]}

    def _leave(self, flight: InFlight) -> _Wait:
        wait = self._waits.pop(flight)
        del wait.execution.waiting[flight]
        if wait.timer is not None:
            wait.timer.cancel()
        if flight is not wait.execution.leader:
            flight.model.responses.leave(flight)
        return wait

    def _on_late(self, flight: InFlight) -> None:
        """A request's time is up before that of the one for which the execution was begun."""
        self._give_up(flight)
        flight.model.responses.answers.expire(flight, monotonic_ns())

    def on_cancel(self, request: AnyRequest) -> None:
        """Learn that a request's caller has gone."""
        flight = cast("InFlight", request)
        goes_alone = flight not in self._waits or self._give_up(flight)
        flight.model.responses.answers.cancelled(flight, waited=goes_alone)

    def _give_up(self, flight: InFlight) -> bool:
        """A request waits no longer. Its execution is called off if nobody else waits for it; returns whether somebody
        does."""
        wait = self._leave(flight)
        if flight is not wait.execution.leader:
            flight.model.responses.statistics.cache_miss.add(wait.look_ns)
        if wait.execution.waiting:
            return True
        wait.execution.cancel()
        return False


class _Execution(InFlight):
    """What is executed for the requests that are `waiting`, as the `leader` asks for it: the one that came first, which
    may have gone."""

    __slots__ = ("alike", "all_ended", "inputs", "key_of_answer", "leader", "waiting")

    def __init__(
        self, leader: InFlight, inputs: Inputs, key_of_answer: bytes, alike: Hashable, on_done: OnAnswers
    ) -> None:
        super().__init__(leader.message, leader.deadline_ns, leader.parent, leader.passed, leader.arrived_ns)
        self.alike = alike
        self.key_of_answer = key_of_answer
        self.leader = leader
        self.waiting: dict[InFlight, None] = {}
        self.all_ended: asyncio.Future[None] | None = None
        self.model, self.options, self.trail, self.tag = leader.model, leader.options, leader.trail, leader.tag
        # What is executed for them may be made of these.
        self.inputs: Inputs = inputs
        self.payload: Payload = inputs
        self.rows, self.key, self.sizes, self.size_bytes = leader.rows, leader.key, leader.sizes, leader.size_bytes
        self.priority, self.timeout_ns = leader.priority, leader.timeout_ns
        self.on_answers = on_done


class _Wait(NamedTuple):
    """A request waits for `execution`, if need be until its own `timer` rings. It took `look_ns` to see that it has
    to."""

    execution: _Execution
    look_ns: int
    timer: asyncio.TimerHandle | None = None


def _is_cached(flight: InFlight) -> bool:
    """Whether all its tensors are in the host's memory: the event loop doesn't wait for a GPU."""
    inputs = cast("Inputs", flight.payload)
    if type(inputs) is Packed and not flight.targets:
        return True
    regions = [span.region for span in flight.targets.values()]
    if type(inputs) is not Packed:
        regions += [one.region for one in inputs if isinstance(one, RegionTensor)]
    return all(region.kind != "cuda" for region in regions)


def _asked(flight: InFlight) -> tuple[Inputs, Sequence[int], AnyMessage]:
    assert flight.options is not None
    return cast("Inputs", flight.payload), flight.options.outputs, flight.message


# hot path: 6 us for a tensor of 64 bytes
def _read(inputs: Inputs, outputs: Sequence[int], message: AnyMessage) -> tuple[Inputs, bytes]:
    """A request's inputs, read from clients' memory, which may change from now on, and the key of its answer: a hash
    that only equal requests have in common. On any thread; raises InvalidRequest."""
    custom: list[tuple[str, bytes]] = []
    if message.parameters:
        custom = sorted(
            (key, one.SerializeToString(deterministic=True))
            for key, one in message.parameters.items()
            if not is_reserved(key)
        )
    asked = outputs, custom, step_in(message)
    if type(inputs) is Packed:
        tensors = inputs.layout.tensors
        hashed = sha256(repr((asked, [(dtype.str, shape) for dtype, shape, _ in tensors])).encode())
        data = memoryview(inputs.data)
        for start, (_, _, size_bytes) in zip(inputs.starts, tensors, strict=True):
            hashed.update(data[start : start + size_bytes])
        return inputs, hashed.digest()
    arrays = cast("Sequence[Array]", inputs := read_now(inputs))
    shapes = [None if one is MISSING else (one.dtype.str, one.shape) for one in arrays]
    hashed = sha256(repr((asked, shapes)).encode())
    for one in arrays:
        if one.dtype.hasobject:
            hashed.update(encode_raw(one, _TEXT))  # each with its length
        else:
            hashed.update(np.ascontiguousarray(one).reshape(-1).view(np.uint8).data)
    return inputs, hashed.digest()


def _twin(error: ErrorT) -> ErrorT:
    """The same error for another request: tracebacks grow on shared ones."""
    twin: ErrorT = type(error).__new__(type(error), *error.args)
    twin.__dict__.update(error.__dict__)
    twin.__cause__ = error.__cause__
    return twin
