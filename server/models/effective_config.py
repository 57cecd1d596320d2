"""From what a model is served with back to its `config.pbtxt`.

Lives here: filling in what a configuration left open. Must not: decide anything. The rule: what a model is served with,
given to the loader again as `config.pbtxt` or as an override, serves the model as it is served now.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import TypeVar

from paceline.backends.base import Device, DeviceKind
from paceline.backends.spec import ControlKind, ModelSpec, SequenceSpec, TensorSpec
from paceline.protos import model_config_pb2 as pb
from paceline.protos.datatypes import CONFIG_NUMBERS
from paceline.server.models.ensemble_config import ENSEMBLE
from paceline.server.models.model_config import ServingPlan

TensorT = TypeVar("TensorT", pb.ModelInput, pb.ModelOutput)

_PAD, _STATE_BATCH_AXIS = "paceline.pad", "paceline.state_batch_axis"
_ONNX_PLATFORM = "onnxruntime_onnx"
_OF_FILES = (_ONNX_PLATFORM, "python")


def effective_config(
    config: pb.ModelConfig, plan: ServingPlan, *, platform: str, file: str, groups: Sequence[Sequence[Device]]
) -> pb.ModelConfig:
    """A copy of `config` in which everything that it left open is filled in.

    `platform` is what the opened model calls its framework, or that of an ensemble, `file` the name of its file, if its
    backend reads files, `groups` are the devices that each instance group's instances run on.
    """
    made = deepcopy(config)
    if platform != ENSEMBLE:
        made.backend = config.backend or ("onnxruntime" if platform == _ONNX_PLATFORM else platform)
    else:
        made.model_transaction_policy.SetInParent()
    if platform == _ONNX_PLATFORM:
        made.platform = platform
    if platform in _OF_FILES:
        made.default_model_filename = config.default_model_filename or file
    made.max_batch_size = plan.max_batch_rows
    if made.version_policy.WhichOneof("policy_choice") in (None, "latest"):
        made.version_policy.latest.num_versions = max(1, config.version_policy.latest.num_versions)
    made.ClearField("input")
    made.input.extend(_tensor(pb.ModelInput(), config.input, tensor) for tensor in plan.spec.inputs)
    made.ClearField("output")
    made.output.extend(_tensor(pb.ModelOutput(), config.output, tensor) for tensor in plan.spec.outputs)
    _fill_batching(made, plan)
    if plan.spec.sequence is not None:
        _fill_sequences(made, plan.spec.sequence, plan)
    if plan.spec.lengths and _PAD not in made.parameters and (axes := _pad_axes(plan.spec)):
        made.parameters[_PAD].string_value = axes
    if platform != ENSEMBLE:
        _fill_groups(made, groups)
    return made


def _tensor(message: TensorT, declared: Sequence[TensorT], tensor: TensorSpec) -> TensorT:
    """`message` for a tensor as it is served, with whatever else the configuration says about it."""
    for one in declared:
        if one.name == tensor.name:
            message.CopyFrom(one)
    message.name = tensor.name
    message.data_type = CONFIG_NUMBERS[tensor.datatype]  # type: ignore[assignment]
    message.dims[:] = tensor.dims
    if tensor.reshape is not None:
        message.reshape.SetInParent()
        message.reshape.shape[:] = tensor.reshape
    message.is_shape_tensor = tensor.shape_tensor
    if isinstance(message, pb.ModelInput):
        message.optional, message.allow_ragged_batch = tensor.optional, tensor.ragged
    return message


def _fill_batching(made: pb.ModelConfig, plan: ServingPlan) -> None:
    policy = plan.policy
    if plan.max_batch_rows and policy.max_batch_requests != 1 and plan.spec.sequence is None:
        batching = made.dynamic_batching
        batching.SetInParent()
        if not batching.preferred_batch_size:
            batching.preferred_batch_size.extend(sorted(policy.preferred))
        batching.max_queue_delay_microseconds = policy.max_queue_delay_ns // 1_000
    if policy.queue.default_timeout_ns:
        timeout_us = policy.queue.default_timeout_ns // 1_000
        made.dynamic_batching.default_queue_policy.default_timeout_microseconds = timeout_us


def _fill_sequences(made: pb.ModelConfig, sequence: SequenceSpec, plan: ServingPlan) -> None:
    """Fill in what `sequence_batching` left to defaults and to the model. Which strategy there is without one isn't
    said, as in Triton."""
    sequences, policy = made.sequence_batching, plan.policy
    if policy.sequences is not None:
        sequences.max_sequence_idle_microseconds = policy.sequences.idle_ns // 1_000
    if sequences.HasField("oldest") and plan.max_batch_rows and not sequences.oldest.preferred_batch_size:
        sequences.oldest.preferred_batch_size.extend(sorted(policy.preferred))
    for control, one in zip(sequence.controls, sequences.control_input, strict=True):
        if control.kind is ControlKind.CORRID:
            one.control[0].data_type = CONFIG_NUMBERS[control.tensor.datatype]  # type: ignore[assignment]
    for state, kept in zip(sequences.state, sequence.states, strict=True):
        state.data_type = CONFIG_NUMBERS[kept.input.datatype]  # type: ignore[assignment]
        if not state.dims:
            state.dims[:] = kept.input.dims
        for initial in state.initial_state:
            initial.data_type = state.data_type
    inputs = [state.input for state in sequence.states]
    if any(one.batch_axis for one in inputs) and not any("," in one.name for one in inputs):
        axes = ", ".join(f"{one.name}={one.batch_axis}" for one in inputs)
        made.parameters[_STATE_BATCH_AXIS].string_value = axes


def _pad_axes(spec: ModelSpec) -> str:
    """The axes along which requests are filled up, as a configuration names them; "" if it can't."""
    inputs = spec.executed.inputs
    tensors = [(inputs[index], axis) for length in spec.lengths for index, axis in length.inputs]
    if any("," in tensor.name for tensor, _ in tensors):
        return ""
    return ", ".join(
        f"{tensor.name}[{axis}]" + ("" if tensor.datatype == "BYTES" else f"={tensor.fill}") for tensor, axis in tensors
    )


def _fill_groups(made: pb.ModelConfig, groups: Sequence[Sequence[Device]]) -> None:
    """Fill in where each group's instances are, which `KIND_AUTO` and a count of 0 leave open. Names are Triton's: the
    model's for the one group of a configuration without any, else that and a number."""
    if not made.instance_group:
        made.instance_group.add(name=made.name)
    for number, devices in enumerate(groups):
        group = made.instance_group[number] if number < len(made.instance_group) else made.instance_group.add()
        group.name = group.name or f"{made.name}_{number}"
        group.ClearField("gpus")
        if devices[0].kind is DeviceKind.GPU:
            group.kind = pb.ModelInstanceGroup.KIND_GPU
            group.gpus.extend(dict.fromkeys(device.index for device in devices))
            group.count = len(devices) // len(group.gpus)
        else:
            group.kind = pb.ModelInstanceGroup.KIND_CPU
            group.count = len(devices)
