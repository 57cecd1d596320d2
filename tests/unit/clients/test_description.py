"""A model's configuration and metadata as values, and these as text."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from google.protobuf import text_format

from paceline.clients import Batching, Instances, ModelDescription, ResponseError, Sequences
from paceline.clients.description import described, metadata_of
from paceline.clients.messages import IndexEntry, TensorMetadata
from paceline.clients.overview import description_json, description_lines, models_text, pipeline_lines
from paceline.protos.model_config_pb2 import ModelConfig

PIPELINE = """
    name: "embedding" platform: "ensemble" max_batch_size: 32
    input { name: "text" data_type: TYPE_STRING dims: 1 }
    output { name: "embedding" data_type: TYPE_FP32 dims: 384 }
    ensemble_scheduling {
      step {
        model_name: "pooling" model_version: 2
        input_map { key: "tokens" value: "token_embeddings" }
        input_map { key: "mask" value: "attention_mask" }
        output_map { key: "embedding" value: "embedding" }
      }
      step {
        model_name: "encoder" model_version: -1
        input_map { key: "input_ids" value: "input_ids" }
        input_map { key: "attention_mask" value: "attention_mask" }
        output_map { key: "token_embeddings" value: "token_embeddings" }
      }
      step {
        model_name: "tokenizer" model_version: -1
        input_map { key: "text" value: "text" }
        output_map { key: "input_ids" value: "input_ids" }
        output_map { key: "attention_mask" value: "attention_mask" }
      }
    }
"""


def of(text: str) -> ModelDescription:
    config = text_format.Parse(text, ModelConfig())
    return described(metadata_of(config, ["1"]), config)


def test_steps_follow_those_whose_outputs_they_take() -> None:
    assert pipeline_lines(of(PIPELINE).steps) == [
        "text -> tokenizer -> attention_mask, input_ids",
        "attention_mask, input_ids -> encoder -> token_embeddings",
        "attention_mask as mask, token_embeddings as tokens -> pooling version 2 -> embedding",
    ]


def test_independent_steps_stay_in_their_order() -> None:
    steps = "".join(
        f'step {{ model_name: "{name}" input_map {{ key: "x" value: "a" }} output_map {{ key: "y" value: "{name}" }} }}'
        for name in ("late", "early")
    )
    assert [step.model for step in of(f"ensemble_scheduling {{ {steps} }}").steps] == ["late", "early"]


def test_steps_that_wait_for_each_other_come_last() -> None:
    def step(name: str, takes: str, makes: str) -> str:
        return (
            f'step {{ model_name: "{name}" input_map {{ key: "x" value: "{takes}" }} '
            f'output_map {{ key: "y" value: "{makes}" }} }}'
        )

    steps = step("a", "right", "left") + step("b", "left", "right") + step("first", "in", "out")
    assert [one.model for one in of(f"ensemble_scheduling {{ {steps} }}").steps] == ["first", "a", "b"]


def test_pipeline_is_printed_with_its_steps() -> None:
    assert description_lines(of(PIPELINE)) == [
        "embedding  version 1  ensemble",
        "  inputs     text  BYTES  [rows, 1]",
        "  outputs    embedding  FP32  [rows, 384]",
        "  batching   up to 32 rows a request; each step as its model does",
        "  pipeline   text -> tokenizer -> attention_mask, input_ids",
        "             attention_mask, input_ids -> encoder -> token_embeddings",
        "             attention_mask as mask, token_embeddings as tokens -> pooling version 2 -> embedding",
    ]


ENCODER = """
    name: "encoder" platform: "onnxruntime_onnx" max_batch_size: 32
    input { name: "ids" data_type: TYPE_INT64 dims: -1 }
    input { name: "mask" data_type: TYPE_INT64 dims: -1 optional: true }
    output { name: "y" data_type: TYPE_FP32 dims: [ -1, 384 ] }
    dynamic_batching {
      preferred_batch_size: [ 8, 16 ] max_queue_delay_microseconds: 500
      default_queue_policy { max_queue_size: 1000 default_timeout_microseconds: 9 }
    }
    instance_group { kind: KIND_GPU count: 2 gpus: [ 0, 1 ] } instance_group { kind: KIND_CPU }
    parameters { key: "paceline.pad" value { string_value: "ids[1]=0, mask[1]=0" } }
    response_cache { enable: true }
"""


def test_batching_instances_and_lengths_are_read() -> None:
    found = of(ENCODER)
    assert found.batching == Batching(32, True, (8, 16), 500, 1000, 9, ("ids[1]=0", "mask[1]=0"))
    assert found.instances == (Instances("GPU", 2, (0, 1)), Instances("CPU", 1, ()))
    assert (found.optional_inputs, found.is_cached, found.is_decoupled) == (("mask",), True, False)
    assert found.inputs[0] == TensorMetadata("ids", "INT64", (-1, -1))


def test_model_is_printed_with_all_that_is_set() -> None:
    assert description_lines(of(ENCODER)) == [
        "encoder  version 1  onnxruntime_onnx",
        "  inputs     ids   INT64  [rows, any]",
        "             mask  INT64  [rows, any]  optional",
        "  outputs    y  FP32  [rows, any, 384]",
        "  batching   up to 32 rows, preferred 8, 16, waits up to 500 us for more, at most 1000 requests in the queue, "
        "for 9 us each",
        "  lengths    filled up to the longest of a batch: ids[1]=0, mask[1]=0",
        "  instances  2 on each of GPU 0, 1, 1 on the CPU",
        "  cache      answers are kept for equal requests",
    ]


@pytest.mark.parametrize(
    ("config", "line"),
    [
        ("", "none: requests run one by one"),
        ("max_batch_size: 4", "none: requests of up to 4 rows run one by one"),
        ("max_batch_size: 4 dynamic_batching { }", "up to 4 rows"),
        ("max_batch_size: 4 sequence_batching { oldest { preferred_batch_size: 2 } }", "up to 4 rows, preferred 2"),
        ("ensemble_scheduling { step { } }", "each step as its model does"),
    ],
)
def test_how_requests_share_batches_is_printed(config: str, line: str) -> None:
    assert f"  batching   {line}" in description_lines(of(config))


def test_sequences_are_read_and_printed() -> None:
    found = of("""
        max_batch_size: 4 model_transaction_policy { decoupled: true }
        sequence_batching {
          oldest { } max_sequence_idle_microseconds: 5000000
          control_input { name: "begin" control { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } }
          control_input { name: "id" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 } }
          state { input_name: "h" output_name: "hn" }
        }
    """)
    assert found.sequences == Sequences("oldest", 5_000_000, {"begin": ("START",), "id": ("CORRID",)}, {"hn": "h"})
    assert description_lines(found)[-6:] == [
        "  sequences  a sequence ends after 5 s without a request",
        "             strategy oldest: requests that have waited longest share a batch, in any row",
        "             input begin is filled in by the server: whether the request is the first of its sequence (START)",
        "             input id is filled in by the server: the sequence's id (CORRID)",
        "             output hn is kept as state, and is input h of the next request",
        "  answers    any number for each request (decoupled)",
    ]


def test_kind_that_nobody_knows_raises_response_error() -> None:
    config = ModelConfig()
    config.instance_group.add(kind=99)  # type: ignore[arg-type]
    with pytest.raises(ResponseError, match="unknown kind: 99"):
        described(metadata_of(config, []), config)


def test_model_without_configuration_says_so() -> None:
    found = described(metadata_of(ModelConfig(name="m"), ["3", "4"]), None)
    assert not found.is_configured
    assert description_lines(found)[0] == "m  versions 3, 4"
    assert description_lines(found)[-1] == "  batching   unknown: the server has no ModelConfig"


def test_description_as_json_has_each_fact() -> None:
    document = json.loads(description_json(of(PIPELINE)))
    assert document["inputs"] == [{"name": "text", "datatype": "BYTES", "shape": [-1, 1]}]
    assert document["steps"][0] == {
        "model": "tokenizer",
        "version": "",
        "inputs": {"text": "text"},
        "outputs": {"attention_mask": "attention_mask", "input_ids": "input_ids"},
    }


def test_what_was_found_replaces_the_fact_of_its_name() -> None:
    lines = description_lines(of("max_batch_size: 4"), {"batching": "tried", "warm-up": "zeros", "more": ""})
    assert lines[-2:] == ["  batching   tried", "  warm-up    zeros"]


def test_names_that_are_not_printable_are_replaced() -> None:
    bad = replace(of(PIPELINE), name="a\x1b[2J\nb", inputs=(TensorMetadata("x\x07", "FP32", (-1,)),))
    assert all(line.isprintable() for line in description_lines(bad))
    assert models_text([IndexEntry("m\n", "1", "UNAVAILABLE", "broken\nbadly")]).splitlines() == [
        "MODEL  VERSION  STATE        REASON",
        "m      1        UNAVAILABLE  broken badly",
    ]
