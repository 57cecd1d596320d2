"""Every field of Triton's ModelConfig, without exception: it changes what is served, or is ignored, or refused.

Lives here: the whole list, compared with the message's descriptor. A field is *read* if two configurations that differ
only in it load into something different, *ignored* if they don't, which docs/configuration.md has to say.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from google.protobuf.descriptor import Descriptor

from paceline.backends.base import Backend, Device, InstanceGroup, ModelSource
from paceline.backends.errors import BackendError
from paceline.backends.spec import Array, ModelSpec, Tensors, TensorSpec
from paceline.protos import model_config_pb2 as pb
from paceline.server.errors import ServerError
from paceline.server.models.defaults import LoadDefaults
from paceline.server.models.ensemble_config import EnsembleModel
from paceline.server.models.loader import load_model
from tests.harness import REPO
from tests.memory_models import MemoryModel
from tests.unit.server.found import find_models

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


class Recorder:
    """A backend of one model that records what it is asked for and what is executed."""

    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec
        self.asked: list[object] = []

    def named(self, name: str) -> Backend:
        self.asked.append(name)
        return self

    def devices(self, groups: Sequence[InstanceGroup]) -> tuple[Device, ...]:
        self.asked.append(groups)
        return (Device(),)

    def open(self, source: ModelSource, device: Device) -> MemoryModel:
        self.asked.append((source.path, source.parameters, source.graph_level))
        self.asked.append((source.accelerators, source.cpu_accelerators, source.op_libraries, source.cuda_graphs))
        return MemoryModel(self._spec, self._compute)

    def _compute(self, inputs: Tensors) -> list[Array]:
        self.asked.append([array.tolist() for array in inputs])
        return list(inputs[:1])


def loaded(folder: Path, text: str, own: ModelSpec) -> object:
    """All results of a load that can be compared; the reason if it fails."""
    recorder = Recorder(own)
    for version in "12":
        (folder / "m" / version).mkdir(parents=True, exist_ok=True)
    for name, label in (("one.txt", "cat"), ("two.txt", "dog")):
        (folder / "m" / name).write_text(label)
    (folder / "m" / "initial_state").mkdir(exist_ok=True)
    (folder / "m" / "initial_state" / "eight").write_bytes(b"12345678")
    (folder / "m" / "config.pbtxt").write_text(text)
    (model,) = find_models([folder])
    try:
        found = load_model(model, recorder.named, LoadDefaults(allow_op_libraries=True))
    except (ServerError, BackendError) as error:
        return f"{type(error).__name__}: {error}"
    steps = [(one.opened.steps, len(one.instances)) for one in found if isinstance(one.opened, EnsembleModel)]
    return [(one.name, one.version, repr(one.plan), one.labels) for one in found], recorder.asked, steps


def outcomes(folder: Path, text: str) -> list[object]:
    return [loaded(folder, text, own) for own in OWN.values()]


def fields(message: Descriptor, prefix: str = "") -> Iterator[str]:
    """The paths of all fields that hold a value, and of messages without fields."""
    for field in message.fields:
        path, kind = prefix + field.name, field.message_type
        if kind is not None and kind.GetOptions().map_entry:
            kind = kind.fields_by_name["value"].message_type
        if kind is None or not kind.fields:
            yield path
        else:
            yield from fields(kind, f"{path}.")


FIELDS = list(fields(pb.ModelConfig.DESCRIPTOR))


def known(path: str) -> list[str]:
    """The lists that contain the field, or a message that it is part of."""
    parts = path.split(".")
    whole = {".".join(parts[: count + 1]) for count in range(len(parts))}
    return [name for name, table in (("read", READ), ("ignored", IGNORED), ("refused", REFUSED)) if whole & set(table)]


def documented(path: str) -> bool:
    text = (REPO / "docs" / "configuration.md").read_text(encoding="utf-8")
    return re.search(rf"`(\w+\.)*{path.rpartition('.')[2]}`", text) is not None


def test_fields_are_many() -> None:
    assert len(FIELDS) > 100
    assert {"max_batch_size", "version_policy.all", "dynamic_batching.priority_queue_policy.max_queue_size"} <= set(
        FIELDS
    )


@pytest.mark.parametrize("path", FIELDS)
def test_each_field_is_in_exactly_one_list(path: str) -> None:
    assert len(known(path)) == 1, f"{path} is in {known(path)}: is it read, ignored or refused?"


@pytest.mark.parametrize("path", [*READ, *IGNORED, *REFUSED])
def test_lists_have_only_existing_fields(path: str) -> None:
    assert any(field == path or field.startswith(f"{path}.") for field in FIELDS)


@pytest.mark.parametrize("path", READ)
def test_read_field_makes_a_difference(tmp_path: Path, path: str) -> None:
    without, with_it = (outcomes(tmp_path, text) for text in READ[path])
    assert without != with_it
    assert any(not isinstance(one, str) for one in (*without, *with_it)) or "warmup" in path


@pytest.mark.parametrize("path", IGNORED)
def test_ignored_field_makes_no_difference_and_is_documented(tmp_path: Path, path: str) -> None:
    without, with_it = IGNORED[path]
    assert outcomes(tmp_path, without) == outcomes(tmp_path, with_it)
    assert any(not isinstance(one, str) for one in outcomes(tmp_path, with_it))
    assert documented(path)


@pytest.mark.parametrize("path", REFUSED)
def test_refused_field_is_named_and_documented(tmp_path: Path, path: str) -> None:
    for outcome in outcomes(tmp_path, REFUSED[path]):
        assert isinstance(outcome, str)
        assert outcome.startswith("ConfigError: ")
        assert path.rpartition(".")[2] in outcome
        assert "is not supported by this build" in outcome
    assert documented(path)
