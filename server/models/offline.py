"""Models for work whose results mustn't depend on what else is asked at the time.

Lives here: what `Offline` changes in a model's configuration and in how it is served, and which are worth a try. Must
not: load anything. The rule: sizes of batches and what they are filled up to stay as configured, as results depend on
those.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace

from paceline.protos import model_config_pb2 as pb
from paceline.scheduler.policy import QueueLimits
from paceline.server.models.defaults import INTRA, Offline
from paceline.server.models.model_config import ServingPlan


def configured_for(offline: Offline, config: pb.ModelConfig) -> pb.ModelConfig:
    """`config` with the instances and threads of `offline`. Of several instance groups, the first says where they
    are."""
    changed = deepcopy(config)
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
        hands_ahead=True,
    )
    return replace(plan, policy=policy)


def layouts_on_gpus(configured: int) -> list[Offline]:
    """What may be best on GPUs: the model as it is, with so many instances on each, and with one to three."""
    return [Offline(), *(Offline(number) for number in (1, 2, 3) if number != configured)]


def layouts(instances: int, cpus: int, whole_threads: int = 0) -> list[Offline]:
    """What may be best on so many CPUs, the simplest first: the model as it is configured, which is one instance with
    all of them if that says nothing; or several with a few threads each. `instances`: if they are given.
    `whole_threads`: those of an instance that has all of them; 0: ONNX Runtime decides."""
    if instances:
        return [Offline(instances, max(1, cpus // instances) if instances > 1 else whole_threads)]
    # Of CPUs that are two halves of a core, only one may be of use.
    shares = {(cpus // threads, threads) for threads in (1, 2, 4) if cpus // threads > 1} | {(max(1, cpus // 2), 1)}
    return [Offline(0, whole_threads), *(Offline(*share) for share in sorted(shares, reverse=True) if share[0] > 1)]
