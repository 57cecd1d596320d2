"""The configuration as it is served: nothing is left open, and loaded again it serves the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import onnx
import pytest
from google.protobuf import json_format, text_format

from paceline.backends import registry
from paceline.backends.base import Device, DeviceKind, InstanceGroup, ModelSource, OpenModel
from paceline.protos import model_config_pb2 as pb
from paceline.server.models.defaults import BatchDefaults, LoadDefaults
from paceline.server.models.loader import LoadedVersion, load_model
from paceline.server.models.model_config import ServingPlan
from tests import models, odd_models, state_models
from tests.memory_models import MemoryModel
from tests.unit.server.found import find_models

IO = """
    input { name: "INPUT0" data_type: TYPE_FP32 dims: [ 16 ] }
    output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ 4 ] }
"""
IDENTITY = """
    backend: "identity"
    input { name: "INPUT0" data_type: TYPE_FP32 dims: [ 16 ] }
    output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ 16 ] }
"""
RAGGED = """
    max_batch_size: 4 dynamic_batching { }
    input { name: "INPUT0" data_type: TYPE_FP32 dims: [ -1 ] allow_ragged_batch: true }
    output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ -1 ] }
    batch_output { target_name: "OUTPUT0" kind: BATCH_SCATTER_WITH_INPUT_SHAPE source_input: "INPUT0" }
"""
BATCH_INPUT = """
    max_batch_size: 4
    input { name: "RAGGED" data_type: TYPE_FP32 dims: [ -1 ] allow_ragged_batch: true }
    input { name: "ROWS" data_type: TYPE_FP32 dims: [ 1 ] }
    batch_input { kind: BATCH_ELEMENT_COUNT target_name: "MADE" data_type: TYPE_INT32 source_input: "RAGGED" }
"""
SHAPE = """
    max_batch_size: 8
    input { name: "INPUT0" data_type: TYPE_FP32 dims: [ 6 ] }
    input { name: "SHAPE" data_type: TYPE_INT64 dims: [ 3 ] is_shape_tensor: true }
"""
ALL_BATCHING = """
    max_batch_size: 8
    dynamic_batching {
      preferred_batch_size: [ 2, 4 ] max_queue_delay_microseconds: 7
      priority_levels: 3 default_priority_level: 2
      default_queue_policy { max_queue_size: 9 default_timeout_microseconds: 5 allow_timeout_override: true }
      priority_queue_policy { key: 3 value { timeout_action: DELAY default_timeout_microseconds: 1 } }
    }
    parameters { key: "paceline.max_queue_rows" value { string_value: "100" } }
    parameters { key: "somebody.else" value { string_value: "x" } }
"""
SAMPLE = 'inputs { key: "INPUT0" value { data_type: TYPE_FP32 dims: [ 16 ] zero_data: true } }'
OTHERS = f"""
    optimization {{ graph {{ level: 1 }} input_pinned_memory {{ enable: true }} }}
    metric_tags {{ key: "a" value: "b" }} cc_model_filenames {{ key: "7.5" value: "x.onnx" }} runtime: "r"
    model_warmup {{ name: "w" batch_size: 1 count: 2 {SAMPLE} }}
    version_policy {{ specific {{ versions: [ 1 ] }} }}
"""
PADDED = 'max_batch_size: 8 parameters { key: "paceline.batch_sizes" value { string_value: "2,8" } }'
WAITING = 'parameters { key: "paceline.await_returns" value { string_value: "true" } }'
DELAYED = "max_batch_size: 4 dynamic_batching { max_queue_delay_microseconds: 1000 }"

STATE = 'state { input_name: "STATE" output_name: "STATE_OUT" }'
GROWING = """
    state {
      input_name: "STATE" output_name: "STATE_OUT" dims: [ -1 ]
      initial_state { name: "i" dims: [ 0 ] zero_data: true }
    }
"""
CONTROLS = """
    control_input { name: "START" control { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } }
    control_input { name: "READY" control { kind: CONTROL_SEQUENCE_READY int32_false_true: [ 0, 1 ] } }
    control_input { name: "CORRID" control { kind: CONTROL_SEQUENCE_CORRID } }
"""

ModelMaker = Callable[[], onnx.ModelProto]


def without_batch_axis() -> onnx.ModelProto:
    return models.over_rows("softmax", 4)


CONFIGS: dict[str, tuple[ModelMaker | None, str | None]] = {
    "none": (models.mlp, None),
    "none, a fixed batch": (models.fixed_batch, None),
    "none, a fixed batch of nothing else": (lambda: models.identity(dims=(4,)), None),
    "a fixed batch": (models.fixed_batch, "max_batch_size: 4"),
    "a fixed batch by size": (
        models.fixed_batch,
        'parameters { key: "paceline.batch_sizes" value { string_value: "4" } }',
    ),
    "none, without a batch axis": (without_batch_axis, None),
    "none, a scalar": (models.scalar, None),
    "none, nothing but a batch axis": (lambda: models.identity(dims=("batch",)), None),
    "none, free dimensions": (models.matrix_product, None),
    "none, an optional input": (lambda: models.with_default(), None),
    "none, no shapes": (odd_models.shapeless, None),
    "none, an output without a shape": (odd_models.hidden_rank, None),
    "rows, no shapes": (odd_models.shapeless, "max_batch_size: 4"),
    "dims, no shapes": (odd_models.shapeless, 'input { name: "INPUT0" data_type: TYPE_FP32 dims: [ 2, -1 ] }'),
    "an output left out": (odd_models.classifier, None),
    "empty": (models.mlp, ""),
    "a name alone": (models.mlp, 'name: "m"'),
    "max_batch_size 1": (models.mlp, "max_batch_size: 1"),
    "a delay": (models.mlp, DELAYED),
    "the largest size preferred": (models.mlp, "max_batch_size: 4 dynamic_batching { preferred_batch_size: 4 }"),
    "ordering": (models.mlp, "dynamic_batching { preserve_ordering: true }"),
    "all of dynamic_batching": (models.mlp, ALL_BATCHING),
    "sizes": (models.mlp, PADDED),
    "waiting for returns": (models.mlp, WAITING),
    "inputs alone": (models.mlp, IO.partition("output")[0]),
    "tensors without max_batch_size": (
        models.fixed_batch,
        'input { name: "INPUT0" data_type: TYPE_FP32 dims: [ 4, 3 ] } '
        'output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ 4, 3 ] }',
    ),
    "tensors, one request a batch": (models.mlp, "max_batch_size: 4" + IO),
    "tensors, batching": (models.mlp, "max_batch_size: 4 dynamic_batching { }" + IO),
    "a queue without a batch axis": (
        without_batch_axis,
        "dynamic_batching { default_queue_policy { max_queue_size: 1 default_timeout_microseconds: 9 } }",
    ),
    "some outputs": (models.add_sub, 'output { name: "OUTPUT1" data_type: TYPE_INT32 dims: [ 16 ] }'),
    "tensors without dims or datatype": (
        models.mlp,
        'max_batch_size: 4 input { name: "INPUT0" } output { name: "OUTPUT0" data_type: TYPE_FP32 }',
    ),
    "text": (lambda: models.identity("BYTES"), ""),
    "bf16": (lambda: models.identity("BF16"), ""),
    "reshape": (
        lambda: models.identity(dims=("batch", 2, 3)),
        'input { name: "INPUT0" data_type: TYPE_FP32 dims: [ 6 ] reshape { shape: [ 2, 3 ] } format: FORMAT_NONE }',
    ),
    "an optional input": (
        lambda: models.with_default(),
        'input { name: "INPUT0" data_type: TYPE_FP32 dims: [ -1 ] } '
        'input { name: "BIAS" data_type: TYPE_FP32 dims: [ -1 ] optional: true } '
        'output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ -1 ] }',
    ),
    "steps": (models.mlp, "max_batch_size: 4 sequence_batching { direct { minimum_slot_utilization: 0.5 } }"),
    "steps, tried": (state_models.accumulator, f"sequence_batching {{ {STATE} oldest {{ }} }}"),
    "steps, one by one": (state_models.recurrent, f"sequence_batching {{ {STATE} }}"),
    "states": (state_models.recurrent, f"max_batch_size: 4 sequence_batching {{ {STATE} }}"),
    "a growing state": (state_models.growing, f"max_batch_size: 4 sequence_batching {{ {GROWING} }}"),
    "controls": (state_models.told, f"max_batch_size: 4 sequence_batching {{ {CONTROLS} oldest {{ }} }}"),
    "a state that clients get": (
        state_models.accumulator,
        f'max_batch_size: 4 output {{ name: "STATE_OUT" }} sequence_batching {{ {STATE} }}',
    ),
    "ragged": (models.ragged, RAGGED),
    "batch_input": (models.batch_input_echo, BATCH_INPUT),
    "a shape tensor": (models.reshape, SHAPE),
    "instances": (models.mlp, "instance_group [ { count: 2 kind: KIND_CPU }, { name: 'g' profile: 'p' } ]"),
    "everything else": (models.mlp, OTHERS),
    "identity": (None, IDENTITY),
    "identity, batching": (None, IDENTITY + "max_batch_size: 4 dynamic_batching { }"),
    "identity by platform": (None, IDENTITY.replace("backend", "platform") + "max_batch_size: 4"),
    "identity, optional": (None, IDENTITY.replace("[ 16 ] }", "[ 16 ] optional: true }", 1) + "max_batch_size: 4"),
}


@dataclass
class ModelLoader:
    """Loads models, each from a folder with nothing else, and closes them when the test ends."""

    root: Path
    loaded: list[LoadedVersion]

    def load(self, maker: ModelMaker | None, config: str | None, defaults: LoadDefaults | None = None) -> LoadedVersion:
        repository = self.root / str(len(self.loaded))
        (repository / "m" / "1").mkdir(parents=True)
        if maker is not None:
            models.write(maker(), repository / "m" / "1" / "model.onnx")
        if config is not None:
            (repository / "m" / "config.pbtxt").write_text(config)
        (folder,) = find_models([repository])
        (one,) = load_model(folder, registry.backend, defaults)
        self.loaded.append(one)
        return one


@pytest.fixture
def shelf(tmp_path: Path) -> Iterator[ModelLoader]:
    made = ModelLoader(tmp_path, [])
    yield made
    for one in made.loaded:
        one.close()


def _as_stated(plan: ServingPlan) -> tuple[ServingPlan, str]:
    """The configuration states what the model only assumes of its outputs. Initial states, which don't count where
    specs are compared, are compared as text."""
    outputs = tuple(replace(tensor, assumed=False) for tensor in plan.spec.outputs)
    return replace(plan, spec=replace(plan.spec, outputs=outputs, sequence=None)), repr(plan.spec.sequence)


def assert_same_service(first: LoadedVersion, again: LoadedVersion) -> None:
    assert again.config == first.config
    assert _as_stated(again.plan) == _as_stated(first.plan)
    assert again.opened.platform == first.opened.platform
    assert [one.device for one in again.instances] == [one.device for one in first.instances]


@pytest.mark.parametrize("name", CONFIGS)
def test_config_loaded_again_as_text_or_json_serves_the_same(shelf: ModelLoader, name: str) -> None:
    maker, config = CONFIGS[name]
    first = shelf.load(maker, config)
    assert_same_service(first, shelf.load(maker, text_format.MessageToString(first.config)))
    for names in (True, False):  # in snake case and in camel case: the same configuration, so the same service
        text = json_format.MessageToJson(first.config, preserving_proto_field_name=names)
        assert json_format.Parse(text, pb.ModelConfig()) == first.config


def test_config_loaded_again_without_the_flags_serves_the_same(shelf: ModelLoader) -> None:
    flags = LoadDefaults(BatchDefaults(5, 3_000, 7_000), max_batch_rows=6)
    first = shelf.load(models.mlp, None, flags)
    assert first.plan.policy.queue.default_timeout_ns == 7_000
    assert_same_service(first, shelf.load(models.mlp, text_format.MessageToString(first.config)))
    alone = shelf.load(without_batch_axis, None, flags)
    assert_same_service(alone, shelf.load(without_batch_axis, text_format.MessageToString(alone.config)))


def test_model_without_configuration_gets_a_complete_one(shelf: ModelLoader) -> None:
    assert shelf.load(models.mlp, None).config == text_format.Parse(
        f"""
        name: "m" platform: "onnxruntime_onnx" backend: "onnxruntime" default_model_filename: "model.onnx"
        version_policy {{ latest {{ num_versions: 1 }} }}
        max_batch_size: 32
        dynamic_batching {{ preferred_batch_size: 32 }}
        instance_group {{ name: "m" kind: KIND_CPU count: 1 }}
        {IO}
        """,
        pb.ModelConfig(),
    )


def test_written_settings_are_kept(shelf: ModelLoader) -> None:
    config = shelf.load(models.mlp, OTHERS + ALL_BATCHING).config
    written = text_format.Parse(OTHERS + ALL_BATCHING, pb.ModelConfig())
    for field in ("optimization", "metric_tags", "cc_model_filenames", "runtime", "model_warmup", "version_policy"):
        assert getattr(config, field) == getattr(written, field)
    assert config.dynamic_batching == written.dynamic_batching
    assert config.parameters["somebody.else"].string_value == "x"
    assert config.parameters["paceline.max_queue_rows"].string_value == "100"


@pytest.mark.parametrize(
    ("text", "batching"),
    [
        ("max_batch_size: 4" + IO, None),
        ("max_batch_size: 4 dynamic_batching { }" + IO, "preferred_batch_size: 4"),
        ("max_batch_size: 4", "preferred_batch_size: 4"),
        (DELAYED, "preferred_batch_size: 4 max_queue_delay_microseconds: 1000"),
    ],
)
def test_dynamic_batching_is_present_where_requests_share_batches(
    shelf: ModelLoader, text: str, batching: str | None
) -> None:
    config = shelf.load(models.mlp, text).config
    assert config.HasField("dynamic_batching") == (batching is not None)
    assert config.dynamic_batching == text_format.Parse(batching or "", pb.ModelDynamicBatching())


def test_tensors_are_those_that_clients_see(shelf: ModelLoader) -> None:
    config = shelf.load(lambda: models.identity(dims=("batch",)), None).config
    assert config.input[0] == text_format.Parse(
        'name: "INPUT0" data_type: TYPE_FP32 dims: [ 1 ] reshape { }', pb.ModelInput()
    )
    config = shelf.load(models.batch_input_echo, BATCH_INPUT).config
    assert [one.name for one in config.input] == ["RAGGED", "ROWS"]
    assert [one.name for one in config.output] == ["OUTPUT0"]
    assert config.batch_input[0].target_name == ["MADE"]


def test_sequences_are_filled_in(shelf: ModelLoader) -> None:
    config = shelf.load(
        state_models.recurrent, f"max_batch_size: 4 sequence_batching {{ oldest {{ }} {STATE} }}"
    ).config
    assert config.sequence_batching == text_format.Parse(
        """
        max_sequence_idle_microseconds: 1000000
        oldest { preferred_batch_size: 4 }
        state { input_name: "STATE" output_name: "STATE_OUT" data_type: TYPE_FP32 dims: [ 2, 3 ] }
        """,
        pb.ModelSequenceBatching(),
    )
    assert config.parameters["paceline.state_batch_axis"].string_value == "STATE=1"
    assert [(one.name, list(one.dims), one.is_shape_tensor) for one in config.input] == [
        ("INPUT0", [3], False),
        ("RATE", [], True),
    ]
    assert [one.name for one in config.output] == ["OUTPUT0"]
    assert not config.HasField("dynamic_batching")


def test_strategy_that_is_left_open_stays_open(shelf: ModelLoader) -> None:
    sequences = shelf.load(state_models.told, f"max_batch_size: 4 sequence_batching {{ {CONTROLS} }}").config
    assert sequences.sequence_batching.WhichOneof("strategy_choice") is None
    assert sequences.sequence_batching.control_input[2].control[0].data_type == pb.TYPE_UINT64


def test_bare_file_is_described_by_its_name(tmp_path: Path) -> None:
    models.write(models.mlp(), tmp_path / "res.net.onnx")
    (folder,) = find_models([tmp_path / "res.net.onnx"])
    (loaded,) = load_model(folder, registry.backend)
    assert (loaded.config.name, loaded.config.default_model_filename) == ("res.net", "res.net.onnx")
    loaded.close()


class Placer:
    """A backend that puts the groups on the devices that the test gives."""

    def __init__(self, places: Sequence[Sequence[Device]]) -> None:
        self._places = list(places)

    def devices(self, groups: Sequence[InstanceGroup]) -> tuple[Device, ...]:
        return tuple(device for _ in groups for device in self._places.pop(0))

    def open(self, source: ModelSource, device: Device) -> OpenModel:
        assert source.declared is not None
        return MemoryModel(source.declared)


def test_instance_groups_name_the_devices_that_instances_are_on(tmp_path: Path) -> None:
    (tmp_path / "m" / "1").mkdir(parents=True)
    groups = "instance_group [ { count: 2 }, { name: 'mine' kind: KIND_MODEL gpus: [ 5 ] } ]"
    (tmp_path / "m" / "config.pbtxt").write_text(IDENTITY + groups)
    gpus = [Device(DeviceKind.GPU, index) for index in (0, 0, 1, 1)]
    (folder,) = find_models([tmp_path])
    (loaded,) = load_model(folder, lambda name: Placer([gpus, [Device()] * 3]))
    assert list(loaded.config.instance_group) == [
        pb.ModelInstanceGroup(name="m_0", kind=pb.ModelInstanceGroup.KIND_GPU, count=2, gpus=[0, 1]),
        pb.ModelInstanceGroup(name="mine", kind=pb.ModelInstanceGroup.KIND_CPU, count=3),
    ]
