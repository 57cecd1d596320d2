"""Loads with configurations of all kinds, accepted and refused."""

from __future__ import annotations

from google.protobuf import text_format
from google.protobuf.json_format import MessageToJson

from paceline.protos import model_config_pb2 as config_pb
from tests.differential.comparing import Call
from tests.differential.messages import config, floats, infer, load
from tests.differential.repository import model_config

__all__ = ["CALLS"]

NONSENSE = "loads and unloads that make no sense"
BATCHED = "max_batch_size: 8 dynamic_batching { }"


def loading(head: str = BATCHED, *tensors: str, more: str = "", **parameters: object) -> object:
    """A load of model `serial` with this configuration."""
    text = model_config(head, *(tensors or ("0 FP32 [-1]",)), more=more, **parameters)
    return load("serial", config=MessageToJson(text_format.Parse(text, config_pb.ModelConfig())))


def batching(fields: str) -> object:
    return loading(f"max_batch_size: 8 dynamic_batching {{ {fields} }}")


def warmup(fields: str, batch_size: int = 1) -> object:
    sample = f'inputs {{ key: "INPUT0" value {{ data_type: TYPE_FP32 {fields} }} }}'
    return loading(more=f'model_warmup {{ name: "w" batch_size: {batch_size} {sample} }}')


CALLS = [
    Call("no batching", loading("")),
    Call("one row", loading("max_batch_size: 1")),
    Call("batching of no rows", loading("dynamic_batching { }")),
    Call("rows below 0", loading("max_batch_size: -1"), "INTERNAL", "INVALID_ARGUMENT", NONSENSE),
    Call("preferred sizes", batching("preferred_batch_size: [2, 4] max_queue_delay_microseconds: 100")),
    Call("preferred size beyond the rows", batching("preferred_batch_size: 9"), "INTERNAL", "INVALID_ARGUMENT",
         NONSENSE),
    Call("preferred size of 0", batching("preferred_batch_size: 0"), "INTERNAL", "INVALID_ARGUMENT", NONSENSE),
    Call("preferred sizes, twice", batching("preferred_batch_size: [4, 4, 2]")),
    Call("priority levels", batching("priority_levels: 2 default_priority_level: 1")),
    Call("priority levels and no default", batching("priority_levels: 2"), "INTERNAL", "INVALID_ARGUMENT", NONSENSE),
    Call("default level beyond the levels", batching("priority_levels: 2 default_priority_level: 3"), "INTERNAL",
         "INVALID_ARGUMENT", NONSENSE),
    Call("policy of a level beyond the levels",
         batching("priority_levels: 2 default_priority_level: 1 priority_queue_policy { key: 3 value { } }"),
         "INTERNAL", "INVALID_ARGUMENT", NONSENSE),
    Call("priorities in order", batching("priority_levels: 2 default_priority_level: 1 preserve_ordering: true"),
         "INTERNAL", "INVALID_ARGUMENT", NONSENSE),
    Call("delayed in order", batching("preserve_ordering: true default_queue_policy { timeout_action: DELAY }")),
    Call("delayed timeouts in order",
         batching("preserve_ordering: true default_queue_policy { "
                  "timeout_action: DELAY default_timeout_microseconds: 1000000 }"),
         "INTERNAL", "INVALID_ARGUMENT", NONSENSE),
    Call("in order", batching("preserve_ordering: true")),
    Call("a dimension of 0", loading(BATCHED, "0 FP32 [0]"), "INVALID_ARGUMENT", "OK", "`dims`"),
    Call("a dimension of -2", loading(BATCHED, "0 FP32 [-2]"), "INVALID_ARGUMENT"),
    Call("no dimensions", loading(BATCHED, "0 FP32 []"), "INVALID_ARGUMENT", "OK", "`dims`"),
    Call("two inputs of a name", loading(BATCHED, "0 FP32 [4]", "0 FP32 [4]"), "OK", "INVALID_ARGUMENT",
         "two inputs of one"),
    Call("an input without a name", loading(more="input { data_type: TYPE_FP32 dims: [1] optional: true }"),
         "INVALID_ARGUMENT", phrase="name"),
    Call("an output without a name", loading(more="output { data_type: TYPE_FP32 dims: [1] }"), "INVALID_ARGUMENT",
         phrase="name"),
    Call("reshape of other size", loading(BATCHED, "0 FP32 [4] reshape { shape: [5] }"), "INVALID_ARGUMENT"),
    Call("reshape of free dimensions", loading(BATCHED, "0 FP32 [-1, 2] reshape { shape: [4] }"), "INVALID_ARGUMENT"),
    Call("optional inputs", loading(BATCHED, "0 FP32 [-1]", "1 FP32 [-1] optional: true")),
    Call("optional inputs without batching", loading("", "0 FP32 [-1]", "1 FP32 [-1] optional: true")),
    Call("ragged input", loading(BATCHED, "0 FP32 [-1] allow_ragged_batch: true")),
    Call("batch input of nobody", loading(BATCHED, "0 FP32 [-1] allow_ragged_batch: true", more="""
        batch_input { kind: BATCH_ELEMENT_COUNT target_name: "N" data_type: TYPE_INT32 source_input: "INPUT9" }"""),
         "INVALID_ARGUMENT"),
    Call("batch input of text", loading(BATCHED, "0 FP32 [-1] allow_ragged_batch: true", more="""
        batch_input { kind: BATCH_ELEMENT_COUNT target_name: "N" data_type: TYPE_STRING source_input: "INPUT0" }"""),
         "INVALID_ARGUMENT"),
    Call("labels", loading(BATCHED, '0 FP32 [4] | label_filename: "labels.txt"')),
    Call("labels that aren't there", loading(BATCHED, '0 FP32 [4] | label_filename: "none.txt"'), "INVALID_ARGUMENT"),
    Call("labels elsewhere", loading(BATCHED, '0 FP32 [4] | label_filename: "../labelled/labels.txt"'),
         "OK", "INVALID_ARGUMENT", "a `label_filename`"),
    Call("warm-up of zeros", warmup("dims: [3] zero_data: true")),
    Call("warm-up of random data", warmup("dims: [3] random_data: true", 4)),
    Call("warm-up of free dimensions", warmup("dims: [-1] zero_data: true"), "INVALID_ARGUMENT"),
    Call("warm-up of other dimensions", warmup("dims: [3, 3] zero_data: true"), "INVALID_ARGUMENT"),
    Call("warm-up of no rows", warmup("dims: [3] zero_data: true", 0)),
    Call("warm-up by a file that isn't there", warmup('dims: [3] input_data_file: "none"'), "INVALID_ARGUMENT"),
    Call("warm-up that says nothing", loading(more='model_warmup { name: "w" batch_size: 1 }'), "INVALID_ARGUMENT"),
    Call("versions of which none is there", loading("version_policy { specific { versions: 7 } }"), "INVALID_ARGUMENT"),
    Call("versions of which some are there", loading("version_policy { specific { versions: [1, 7] } }")),
    Call("the latest versions, no number of them", loading("version_policy { latest { } }"), "INVALID_ARGUMENT", "OK",
         "`latest`"),
    Call("all versions", loading("version_policy { all { } }")),
    Call("instances", loading(more="instance_group { count: 2 kind: KIND_CPU }")),
    Call("config of that", config("serial"), row="pinned memory", free=("optimization", "parameters")),
    Call("two groups", loading(more="instance_group [{ kind: KIND_CPU }, { name: 'mine' kind: KIND_CPU }]")),
    Call("config of that", config("serial"), row="pinned memory", free=("optimization", "parameters")),
    Call("instances below 0", loading(more="instance_group { count: -1 kind: KIND_CPU }"), "OK", "INVALID_ARGUMENT",
         "`instance_group`"),
    Call("instances on a GPU that isn't there", loading(more="instance_group { kind: KIND_GPU }"), "INVALID_ARGUMENT"),
    Call("GPUs of a CPU", loading(more="instance_group { kind: KIND_CPU gpus: 0 }"), "INVALID_ARGUMENT", "OK",
         "`instance_group`"),
    Call("passive instances", loading(more="instance_group { kind: KIND_CPU passive: true }"), "OK",
         "INVALID_ARGUMENT", "decoupled models of ONNX"),
    Call("tags of metrics", loading(more='metric_tags { key: "a" value: "b" }')),
    Call("unknown backend", load("serial", config='{"backend": "nobody", "max_batch_size": 1}'), "INVALID_ARGUMENT"),
    Call("decoupled", loading(more="model_transaction_policy { decoupled: true }")),
    Call("sequences", loading("max_batch_size: 8 sequence_batching { }")),
    Call("sequences of candidates below 0", loading("sequence_batching { oldest { max_candidate_sequences: -1 } }"),
         "OK", "INVALID_ARGUMENT", NONSENSE),
    Call("a control of no kind", loading("max_batch_size: 8 sequence_batching { control_input { name: 'S' } }"), "OK",
         "INVALID_ARGUMENT", NONSENSE),
    Call("a control that is an input", loading("""max_batch_size: 8 sequence_batching { control_input {
            name: "INPUT0" control { kind: CONTROL_SEQUENCE_START bool_false_true: [false, true] } } }"""),
         "OK", "INVALID_ARGUMENT", NONSENSE),
    Call("a cache", loading(more="response_cache { enable: true }")),
    Call("agents", loading(more='model_repository_agents { agents { name: "nobody" } }'), "INTERNAL",
         "INVALID_ARGUMENT", NONSENSE),
    Call("shape tensors", loading(BATCHED, "0 INT32 [2] is_shape_tensor: true"), "INVALID_ARGUMENT"),
    Call("priority of a rate limiter", loading(more="instance_group { kind: KIND_CPU rate_limiter { priority: 1 } }")),
    Call("outputs beyond the model's",
         loading(BATCHED, "0 FP32 [-1]", more='output { name: "X" data_type: TYPE_FP32 dims: [1] }')),
    Call("no tensors", load("serial", config='{"backend": "python"}'), "INVALID_ARGUMENT"),
    Call("as it is on disk", load("serial")),
    Call("infer that", infer("serial", {"INPUT0": floats(1, 3)})),
]  # fmt: skip
