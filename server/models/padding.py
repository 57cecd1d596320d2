"""Along which axes requests of different sizes are filled up, and how a model is batched, in words for its load's log.

Lives here: the `paceline.` parameters about padding, joined with what a model is and can; texts. Must not: run a model
by other means than its own trial. The rule: what is asked for and can't be had is refused, naming parameter, reason and
value.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace

from paceline.backends.base import Device, DeviceKind, OpenModel
from paceline.backends.errors import LoadError
from paceline.backends.spec import Length, ModelSpec
from paceline.backends.trials import LengthAxis, Supervise, Trial, TriesLengths
from paceline.protos import model_config_pb2 as pb
from paceline.server.errors import ConfigError
from paceline.server.models.batch_policy import OwnSettings, PadAxis, own_settings, refuse
from paceline.server.models.model_config import ServingPlan, is_complete
from paceline.server.models.sequence_config import of_clients
from paceline.server.models.tensor_config import EXPORT_AGAIN, against_a_batch_axis, can_batch, fixed_rows

_PARAMETERS = ("paceline.pad", "paceline.pad_sizes", "paceline.max_batch_elements", "paceline.batch_growth")


@dataclass(frozen=True, slots=True)
class Padding:
    """`plan` with the lengths that were asked for or found. `why_not`: as `LengthTrial.why_not`."""

    plan: ServingPlan
    why_not: str = ""

    @property
    def in_words(self) -> str:
        """What to say of it in a log line; "" for a model of which nobody would expect it."""
        lengths = self.plan.spec.lengths
        if not lengths:
            return self.why_not and f"different lengths not batched together: {self.why_not}"
        inputs = self.plan.spec.executed.inputs
        axes = [f"{inputs[index].name}[{axis}]" for length in lengths for index, axis in length.inputs]
        return f"different lengths filled up in {', '.join(axes)}"


def says_only_padding(config: pb.ModelConfig) -> bool:
    """Whether `config` has parameters about padding, and nothing else but a name: then it leaves the rest as none."""
    rest = deepcopy(config)
    rest.ClearField("name")
    for key in _PARAMETERS:
        rest.parameters.pop(key, None)
    return len(rest.parameters) < len(config.parameters) and rest == pb.ModelConfig()


def with_lengths(
    config: pb.ModelConfig, plan: ServingPlan, opened: OpenModel, devices: Sequence[Device], supervise: Supervise
) -> Padding:
    """`plan` with the lengths that `config` asks for, or, if it asks for none and doesn't rule it out, with those that
    a trial of the model finds. Blocks. Raises ConfigError for what can't be had, LoadError as opening the model.

    On a GPU batches always grow: rows get cheaper there, and a new size may cost as much as many batches."""
    own = own_settings(config)
    on_gpu = any(device.kind is DeviceKind.GPU for device in devices)
    if on_gpu:
        plan = replace(plan, policy=replace(plan.policy, grows_always=True))
    why_not = _why_not(own, plan, opened)
    if why_not or not isinstance(opened, TriesLengths):
        _refuse(own, why_not)
        return Padding(plan)
    try:
        asked = _asked(own.pad, plan.spec.executed) if own.pad else None
        trial = opened.try_lengths(plan.spec, asked, supervise)
    except LoadError as error:
        if own.pad:
            raise ConfigError(f"paceline.pad: {error}") from error
        raise
    lengths = tuple(
        replace(length, sizes=own.pad_sizes, in_steps=on_gpu)
        for length in trial.spec.lengths
        if _is_free(length, trial.spec.executed)
    )
    if trial.spec.joined and len(lengths) < len(trial.spec.lengths):
        lengths = ()  # their parts go by the numbers of all of them
    if not lengths:
        _refuse(own, trial.why_not or "no axes were found along which requests may be filled up; name them in "
                "paceline.pad")  # fmt: skip
    why_not = trial.why_not
    sent = [one for one in trial.spec.inputs if one.reshape is None and not one.any_rank]
    free = [f"{one.name}[{axis}]" for one in sent for axis, dim in enumerate(one.dims, 1) if dim == -1]
    if free and not lengths and not why_not:
        why_not = f"no mask is known to go with {', '.join(free)}; name the axes to fill up in paceline.pad"
    policy = replace(plan.policy, lengths=tuple(length.padded for length in lengths))
    return Padding(replace(plan, spec=replace(trial.spec, lengths=lengths), policy=policy), why_not)


def _why_not(own: OwnSettings, plan: ServingPlan, opened: OpenModel) -> str:
    """Why requests of this model aren't filled up, whatever their axes; "" if nothing speaks against it."""
    if not plan.max_batch_rows:
        return "the model has no batch axis"
    if plan.policy.max_batch_requests == 1:
        return "requests don't share batches: no dynamic_batching in its configuration"
    executed = plan.spec.executed
    if not executed.rows_in_front.by_rows:
        settings = "allow_ragged_batch, batch_input, batch_output, optional or is_shape_tensor"
        shared = [one.name for one in executed.inputs if one.shape_tensor]
        if plan.spec.sequence is not None and shared:
            settings = f"inputs without a batch axis, such as {shared[0]}"
        return f"requests can't be filled up with {settings}"
    if not isinstance(opened, TriesLengths):
        return f"models of {opened.platform} aren't filled up"
    return "paceline.pad is off" if own.pad == () else ""


def _refuse(own: OwnSettings, why: str) -> None:
    """Raise ConfigError if there are settings that mean nothing because of `why`."""
    refuse(
        why,
        ("paceline.pad", "off", ", ".join(f"{one.input}[{one.axis}]" for one in own.pad or ())),
        ("paceline.pad_sizes", "none", list(own.pad_sizes)),
        ("paceline.max_batch_elements", "0", own.max_batch_elements),
    )


def _asked(pad: Sequence[PadAxis], spec: ModelSpec) -> tuple[LengthAxis, ...]:
    """The axes in the trial's terms, in which text has no fill. Raises ConfigError if one is given."""
    texts = {tensor.name for tensor in spec.inputs if tensor.datatype == "BYTES"}
    for one in pad:
        if one.input in texts and one.fill is not None:
            what = "expected no fill, as text is filled up with empty strings"
            raise ConfigError(f"paceline.pad: input '{one.input}': {what}, got {one.fill}")
    return tuple(LengthAxis(one.input, one.axis, one.fill or 0) for one in pad)


def _is_free(length: Length, spec: ModelSpec) -> bool:
    """Whether requests may differ in it: all its axes have free sizes, which clients see as the model does."""
    inputs = [(spec.inputs[index], axis) for index, axis in length.inputs]
    return all(tensor.reshape is None and tensor.dims[axis - 1] == -1 for tensor, axis in inputs)


def batching_in_words(padding: Padding, config: pb.ModelConfig, tried: Trial) -> str:
    """For the log: how a model's requests share batches, or why they don't."""
    served = padding.plan
    policy = served.policy
    if not served.max_batch_rows:
        why = "its configuration has input and output, and no max_batch_size"
        if not is_complete(config):
            why = _why_no_batch_axis(config, tried) or tried.why_not or "the default for max_batch_size is 0"
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
    return f"{_why_no_batch_axis(config, tried) or tried.why_not}; to batch it, set max_batch_size in its config.pbtxt"


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


def _why_no_batch_axis(config: pb.ModelConfig, tried: Trial) -> str:
    """What keeps a model of which a trial showed `tried` from having a batch axis, in words; "" if nothing does, except
    perhaps rows that could be stacked."""
    own = tried.spec
    if (rows := fixed_rows(config, own)) == 1:
        return f"its inputs have a first dimension of 1; {EXPORT_AGAIN}"
    if rows:
        doubt = tried.why_not or "it was not tried"
        text = (
            f"all its tensors have a fixed first dimension of {rows}; {doubt}; to batch it anyway, set max_batch_size"
        )
        return "" if tried.fixed_rows else f"{text}: {rows} in a config.pbtxt"
    why = next(against_a_batch_axis(config, own), "")
    others = not config.output and any(one.dims[:1] == (-1,) for one in own.outputs)
    return f"{why}; it may be left out of `output` in a config.pbtxt" if why.startswith("output") and others else why
