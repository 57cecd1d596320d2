"""What becomes of every field of Triton's ModelConfig: `READ` fields, with two configurations that differ only in them,
`IGNORED` ones, with the same, and `REFUSED` ones, with one that has it. `OWN`: models that these configure."""

from __future__ import annotations

from paceline.backends.spec import ModelSpec, TensorSpec

TENSORS = """
    input { name: "a" data_type: TYPE_FP32 dims: [ 4 ] }
    output { name: "x" data_type: TYPE_FP32 dims: [ 4 ] label_filename: "one.txt" }
"""
RAGGED = """
    max_batch_size: 4
    input { name: "r" data_type: TYPE_FP32 dims: [ -1 ] allow_ragged_batch: true }
    input { name: "rows" data_type: TYPE_FP32 dims: [ 1 ] }
    output { name: "x" data_type: TYPE_FP32 dims: [ -1 ] }
"""
MADE = "kind: BATCH_ELEMENT_COUNT target_name: 'made' data_type: TYPE_FP32 source_input: 'r'"
ALSO = "batch_input { kind: BATCH_ELEMENT_COUNT target_name: 'made' data_type: TYPE_FP32 source_input: 'r' }"
SCATTERED = "kind: BATCH_SCATTER_WITH_INPUT_SHAPE target_name: 'x' source_input: 'r'"
BATCHING, QUEUE = "dynamic_batching { %s }", "dynamic_batching { default_queue_policy { %s } }"
LEVEL = (
    "dynamic_batching { priority_levels: 2 default_priority_level: 1 priority_queue_policy { key: 2 value { %s } } }"
)
SAMPLE = "batch_size: 1 inputs { key: 'a' value { data_type: TYPE_FP32 dims: 4 zero_data: true } }"
GIVEN = "model_warmup { batch_size: 1 inputs { key: 'a' value { %s } } }"
GPU = "optimization { execution_accelerators { gpu_execution_accelerator { %s } } }"
SEQUENCES = "max_batch_size: 4 sequence_batching { %s }"
OLDEST, DIRECT = SEQUENCES % "oldest { %s }", SEQUENCES % "direct { minimum_slot_utilization: 0.5 %s }"
CONTROL = SEQUENCES % "control_input { name: 'START' control { %s } }"
CORRID = SEQUENCES % "control_input { name: 'ID' control { kind: CONTROL_SEQUENCE_CORRID %s } }"
STATE = SEQUENCES % "state { input_name: 'h' output_name: 'h_out' %s }"
INITIAL = "name: 'i' data_type: TYPE_FP32 dims: 2"
FIRST = STATE % "initial_state { %s }"
CPU = "optimization { execution_accelerators { cpu_execution_accelerator { %s } } }"

# By field, two configurations that differ only in it.
STEPS = """platform: "ensemble"
    input { name: "a" data_type: TYPE_FP32 dims: [ 4 ] } output { name: "x" data_type: TYPE_FP32 dims: [ 4 ] }
    ensemble_scheduling { step { %s input_map { key: "b" value: "a" } output_map { key: "y" value: "x" } } }"""
STEP = STEPS % 'model_name: "m"'
READ: dict[str, tuple[str, str]] = {
    "name": ("", 'name: "other"'),
    "platform": ("", 'platform: "identity"'),
    "backend": ("", 'backend: "identity"'),
    "version_policy.latest.num_versions": ("", "version_policy { latest { num_versions: 2 } }"),
    "version_policy.all": ("", "version_policy { all { } }"),
    "version_policy.specific.versions": ("", "version_policy { specific { versions: 1 } }"),
    "max_batch_size": ("max_batch_size: 4", "max_batch_size: 5"),
    "input.name": (TENSORS, TENSORS.replace('"a"', '"b"')),
    "input.data_type": (TENSORS, TENSORS.replace("FP32", "INT32", 1)),
    "input.dims": ("max_batch_size: 2" + TENSORS, "max_batch_size: 2" + TENSORS.replace("4", "5", 1)),
    "input.reshape.shape": (TENSORS, TENSORS.replace("[ 4 ]", "[ 4 ] reshape { shape: [ 1, 4 ] }", 1)),
    "input.is_shape_tensor": (RAGGED + ALSO, RAGGED.replace("[ 1 ]", "[ 1 ] is_shape_tensor: true") + ALSO),
    "input.allow_ragged_batch": (RAGGED + ALSO, RAGGED.replace("allow_ragged_batch: true", "") + ALSO),
    "input.optional": (TENSORS, TENSORS.replace("[ 4 ]", "[ 4 ] optional: true", 1)),
    "output.name": (TENSORS, TENSORS.replace('"x"', '"y"')),
    "output.data_type": (TENSORS, TENSORS.replace("TYPE_FP32 dims: [ 4 ] l", "TYPE_INT8 dims: [ 4 ] l")),
    "output.dims": ("max_batch_size: 2" + TENSORS, "max_batch_size: 2" + TENSORS.replace("[ 4 ] l", "[ 5 ] l")),
    "output.reshape.shape": (TENSORS, TENSORS.replace("[ 4 ] l", "[ 4 ] reshape { shape: [ 2, 2 ] } l")),
    "output.label_filename": ("max_batch_size: 2" + TENSORS, "max_batch_size: 2" + TENSORS.replace("one", "two")),
    "output.is_shape_tensor": (
        "max_batch_size: 2" + TENSORS,
        "max_batch_size: 2" + TENSORS.replace("[ 4 ] l", "[ 4 ] is_shape_tensor: true l"),
    ),
    "batch_input.kind": (
        f"{RAGGED} batch_input {{ {MADE} }}",
        f"{RAGGED} batch_input {{ {MADE.replace('ELEMENT', 'ACCUMULATED_ELEMENT')} }}",
    ),
    "batch_input.target_name": (
        f"{RAGGED} batch_input {{ {MADE} }}",
        f"{RAGGED} batch_input {{ {MADE.replace('made', 'other')} }}",
    ),
    "batch_input.data_type": (
        f"{RAGGED} batch_input {{ {MADE} }}",
        f"{RAGGED} batch_input {{ {MADE.replace('FP32', 'INT32')} }}",
    ),
    "batch_input.source_input": (
        f"{RAGGED} batch_input {{ {MADE} }}",
        f"{RAGGED} batch_input {{ {MADE.replace(chr(39) + 'r' + chr(39), chr(39) + 'rows' + chr(39))} }}",
    ),
    "batch_output.target_name": (
        f"{RAGGED} {ALSO}",
        f"{RAGGED} {ALSO} batch_output {{ {SCATTERED} }}",
    ),
    "batch_output.kind": (
        f"{RAGGED} {ALSO} batch_output {{ {SCATTERED} }}",
        f"{RAGGED} {ALSO} batch_output {{ {SCATTERED.replace('BATCH_SCATTER_WITH_INPUT_SHAPE', '9')} }}",
    ),
    "batch_output.source_input": (
        f"{RAGGED} {ALSO} batch_output {{ {SCATTERED} }}",
        f"{RAGGED} {ALSO} batch_output {{ {SCATTERED.replace(chr(39) + 'r' + chr(39), chr(39) + 'rows' + chr(39))} }}",
    ),
    "optimization.graph.level": ("", "optimization { graph { level: 1 } }"),
    "optimization.cuda.graphs": ("", "optimization { cuda { graphs: true } }"),
    "optimization.execution_accelerators.gpu_execution_accelerator.name": ("", GPU % 'name: "cuda"'),
    "optimization.execution_accelerators.gpu_execution_accelerator.parameters": (
        GPU % 'name: "cuda"',
        GPU % 'name: "cuda" parameters { key: "k" value: "v" }',
    ),
    "optimization.execution_accelerators.cpu_execution_accelerator.name": ("", CPU % 'name: "openvino"'),
    "optimization.execution_accelerators.cpu_execution_accelerator.parameters": (
        CPU % 'name: "openvino"',
        CPU % 'name: "openvino" parameters { key: "k" value: "v" }',
    ),
    "dynamic_batching.preferred_batch_size": ("", BATCHING % "preferred_batch_size: 3"),
    "dynamic_batching.max_queue_delay_microseconds": ("", BATCHING % "max_queue_delay_microseconds: 3"),
    "dynamic_batching.preserve_ordering": ("", BATCHING % "preserve_ordering: true"),
    "dynamic_batching.priority_levels": (
        BATCHING % "priority_levels: 2 default_priority_level: 1",
        BATCHING % "priority_levels: 3 default_priority_level: 1",
    ),
    "dynamic_batching.default_priority_level": (
        BATCHING % "priority_levels: 2 default_priority_level: 1",
        BATCHING % "priority_levels: 2 default_priority_level: 2",
    ),
    "dynamic_batching.default_queue_policy.timeout_action": ("", QUEUE % "timeout_action: DELAY"),
    "dynamic_batching.default_queue_policy.default_timeout_microseconds": (
        "",
        QUEUE % "default_timeout_microseconds: 1",
    ),
    "dynamic_batching.default_queue_policy.allow_timeout_override": ("", QUEUE % "allow_timeout_override: true"),
    "dynamic_batching.default_queue_policy.max_queue_size": ("", QUEUE % "max_queue_size: 1"),
    "dynamic_batching.priority_queue_policy.timeout_action": (LEVEL % "", LEVEL % "timeout_action: DELAY"),
    "dynamic_batching.priority_queue_policy.default_timeout_microseconds": (
        LEVEL % "",
        LEVEL % "default_timeout_microseconds: 1",
    ),
    "dynamic_batching.priority_queue_policy.allow_timeout_override": (
        LEVEL % "",
        LEVEL % "allow_timeout_override: true",
    ),
    "dynamic_batching.priority_queue_policy.max_queue_size": (LEVEL % "", LEVEL % "max_queue_size: 1"),
    "sequence_batching.direct.max_queue_delay_microseconds": (DIRECT % "", DIRECT % "max_queue_delay_microseconds: 3"),
    "sequence_batching.direct.minimum_slot_utilization": (
        SEQUENCES % "direct { minimum_slot_utilization: 0.5 }",
        SEQUENCES % "direct { minimum_slot_utilization: 0.75 }",
    ),
    "sequence_batching.oldest.max_candidate_sequences": (OLDEST % "", OLDEST % "max_candidate_sequences: 20000"),
    "sequence_batching.oldest.preferred_batch_size": (OLDEST % "", OLDEST % "preferred_batch_size: 2"),
    "sequence_batching.oldest.max_queue_delay_microseconds": (OLDEST % "", OLDEST % "max_queue_delay_microseconds: 3"),
    "sequence_batching.oldest.preserve_ordering": (OLDEST % "", OLDEST % "preserve_ordering: true"),
    "sequence_batching.max_sequence_idle_microseconds": (
        SEQUENCES % "",
        SEQUENCES % "max_sequence_idle_microseconds: 7",
    ),
    "sequence_batching.control_input.name": (
        CONTROL % "fp32_false_true: [0, 1]",
        (CONTROL % "fp32_false_true: [0, 1]").replace("START", "OTHER"),
    ),
    "sequence_batching.control_input.control.kind": (
        CONTROL % "fp32_false_true: [0, 1]",
        CONTROL % "kind: CONTROL_SEQUENCE_READY fp32_false_true: [0, 1]",
    ),
    "sequence_batching.control_input.control.int32_false_true": (
        CONTROL % "fp32_false_true: [0, 1]",
        CONTROL % "int32_false_true: [0, 1]",
    ),
    "sequence_batching.control_input.control.fp32_false_true": (
        CONTROL % "fp32_false_true: [0, 1]",
        CONTROL % "fp32_false_true: [0, 2]",
    ),
    "sequence_batching.control_input.control.bool_false_true": (
        CONTROL % "fp32_false_true: [0, 1]",
        CONTROL % "bool_false_true: [false, true]",
    ),
    "sequence_batching.control_input.control.data_type": (CORRID % "", CORRID % "data_type: TYPE_UINT32"),
    "sequence_batching.state.input_name": (STATE % "", (STATE % "").replace("'h'", "'c'")),
    "sequence_batching.state.output_name": (STATE % "", (STATE % "").replace("'h_out'", "'x'")),
    "sequence_batching.state.data_type": (STATE % "", STATE % "data_type: TYPE_INT8"),
    "sequence_batching.state.dims": (STATE % "", STATE % "dims: 3"),
    "sequence_batching.state.initial_state.data_type": (
        FIRST % f"{INITIAL} zero_data: true",
        FIRST % "name: 'i' data_type: TYPE_INT8 dims: 2 zero_data: true",
    ),
    "sequence_batching.state.initial_state.dims": (
        FIRST % f"{INITIAL} zero_data: true",
        FIRST % "name: 'i' data_type: TYPE_FP32 dims: 3 zero_data: true",
    ),
    "sequence_batching.state.initial_state.zero_data": (FIRST % INITIAL, FIRST % f"{INITIAL} zero_data: true"),
    "sequence_batching.state.initial_state.data_file": (
        FIRST % f"{INITIAL} zero_data: true",
        FIRST % f"{INITIAL} data_file: 'eight'",
    ),
    "sequence_batching.state.initial_state.name": (
        FIRST % "data_type: TYPE_FP32 dims: 2 zero_data: true",
        FIRST % f"{INITIAL} zero_data: true",
    ),
    "instance_group.kind": ("", "instance_group { kind: KIND_CPU }"),
    "instance_group.count": ("", "instance_group { count: 2 }"),
    "instance_group.gpus": ("", "instance_group { gpus: 0 }"),
    "default_model_filename": ("", 'default_model_filename: "other.onnx"'),
    "response_cache.enable": ("", "response_cache { enable: true }"),
    "metric_tags": ("", 'metric_tags { key: "a" value: "b" }'),
    "parameters.string_value": ("", 'parameters { key: "k" value { string_value: "v" } }'),
    "model_warmup.name": ("model_warmup { batch_size: 99 }", 'model_warmup { batch_size: 99 name: "s" }'),
    "model_warmup.batch_size": (
        f"model_warmup {{ {SAMPLE} }}",
        f"model_warmup {{ {SAMPLE.replace('size: 1', 'size: 2')} }}",
    ),
    "model_warmup.count": (f"model_warmup {{ {SAMPLE} }}", f"model_warmup {{ count: 2 {SAMPLE} }}"),
    "model_warmup.inputs.data_type": (f"model_warmup {{ {SAMPLE} }}", GIVEN % "data_type: TYPE_INT8 dims: 4"),
    "model_warmup.inputs.dims": (f"model_warmup {{ {SAMPLE} }}", GIVEN % "data_type: TYPE_FP32 dims: 5"),
    "model_warmup.inputs.zero_data": (
        GIVEN % "data_type: TYPE_FP32 dims: 4",
        GIVEN % "data_type: TYPE_FP32 dims: 4 zero_data: true",
    ),
    "model_warmup.inputs.random_data": (
        GIVEN % "data_type: TYPE_FP32 dims: 4",
        GIVEN % "data_type: TYPE_FP32 dims: 4 random_data: true",
    ),
    "model_warmup.inputs.input_data_file": (
        GIVEN % "data_type: TYPE_FP32 dims: 4",
        GIVEN % "data_type: TYPE_FP32 dims: 4 input_data_file: 'x'",
    ),
    "model_transaction_policy.decoupled": ("", "model_transaction_policy { decoupled: true }"),
    "ensemble_scheduling.step.model_name": (STEP, STEPS % 'model_name: "n"'),
    "ensemble_scheduling.step.model_version": (
        STEP,
        STEPS % 'model_name: "m" model_version: 2',
    ),
    "ensemble_scheduling.step.input_map": (
        STEPS % 'model_name: "m"',
        (STEPS % 'model_name: "m"').replace('"b"', '"c"'),
    ),
    "ensemble_scheduling.step.output_map": (
        STEPS % 'model_name: "m"',
        (STEPS % 'model_name: "m"').replace('"y"', '"z"'),
    ),
    "ensemble_scheduling.max_inflight_requests": (
        STEP,
        STEP.replace("step", "max_inflight_requests: 2 step"),
    ),
    "model_operations.op_library_filename": ("", 'model_operations { op_library_filename: "one.txt" }'),
    "sequence_batching.iterative_sequence": (SEQUENCES % "", SEQUENCES % "iterative_sequence: true"),
}

GRAPH_SPEC = """graph_spec {
      batch_size: 1 input { key: "a" value { dim: 4 } }
      graph_lower_bound { batch_size: 1 input { key: "a" value { dim: 1 } } }
    }
"""
IGNORED: dict[str, tuple[str, str]] = {
    "runtime": ("", 'runtime: "r"'),
    "input.format": (TENSORS, TENSORS.replace("[ 4 ]", "[ 4 ] format: FORMAT_NCHW", 1)),
    "optimization.priority": ("", "optimization { priority: PRIORITY_MAX }"),
    "optimization.cuda.busy_wait_events": ("", "optimization { cuda { busy_wait_events: true } }"),
    "optimization.cuda.output_copy_stream": ("", "optimization { cuda { output_copy_stream: true } }"),
    "optimization.cuda.graph_spec": ("", f"optimization {{ cuda {{ {GRAPH_SPEC} }} }}"),
    "optimization.input_pinned_memory": ("", "optimization { input_pinned_memory { enable: true } }"),
    "optimization.output_pinned_memory": ("", "optimization { output_pinned_memory { enable: true } }"),
    "optimization.gather_kernel_buffer_threshold": ("", "optimization { gather_kernel_buffer_threshold: 1 }"),
    "optimization.eager_batching": ("", "optimization { eager_batching: true }"),
    "instance_group.name": ("instance_group { }", 'instance_group { name: "g" }'),
    "instance_group.rate_limiter": (
        "instance_group { }",
        'instance_group { rate_limiter { priority: 1 resources { name: "r" global: true count: 1 } } }',
    ),
    "instance_group.profile": ("instance_group { }", 'instance_group { profile: "p" }'),
    "instance_group.host_policy": ("instance_group { }", 'instance_group { host_policy: "h" }'),
    "sequence_batching.state.use_same_buffer_for_input_output": (
        STATE % "",
        STATE % "use_same_buffer_for_input_output: true",
    ),
    "cc_model_filenames": ("", 'cc_model_filenames { key: "7.5" value: "x.onnx" }'),
    "model_metrics": (
        "",
        'model_metrics { metric_control { metric_identifier { family: "f" } histogram_options { buckets: 1 } } }',
    ),
}

REFUSED: dict[str, str] = {
    "input.is_non_linear_format_io": TENSORS.replace("[ 4 ]", "[ 4 ] is_non_linear_format_io: true", 1),
    "output.is_non_linear_format_io": TENSORS.replace("[ 4 ] l", "[ 4 ] is_non_linear_format_io: true l"),
    "sequence_batching.state.use_growable_memory": STATE % "use_growable_memory: true",
    "ensemble_scheduling.step.model_namespace": STEPS % 'model_name: "m" model_namespace: "n"',
    "instance_group.secondary_devices": "instance_group { secondary_devices { } }",
    "instance_group.passive": "instance_group { passive: true }",
    "model_repository_agents": 'model_repository_agents { agents { name: "x" } }',
}

OWN = {
    "rows": ModelSpec((TensorSpec("a", "FP32", (-1, 4)),), (TensorSpec("x", "FP32", (-1, 4)),)),
    "fixed": ModelSpec((TensorSpec("a", "FP32", (4,)),), (TensorSpec("x", "FP32", (4,)),)),
    "ragged": ModelSpec(
        (TensorSpec("r", "FP32", (-1,)), TensorSpec("made", "FP32", (-1,)), TensorSpec("rows", "FP32", (-1, 1))),
        (TensorSpec("x", "FP32", (-1, -1)),),
    ),
    "sequences": ModelSpec(
        (
            TensorSpec("a", "FP32", (-1, -1)),
            TensorSpec("START", "FP32", (-1, 1)),
            TensorSpec("ID", "INT64", (-1, 1)),
            TensorSpec("h", "FP32", (-1, 2)),
        ),
        (TensorSpec("x", "FP32", (-1, -1)), TensorSpec("h_out", "FP32", (-1, 2))),
    ),
}
