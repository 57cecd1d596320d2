"""What warm-up executes: the samples of a configuration, and rows of one number.

Lives here: from `model_warmup` and the files that it names to requests, as Triton reads them. Each is the first step of
a sequence, if the model has those. Must not: run anything.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from paceline.backends.spec import MISSING, Array, ControlKind, ModelSpec, Tensors, TensorSpec, fits
from paceline.protos import model_config_pb2 as pb
from paceline.protos.datatypes import CONFIG_DATATYPES, by_name
from paceline.protos.tensors import TensorError, decode_raw, element_count
from paceline.server.codec.adapting_codec import to_model
from paceline.server.errors import ConfigError
from paceline.server.files import read_inside
from paceline.server.limits import LARGEST_MESSAGE_BYTES
from paceline.server.models.model_config import ServingPlan

_MAX_BYTES = LARGEST_MESSAGE_BYTES
"""For what a sample executes together, and for all samples, which are kept."""
_LEAST_BYTES, _TEXT_BYTES = 4096, 64
"""What a request and an element of text count as, at least: they are objects."""


def uniform(spec: ModelSpec, rows: int, digit: int) -> Tensors:
    """Inputs of `rows` rows, if there are rows, whose elements are all `digit`, 0 or 1. Text is that, too: models that
    read numbers accept it, and many that look for words reject text without any."""
    lead = (rows,) if spec.batched else ()
    inputs = [
        MISSING if tensor.optional else _filled(tensor, (*lead, *tensor.model_dims), b"%d" % digit, digit)
        for tensor in spec.inputs
    ]
    return [*inputs, *_first_controls(spec, rows).values(), *_first_states(spec, rows)]


def _first_controls(spec: ModelSpec, rows: int) -> dict[str, Array]:
    """By name, what controls say of `rows` first steps: there is one, and it isn't the last. Their ids are 0."""
    made: dict[str, Array] = {}
    for control in spec.sequence.controls if spec.sequence else ():
        shape = (rows,) * spec.batched + control.tensor.model_dims
        array = _filled(control.tensor, shape, b"", 0)
        if control.values:
            array[...] = control.values[control.kind is not ControlKind.END]
        made[control.tensor.name] = array
    return made


def _first_states(spec: ModelSpec, rows: int) -> list[Array]:
    """The initial states, in `rows` rows."""
    states = spec.sequence.states if spec.sequence else ()
    if not spec.batched:
        return [one.initial for one in states]
    return [np.repeat(one.initial, rows, one.input.batch_axis) for one in states]


def text_of(error: Exception) -> str:
    return str(error) or type(error).__name__


def read_samples(
    samples: Sequence[pb.ModelWarmup], plan: ServingPlan, folder: Path
) -> Iterator[tuple[pb.ModelWarmup, Sequence[Tensors]]]:
    """The samples with their requests, as Triton reads them: a batch size of N is N requests of one row each, run
    together; 0 runs nothing."""
    kept_bytes, most = 0, max(1, plan.max_batch_rows)
    controls = [control.tensor for control in plan.spec.sequence.controls] if plan.spec.sequence else []
    states = _first_states(plan.spec, 1)
    known = {tensor.name: tensor for tensor in (*plan.spec.inputs, *controls)}  # Triton demands samples of controls
    for sample in samples:
        where = f"warmup sample '{sample.name}'"
        if sample.batch_size > most:
            raise ConfigError(f"{where}: expected a batch_size up to {most}, got {sample.batch_size}")
        if unexpected := sorted(set(sample.inputs) - known.keys()):
            raise ConfigError(f"{where}: unexpected inputs {unexpected}, expected {[*known]}")
        row_bytes = sum(max(0, size_bytes(known[name], tuple(one.dims))) for name, one in sample.inputs.items())
        row_bytes += sum(one.nbytes for one in states)
        kept_bytes += row_bytes
        together_bytes = sample.batch_size * max(_LEAST_BYTES, row_bytes)
        for what, size in (("in a batch", together_bytes), ("with the samples before it", kept_bytes)):
            if size > _MAX_BYTES:
                raise ConfigError(f"{where}: expected at most {_MAX_BYTES} bytes {what}, got {size}")
        if not sample.batch_size:
            continue
        request = [_input(sample, tensor, plan.spec, folder) for tensor in plan.spec.inputs]
        given = {one.name: _input(sample, one, plan.spec, folder) for one in controls if one.name in sample.inputs}
        request += [*(_first_controls(plan.spec, 1) | given).values(), *states]
        rows = [tensor.name for tensor in plan.spec.inputs if not tensor.shape_tensor]
        if plan.spec.batched and rows and not sample.inputs.keys() & rows:
            raise ConfigError(f"{where}: expected some of the inputs {rows}, got none")
        yield sample, [request] * sample.batch_size


def _input(sample: pb.ModelWarmup, tensor: TensorSpec, spec: ModelSpec, folder: Path) -> Array:
    where = f"warmup sample '{sample.name}': input '{tensor.name}'"
    if tensor.name not in sample.inputs:
        if tensor.optional:
            return MISSING
        names = [one.name for one in spec.inputs]
        raise ConfigError(f"{where}: missing; expected {names}, got {sorted(sample.inputs)}")
    given = sample.inputs[tensor.name]
    datatype = CONFIG_DATATYPES.get(given.data_type, "TYPE_INVALID")
    if datatype != tensor.datatype:
        raise ConfigError(f"{where}: expected data_type {tensor.datatype}, got {datatype}")
    dims = tuple(given.dims)
    wanted = tensor.dims_of(len(dims))
    if not fits(dims, wanted):
        raise ConfigError(f"{where}: expected dims {list(wanted)}, got {list(dims)}")
    lead = 1 if spec.batched and not tensor.shape_tensor else 0
    shape = to_model(tensor, (1, *dims) if lead else dims, lead)
    kind = given.WhichOneof("input_data_type")
    if kind is None:
        raise ConfigError(f"{where}: expected zero_data, random_data or input_data_file, got none")
    try:
        element_count(shape)  # before random bits are generated for it
        if kind == "input_data_file":
            return decode_raw(read_inside(where, folder, given.input_data_file, "warmup"), by_name(datatype), shape)
        # Text is empty in either case, as Triton's.
        return _random(tensor, shape) if given.random_data else _filled(tensor, shape, b"", 0)
    except (TensorError, MemoryError) as error:
        raise ConfigError(f"{where}: {text_of(error)}") from None


def _filled(tensor: TensorSpec, shape: tuple[int, ...], text: bytes, number: int) -> Array:
    """All `text` or `number`. Memory for zeros isn't taken before it is written."""
    element_count(shape)
    dtype = by_name(tensor.datatype).dtype
    if dtype.hasobject or number:
        return np.full(shape, text if dtype.hasobject else number, dtype)
    return np.zeros(shape, dtype)


def size_bytes(tensor: TensorSpec, shape: tuple[int, ...]) -> int:
    dtype = by_name(tensor.datatype).dtype
    return math.prod(shape) * (_TEXT_BYTES if dtype.hasobject else dtype.itemsize)


def _random(tensor: TensorSpec, shape: tuple[int, ...]) -> Array:
    """Random bits for integers, [0, 1) for floats, nothing for text, as Triton. BF16: the bits of floats in [0, 1)."""
    dtype = by_name(tensor.datatype).dtype
    generator = np.random.default_rng(0)
    if dtype.hasobject:
        return _filled(tensor, shape, b"", 0)
    if dtype.kind == "b":
        return generator.integers(0, 2, shape).astype(dtype)
    if tensor.datatype == "BF16":
        return (generator.random(shape, np.float32).view("<u4") >> 16).astype(dtype)
    if dtype.kind == "f":
        return generator.random(shape).astype(dtype)
    limits = np.iinfo(dtype)
    return generator.integers(limits.min, limits.max, shape, dtype, endpoint=True)
