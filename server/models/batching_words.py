"""How a model is batched, in words, for the log of its load.

Lives here: the texts. Must not: decide anything.
"""

from __future__ import annotations

from paceline.backends.spec import ModelSpec
from paceline.backends.trials import Trial
from paceline.protos import model_config_pb2 as pb
from paceline.server.models.model_config import is_complete
from paceline.server.models.padding import Padding
from paceline.server.models.sequence_config import of_clients
from paceline.server.models.tensor_config import can_batch, fixed_rows, why_no_batch_axis

__all__ = ["batching_in_words"]


def batching_in_words(padding: Padding, config: pb.ModelConfig, tried: Trial) -> str:
    """For the log: how a model's requests share batches, or why they don't."""
    served = padding.plan
    policy = served.policy
    if not served.max_batch_rows:
        why = "its configuration has input and output, and no max_batch_size"
        if not is_complete(config):
            why = why_no_batch_axis(config, tried) or tried.why_not or "the default for max_batch_size is 0"
            if config.HasField("sequence_batching"):
                why = _why_no_rows_of_steps(config, tried) or why
        return f"no batch axis, requests run one by one ({why})"
    if policy.max_batch_requests == 1:
        return f"up to {served.max_batch_rows} rows a request, not batched: no dynamic_batching in its configuration"
    preferred = f", preferred {sorted(policy.preferred_batch_rows)}" if policy.preferred_batch_rows else ""
    preferred += ", padded to that many" if served.spec.fixed_rows else ""
    batches = f"batches of up to {policy.max_batch_rows} rows{preferred}, delay {policy.max_queue_delay_ns // 1_000} us"
    return "; ".join(filter(None, (batches, padding.in_words, _found_of_steps(served.spec))))


def _why_no_rows_of_steps(config: pb.ModelConfig, tried: Trial) -> str:
    """What else there is to say of a model whose requests are steps of sequences; "" if nothing."""
    if (rows := fixed_rows(config, tried.spec)) > 1:
        return f"all its tensors have a fixed first dimension of {rows}, and a batch may have steps of fewer sequences"
    states = {one.input_name for one in config.sequence_batching.state}
    fixed = any(one.name in states and not (one.any_rank or -1 in one.dims) for one in tried.spec.inputs)
    if fixed or not can_batch(config, of_clients(config, tried.spec, batched=True)):
        return ""
    return f"{why_no_batch_axis(config, tried) or tried.why_not}; to batch it, set max_batch_size in its config.pbtxt"


def _found_of_steps(spec: ModelSpec) -> str:
    """What isn't as in other models where requests are steps of sequences, in words."""
    if spec.sequence is None:
        return ""
    axes = [f"axis {one.input.batch_axis} of {one.input.name}" for one in spec.sequence.states if one.input.batch_axis]
    shared = [one.name for one in spec.inputs if one.shape_tensor]
    of_axes = f"the batch is {' and '.join(axes)}" if axes else ""
    of_shared = f"steps share a batch if they have the same {' and '.join(shared)}" if shared else ""
    filled = {place for length in spec.lengths for place in length.inputs}
    states = enumerate(spec.sequence.states, len(spec.executed.inputs) - len(spec.sequence.states))
    own = [
        state.input.name
        for index, state in states
        if any(dim == -1 and (index, axis) not in filled for axis, dim in enumerate(state.input.dims, 1))
    ]
    of_own = f"steps share a batch if states have the same size: {' and '.join(own)}" if own else ""
    return ", ".join(filter(None, (of_axes, of_shared, of_own)))
