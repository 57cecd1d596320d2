"""Configurations of single tensors as text, a model that has such tensors, and what becomes of both.

Lives here: what the tests of configured tensors share. Must not: assertions about behaviour.
"""

from __future__ import annotations

import pytest
from google.protobuf import text_format

from paceline.backends.spec import ModelSpec, TensorSpec
from paceline.protos import model_config_pb2 as pb
from paceline.server.errors import ConfigError
from paceline.server.models.model_config import plan

__all__ = ["OWN", "RAGGED", "SCATTER", "SQUARE", "X", "batch_input", "own", "refusal", "served", "tensor"]

OWN = ModelSpec(
    (
        TensorSpec("flat", "FP32", (-1,)),
        TensorSpec("square", "FP32", (-1, 2, 2)),
        TensorSpec("counts", "INT32", (-1,)),
        TensorSpec("items", "INT32", (-1, -1)),
        TensorSpec("shape", "INT64", (2,)),
        TensorSpec("bias", "FP32", (-1, 4), optional=True),
    ),
    (TensorSpec("x", "FP32", (-1,)), TensorSpec("y", "FP32", (-1, 2, 2))),
)


def own(*inputs: str) -> ModelSpec:
    """A model with only these inputs of `OWN`."""
    return ModelSpec(tuple(one for one in OWN.inputs if one.name in inputs), OWN.outputs)


def tensor(name: str, dims: str, more: str = "", data_type: str = "FP32", kind: str = "input") -> str:
    return f'{kind} {{ name: "{name}" data_type: TYPE_{data_type} dims: [ {dims} ] {more} }} '


RAGGED = tensor("flat", "-1", "allow_ragged_batch: true")
SQUARE = tensor("square", "4", "reshape { shape: [ 2, 2 ] }")
X = tensor("x", "-1", kind="output")

SCATTER = 'batch_output { target_name: "x" kind: BATCH_SCATTER_WITH_INPUT_SHAPE source_input: "flat" } '


def batch_input(
    target: str = "counts", kind: str = "BATCH_ELEMENT_COUNT", data_type: str = "INT32", source: str = "flat"
) -> str:
    return (
        f'batch_input {{ kind: {kind} target_name: "{target}" data_type: TYPE_{data_type} source_input: "{source}" }} '
    )


def served(text: str, model: ModelSpec, rows: int = 4) -> ModelSpec:
    return plan(text_format.Parse(f"max_batch_size: {rows} {text}", pb.ModelConfig()), model).spec


def refusal(text: str, model: ModelSpec, rows: int = 4) -> str:
    with pytest.raises(ConfigError) as caught:
        served(text, model, rows)
    return str(caught.value)
