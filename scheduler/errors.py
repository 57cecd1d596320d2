"""Why a request left the batcher without an answer from the model.

SchedulerError
├── RequestTooLarge    more rows than one batch may have; refused at push
├── QueueFull          a bound of the queue is reached; refused at push
│   └── BacklogFull          as many steps of sequences wait for their turn as may
├── SequenceError
│   ├── NoSequence           the id of a sequence is missing
│   └── NotStarted           there is no such sequence (any more), and the step doesn't start one
├── DeadlineExceeded
│   ├── QueueTimeout         its queue timeout or its RPC's deadline passed while it waited
│   └── DeadlineUnreachable  it could not be answered before its RPC's deadline, so it was not executed
├── BatcherClosed      the batcher stops; refused, or dropped at the end of the grace period
├── NoInstance         no instance is left, and there can be no other for now; refused, or dropped
└── ExecutionFailed    the instance raised; `__cause__` is what it raised
    └── ExecutionTimeout     it took longer than it may, and was given up
"""

from __future__ import annotations

_DEADLINE = "Deadline Exceeded"
"""gRPC's own words, which clients look for: they get them from gRPC when it notices first."""


class SchedulerError(Exception):
    """Base of everything that the batcher answers instead of a result."""


class RequestTooLarge(SchedulerError):
    """The request alone has more rows than `max_batch_rows`."""

    def __init__(self, rows: int, limit_rows: int) -> None:
        super().__init__(f"request has {rows} rows, the limit is {limit_rows}")


class QueueFull(SchedulerError):
    """The queue holds as much as its policy allows of `what`, or as the queues of `whose` may hold together."""

    def __init__(self, limit: int, what: str = "requests", whose: str = "") -> None:
        self.what = what
        super().__init__(f"Exceeds maximum queue size of {limit} {what}{f' of {whose}' if whose else ''}")


class BacklogFull(QueueFull):
    """As many steps wait for an earlier one of their sequence, or for room for their sequence, as may."""

    def __init__(self, limit: int) -> None:
        super().__init__(limit, whose="sequences whose turn it isn't (paceline.sequence_backlog)")


class SequenceError(SchedulerError):
    """The request doesn't fit the sequences that there are. Its sequence, if there is one, is as it was."""


class NoSequence(SequenceError):
    """The request is in no sequence, and requests of this model are steps of sequences."""

    def __init__(self, model: str) -> None:
        super().__init__(
            f"inference request to model '{model}' must specify a non-zero or non-empty correlation ID: expected "
            "parameter sequence_id, as its requests are steps of sequences"
        )


class NotStarted(SequenceError):
    """There is no such sequence: it was never started, or has ended, or goes on with a later step that starts anew, for
    the `reason`, if that is known."""

    def __init__(self, model: str, sequence: int | str, reason: str = "") -> None:
        text = (
            f"inference request for sequence {sequence} to model '{model}' must specify the START flag on the first "
            "request of the sequence"
        )
        super().__init__(f"{text}: {reason}" if reason else text)


class DeadlineExceeded(SchedulerError):
    """The request is too late, and was not executed."""


class QueueTimeout(DeadlineExceeded):
    """The time that the request was allowed to wait passed, or its RPC's deadline did (`by_deadline`)."""

    def __init__(self, waited_ns: int, *, by_deadline: bool = False) -> None:
        text = f"Request timeout expired after {waited_ns // 1_000} us in the queue"
        super().__init__(f"{text}: {_DEADLINE}" if by_deadline else text)


class DeadlineUnreachable(DeadlineExceeded):
    """Going by how long executions take, the caller would have given up before the answer came."""

    def __init__(self, left_ns: int, needed_ns: int) -> None:
        # A deadline may have passed before anybody looked, such as one of 1 us.
        left_us, needed_us = max(0, left_ns) // 1_000, needed_ns // 1_000
        super().__init__(
            f"{_DEADLINE}: the deadline can't be met: {left_us} us are left, an answer takes about {needed_us} us"
        )


class BatcherClosed(SchedulerError):
    """The batcher takes no more requests, or gave up on this one when it closed."""

    def __init__(self) -> None:
        super().__init__("the model is being unloaded or the server is stopping")


class NoInstance(SchedulerError):
    """No instance is left: nothing can execute until there is another."""

    def __init__(self) -> None:
        super().__init__("no instance of the model is left; the server keeps trying to start another")


class ExecutionFailed(SchedulerError):
    """The batch that carried this request failed in the instance."""


class ExecutionTimeout(ExecutionFailed):
    """The batch that carried this request took longer than an execution may, and may go on for ever."""

    def __init__(self, limit_ns: int, note: str = "") -> None:
        super().__init__(f"the execution took longer than {limit_ns / 1e9:g} s and was given up{note}")
