"""What another server says about a model, and how it is served accordingly."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf import text_format

from paceline.backends.remote import RemoteServer
from paceline.backends.spec import SequenceSpec, TensorSpec
from paceline.protos import inference_pb2 as pb
from paceline.protos import model_config_pb2 as config_pb
from paceline.scheduler.policy import QueuePolicy, SequencePolicy, TimeoutAction
from paceline.server.errors import ConfigError
from paceline.server.models.defaults import BatchDefaults
from paceline.server.models.loader import LoadedVersion
from paceline.server.models.upstream_model import UpstreamVersion, bring
from paceline.server.models.upstream_settings import UpstreamSettings

FLAGS = BatchDefaults(max_batch_rows=16, max_queue_delay_ns=5_000_000, queue_timeout_ns=7_000_000_000)


def brought(
    inputs: dict[str, list[int]], outputs: dict[str, list[int]], config: str | None = None, **settings: Any
) -> LoadedVersion:
    told = pb.ModelMetadataResponse(name="m", platform="p")
    for tensors, shapes in ((told.inputs, inputs), (told.outputs, outputs)):
        for name, shape in shapes.items():
            tensors.add(name=name, datatype="FP32", shape=shape)
    made = None if config is None else text_format.Merge(config, config_pb.ModelConfig(name="m"))
    upstream = UpstreamSettings("localhost:1", **settings)
    version = UpstreamVersion("3", told, made)
    return bring("m", version, RemoteServer("localhost:1"), upstream, FLAGS)


def test_model_that_can_batch_does_so_according_to_the_flags() -> None:
    found = brought({"a": [-1, 4]}, {"x": [-1], "y": [-1, 2]}, batches=3)
    plan = found.plan
    assert plan.spec.inputs == (TensorSpec("a", "FP32", (4,)),)
    # Dims of outputs aren't checked here: the upstream may pass on other ones than it tells.
    assert plan.spec.outputs == (
        TensorSpec("x", "FP32", (), any_rank=True),
        TensorSpec("y", "FP32", (2,), assumed=True),
    )
    assert (plan.spec.batched, plan.max_batch_rows, plan.splits) == (True, 16, True)
    assert plan.policy.max_queue_delay_ns == 5_000_000
    assert plan.policy.queue.default_timeout_ns == 7_000_000_000
    assert len(found.instances) == 3
    assert (found.version, found.opened.platform) == ("3", "p")
    assert found.config.max_batch_size == 16


@pytest.mark.parametrize(
    ("inputs", "outputs", "config"),
    [
        ({"a": [4]}, {"x": [-1]}, None),
        ({"a": [-1, 4]}, {"x": []}, None),
        ({"a": [-1, 4]}, {"x": [-1]}, "max_batch_size: 0"),
        ({"a": [-1, 4]}, {"x": [2]}, "max_batch_size: 8"),
        ({"a": [-1, 4], "s": [2]}, {"x": [-1]}, 'max_batch_size: 8 input { name: "s" is_shape_tensor: true }'),
        ({"a": [-1, 4]}, {"x": [-1]}, 'max_batch_size: 8 input { name: "a" optional: true }'),
        ({"a": [-1, -1]}, {"x": [-1]}, 'max_batch_size: 8 input { name: "a" allow_ragged_batch: true }'),
        ({"a": [-1, 4]}, {"x": [-1]}, 'max_batch_size: 8 batch_input { target_name: "n" source_input: "a" }'),
        ({}, {}, 'max_batch_size: 8 input { name: "a" allow_ragged_batch: true }'),
        ({"a": [-1, 4]}, {"x": [-1]}, 'max_batch_size: 8 batch_output { target_name: "x" source_input: "a" }'),
    ],
)
def test_model_that_cannot_batch_gets_its_requests_unchanged(
    inputs: dict[str, list[int]], outputs: dict[str, list[int]], config: str | None
) -> None:
    found = brought(inputs, outputs, config, calls=5)
    assert (found.plan.max_batch_rows, found.plan.spec.batched, found.plan.policy.max_batch_requests) == (0, False, 1)
    assert [list(one.dims) for one in found.plan.spec.inputs] == list(inputs.values())
    assert [one.any_rank for one in found.plan.spec.outputs] == [shape == [] for shape in outputs.values()]
    assert len(found.instances) == 5


def test_limit_of_the_upstream_is_kept_and_nothing_is_split() -> None:
    plan = brought({"a": [-1, 4], "b": [-1]}, {"x": [-1]}, 'max_batch_size: 8 input { name: "b" optional: true }').plan
    assert (plan.max_batch_rows, plan.splits) == (8, False)
    assert [one.optional for one in plan.spec.inputs] == [False, True]


def test_queue_policies_of_the_upstream_apply_here_except_the_queue_size() -> None:
    said = """max_batch_size: 8 dynamic_batching {
        preferred_batch_size: 4 max_queue_delay_microseconds: 1 priority_levels: 3 default_priority_level: 2
        default_queue_policy { timeout_action: DELAY default_timeout_microseconds: 5 max_queue_size: 9 }
        priority_queue_policy { key: 1 value { allow_timeout_override: true } }
    }"""
    policy = brought({"a": [-1, 4]}, {"x": [-1]}, said).plan.policy
    assert (policy.priority_levels, policy.default_priority_level) == (3, 2)
    assert policy.queue == QueuePolicy(0, 5_000, False, TimeoutAction.DELAY)
    assert policy.priority_queue == {1: QueuePolicy(allow_timeout_override=True)}
    assert (policy.preferred_batch_rows, policy.max_queue_delay_ns) == ((), 5_000_000)


def test_settings_of_levels_that_the_upstream_lacks_are_ignored() -> None:
    said = """max_batch_size: 8 dynamic_batching {
        default_priority_level: 3 priority_queue_policy { key: 1 value { max_queue_size: 1 } }
    }"""
    policy = brought({"a": [-1, 4]}, {"x": [-1]}, said).plan.policy
    assert (policy.priority_levels, policy.default_priority_level, policy.priority_queue) == (0, 0, {})


def test_requests_are_split_where_the_upstream_splits_and_the_configuration_says_so() -> None:
    said = 'max_batch_size: 8 parameters { key: "paceline.split_oversized" value { string_value: "true" } }'
    for config in None, said:
        first = brought({"a": [-1, 4]}, {"x": [-1]}, config)
        second = brought({"a": [-1, 4]}, {"x": [-1]}, text_format.MessageToString(first.config))
        assert (first.plan.splits, second.plan.splits) == (True, True)
        assert second.plan.max_batch_rows == first.plan.max_batch_rows
    assert not brought({"a": [-1, 4]}, {"x": [-1]}, said.replace('"true"', '"false"')).plan.splits


def test_model_without_known_tensors_batches_what_requests_bring() -> None:
    plan = brought({}, {}).plan
    assert (plan.spec.inputs, plan.max_batch_rows) == ((), 16)
    assert brought({}, {}, "max_batch_size: 8").plan.max_batch_rows == 8
    first = brought({}, {}, unbatched=("m",))
    assert first.plan.max_batch_rows == 0
    # and the configuration says so to a batcher in front
    second = brought({}, {}, text_format.MessageToString(first.config), calls=5)
    assert (second.plan.max_batch_rows, second.plan.spec.batched, len(second.instances)) == (0, False, 5)
    assert brought({}, {}, "max_batch_size: -5").plan.max_batch_rows == 0


@pytest.mark.parametrize("kind", ["input", "output"])
def test_tensor_name_given_twice_is_refused(kind: str) -> None:
    told = pb.ModelMetadataResponse(name="m")
    for tensors, name in ((told.inputs, "input"), (told.outputs, "output")):
        for _ in range(2 if name == kind else 1):
            tensors.add(name="a", datatype="FP32", shape=[-1])
    version = UpstreamVersion("", told, None)
    with pytest.raises(ConfigError, match=f"{kind} 'a' of the upstream: expected each name once"):
        bring("m", version, RemoteServer("localhost:1"), UpstreamSettings("localhost:1"), FLAGS)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ("sequence_batching { iterative_sequence: true }", "sequence_batching.iterative_sequence"),
        ("model_transaction_policy { decoupled: true }", "decoupled"),
    ],
)
def test_model_with_repeated_steps_or_decoupled_responses_is_refused(config: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        brought({"a": [-1]}, {"x": [-1]}, config)


def test_model_with_sequences_has_to_declare_its_tensors() -> None:
    with pytest.raises(ConfigError, match="expected metadata with its tensors, got none"):
        brought({}, {}, "sequence_batching { }")


def test_steps_of_sequences_are_sent_one_by_one_and_never_in_parts() -> None:
    said = """
        max_batch_size: 8 sequence_batching { max_sequence_idle_microseconds: 5000 oldest { } }
        parameters { key: "paceline.max_sequences" value { string_value: "77" } }
    """
    made = brought({"a": [-1, 4]}, {"x": [-1]}, said, calls=5)
    policy = made.plan.policy
    assert (made.plan.max_batch_rows, policy.max_batch_requests, made.plan.splits) == (8, 1, False)
    assert (made.plan.spec.sequence, policy.sequences) == (SequenceSpec(), SequencePolicy(5_000_000, 0, 77))
    assert len(made.instances) == 5
    assert brought({"a": [-1, 4]}, {"x": [-1]}, "max_batch_size: 8").plan.policy.sequences is None


def test_tensor_with_an_invalid_size_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected sizes >= -1"):
        brought({"a": [-2]}, {"x": [-1]})
