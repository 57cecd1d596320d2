"""What a request may learn about its batch: as the batcher has it, as fronts get it, and as the answer has it.

Lives here: these forms. Must not: decide who is told.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from paceline.protos import inference_pb2 as pb

if TYPE_CHECKING:
    from paceline.scheduler.request import BatchFacts

__all__ = ["Facts", "add_batch_facts", "batch_facts_of"]

Facts: TypeAlias = tuple[int, int, int, int, int]
"""Number of the batch, its rows and padded rows, nanoseconds in the queue and computing."""


def batch_facts_of(facts: BatchFacts) -> Facts:
    """The part of `facts` that a request may learn."""
    return facts.number, facts.rows, facts.padded_rows, facts.queue_ns, facts.compute_ns


def add_batch_facts(response: pb.ModelInferResponse, batch_id_prefix: str, facts: Facts) -> None:
    """Put `facts` into the parameters of `response`."""
    number, rows, padded_rows, queue_ns, compute_ns = facts
    parameters = response.parameters
    parameters["paceline_batch_id"].string_param = f"{batch_id_prefix}-{number}"
    parameters["paceline_batch_rows"].int64_param = rows
    parameters["paceline_batch_padded_rows"].int64_param = padded_rows
    parameters["paceline_queue_us"].int64_param = queue_ns // 1_000
    parameters["paceline_compute_us"].int64_param = compute_ns // 1_000
