"""Along which axes requests of different sizes are filled up: what the configuration asks for and a trial shows.

Lives here: the `paceline.` parameters about it, joined with what a model is and can. Must not: run a model by other
means than its own trial. The rule: what is asked for and can't be had is refused, naming parameter, reason and value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from paceline.backends.base import Device, DeviceKind, OpenModel
from paceline.backends.errors import LoadError
from paceline.backends.spec import Length, ModelSpec
from paceline.backends.trials import LengthAxis, Supervise, TriesLengths
from paceline.protos import model_config_pb2 as pb
from paceline.server.errors import ConfigError
from paceline.server.models.batch_policy import OwnSettings, PadAxis, own_settings
from paceline.server.models.model_config import ServingPlan

__all__ = ["Padding", "says_only_padding", "with_lengths"]

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
    rest = pb.ModelConfig()
    rest.CopyFrom(config)
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
    policy = replace(plan.policy, lengths=tuple(length.padded for length in lengths))
    return Padding(replace(plan, spec=replace(trial.spec, lengths=lengths), policy=policy), trial.why_not)


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
    axes = ", ".join(f"{one.input}[{one.axis}]" for one in own.pad or ())
    settings = (
        ("pad", "off", axes),
        ("pad_sizes", "none", list(own.pad_sizes)),
        ("max_batch_elements", "0", own.max_batch_elements),
    )
    for name, expected, got in settings:
        if got:
            raise ConfigError(f"paceline.{name}: expected {expected}, as {why}, got {got}")


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
