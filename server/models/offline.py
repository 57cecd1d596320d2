"""Models for work whose results mustn't depend on what else is asked at the time.

Lives here: what `Offline` changes in a model's configuration and in how it is served. Must not: load anything. The
rule: sizes of batches and what they are filled up to stay as configured, as results depend on those.
"""

from __future__ import annotations

from dataclasses import replace

from paceline.protos import model_config_pb2 as pb
from paceline.scheduler.policy import QueueLimits
from paceline.server.models.defaults import INTRA, Offline
from paceline.server.models.model_config import ServingPlan

__all__ = ["configured_for", "executed_alone"]


def configured_for(offline: Offline, config: pb.ModelConfig) -> pb.ModelConfig:
    """`config` with the instances and threads of `offline`. Of several instance groups, the first says where they
    are."""
    changed = pb.ModelConfig()
    changed.CopyFrom(config)
    if offline.instances:
        group = changed.instance_group[0] if changed.instance_group else changed.instance_group.add()
        del changed.instance_group[1:]
        group.count = offline.instances
    if offline.intra_op_threads:
        changed.parameters[INTRA].string_value = str(offline.intra_op_threads)
    return changed


def executed_alone(plan: ServingPlan) -> ServingPlan:
    """`plan` without batches of several requests, and without limits of the queue. A model that gets requests one by
    one, such as one that generates, still gets as many at a time as it takes."""
    policy = plan.policy
    policy = replace(
        policy,
        max_batch_requests=policy.max_batch_requests if plan.most_open else 1,
        max_queue_delay_ns=0,
        queue=replace(policy.queue, max_queue_size=0, default_timeout_ns=0),
        priority_queue={},
        limits=QueueLimits(),
    )
    return replace(plan, policy=policy)
