"""Decoupled models: which may be, and what their configuration may not have."""

from __future__ import annotations

import pytest
from google.protobuf import text_format

from paceline.backends.generation import SPEC
from paceline.backends.spec import ModelSpec, TensorSpec
from paceline.protos import model_config_pb2 as pb
from paceline.server.errors import ConfigError
from paceline.server.models.model_config import check_supported, model_source, plan
from tests.unit.product_modules import REPO

DECOUPLED = "model_transaction_policy { decoupled: true }"
OWN = ModelSpec((TensorSpec("a", "FP32", (-1, 4)),), (TensorSpec("x", "FP32", (-1, 4)),))


def config(text: str) -> pb.ModelConfig:
    return text_format.Parse(f'backend: "python" {DECOUPLED} {text}', pb.ModelConfig())


def setting(name: str, value: str) -> str:
    return f'parameters {{ key: "paceline.{name}" value {{ string_value: "{value}" }} }}'


@pytest.mark.parametrize("backend", ['backend: "onnxruntime"', 'platform: "onnxruntime_onnx"', ""])
def test_only_python_models_may_be_decoupled(backend: str) -> None:
    with pytest.raises(ConfigError, match=r"model_transaction_policy\.decoupled: expected backend 'python'"):
        check_supported(text_format.Parse(f"{backend} {DECOUPLED}", pb.ModelConfig()))
    check_supported(config(""))


def test_decoupled_models_may_not_have_a_cache() -> None:
    text = "Response Cache does not currently support model m with 'decoupled' transaction policy. Please disable the"
    with pytest.raises(ConfigError, match=text):
        check_supported(config('name: "m" response_cache { enable: true }'))


@pytest.mark.parametrize(
    ("text", "name", "expected", "got"),
    [
        ("dynamic_batching { preserve_ordering: true }", "dynamic_batching.preserve_ordering", "false", "true"),
        (setting("batch_sizes", "4,8"), "paceline.batch_sizes", "none", "[4, 8]"),
        (setting("split_oversized", "true"), "paceline.split_oversized", "false", "true"),
        (setting("isolate_failures", "true"), "paceline.isolate_failures", "false", "true"),
    ],
)
def test_what_needs_one_answer_for_each_request_is_refused(text: str, name: str, expected: str, got: str) -> None:
    with pytest.raises(ConfigError) as error:
        plan(config(f"max_batch_size: 8 {text}"), OWN)
    assert str(error.value).startswith(f"{name}: expected {expected}, as the model is decoupled")
    assert str(error.value).endswith(f"got {got}")


def test_plan_bounds_open_requests_and_isolates_nothing() -> None:
    made = plan(config("max_batch_size: 8 dynamic_batching { }"), OWN)
    assert (made.most_open, made.policy.isolate_failures, made.policy.max_batch_rows) == (1024, False, 8)
    assert plan(config(setting("max_open_requests", "3")), OWN).most_open == 3
    with pytest.raises(ConfigError, match=r"paceline\.max_open_requests: expected 1 or more, got 0"):
        plan(config(setting("max_open_requests", "0")), OWN)
    assert not plan(pb.ModelConfig(backend="python"), OWN).most_open
    assert model_source(config(""), REPO / "model.py").decoupled


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("dynamic_batching { preserve_ordering: true }", "dynamic_batching.preserve_ordering"),
        ("response_cache { enable: true }", "response_cache.enable"),
    ],
)
def test_model_that_generates_refuses_what_needs_one_answer(text: str, name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}: expected false, as the model generates"):
        plan(text_format.Parse(text, pb.ModelConfig()), SPEC, prompts=1)


def test_model_that_generates_has_requests_without_batch_axis() -> None:
    text = "dynamic_batching { priority_levels: 2 default_priority_level: 1 }"
    made = plan(text_format.Parse(text, pb.ModelConfig()), SPEC, execution_limit_ns=9, prompts=1)
    assert (made.max_batch_rows, made.policy.max_batch_requests, made.policy.execution_limit_ns) == (0, 1, 0)
    assert made.policy.priority_levels == 2
    assert not made.policy.deadline_aware
