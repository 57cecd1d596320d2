"""Configurations of sequences as text, a model that has such tensors, and what becomes of both.

Lives here: what the tests of configured sequences share. Must not: assertions about behaviour.
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from google.protobuf import text_format

from paceline.backends.spec import ModelSpec, SequenceSpec, TensorSpec
from paceline.protos import model_config_pb2 as pb
from paceline.server.errors import ConfigError
from paceline.server.models.model_config import ServingPlan, check_supported, plan

__all__ = ["OWN", "control", "corrid", "own", "planned", "refusal", "sequence", "sequences", "state"]

OWN = ModelSpec(
    (
        TensorSpec("a", "FP32", (-1, 4), axis_names=("batch", "")),
        TensorSpec("rate", "INT64", ()),
        TensorSpec("START", "FP32", (-1, 1)),
        TensorSpec("READY", "INT32", (-1,)),
        TensorSpec("END", "BOOL", (-1, -1)),
        TensorSpec("ID", "UINT64", (-1, 1)),
        TensorSpec("NAME", "BYTES", (-1, 1)),
        TensorSpec("h", "FP32", (-1, 2)),
        TensorSpec("c", "FP32", (3, -1, 2)),
    ),
    (
        TensorSpec("x", "FP32", (-1, 4)),
        TensorSpec("h_out", "FP32", (-1, 2)),
        TensorSpec("c_out", "FP32", (3, -1, 2), assumed=True),
    ),
)


def own(*names: str) -> ModelSpec:
    """A model with only these tensors of `OWN`, besides a and x."""
    inputs, outputs = (
        tuple(one for one in tensors if one.name in ("a", "x", *names)) for tensors in (OWN.inputs, OWN.outputs)
    )
    return ModelSpec(inputs, outputs)


def control(name: str = "START", kind: str = "START", values: str = "fp32_false_true: [0, 1]") -> str:
    return f'control_input {{ name: "{name}" control {{ kind: CONTROL_SEQUENCE_{kind} {values} }} }} '


def corrid(name: str = "ID", more: str = "") -> str:
    return control(name, "CORRID", more)


def state(name: str = "h", more: str = "") -> str:
    return f'state {{ input_name: "{name}" output_name: "{name}_out" {more} }} '


def sequences(text: str, rows: int = 4, more: str = "") -> str:
    return f"max_batch_size: {rows} sequence_batching {{ {text} }} {more}"


def planned(text: str, model: ModelSpec, data: Mapping[str, bytes] | None = None) -> ServingPlan:
    """The plan for model m of the configuration `text`, checked as the loader does."""
    config = text_format.Parse(f'name: "m" {text}', pb.ModelConfig())
    check_supported(config)
    return plan(config, model, initial_data=data)


def sequence(text: str, model: ModelSpec, rows: int = 4, data: Mapping[str, bytes] | None = None) -> SequenceSpec:
    """What becomes of the `sequence_batching` whose fields are in `text`."""
    spec = planned(sequences(text, rows), model, data).spec.sequence
    assert spec is not None
    return spec


def refusal(text: str, model: ModelSpec, data: Mapping[str, bytes] | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        planned(text, model, data)
    return str(caught.value)
