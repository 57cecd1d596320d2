"""What an ensemble's configuration may say, before anybody knows its models."""

from __future__ import annotations

import pytest
from google.protobuf import text_format

from paceline.protos import model_config_pb2 as pb
from paceline.server.errors import ConfigError
from paceline.server.models.ensemble_config import check_ensemble, most_at_once, steps_of
from tests.ensembles import Step, ensemble_config

ONE: list[Step] = [("m", {"a": "in"}, {"x": "out"})]
LEFT, RIGHT = ("m", {"a": "two"}, {"x": "one"}), ("n", {"a": "one"}, {"x": "two"})


def config(text: str) -> pb.ModelConfig:
    return text_format.Parse(text, pb.ModelConfig())


def said(text: str) -> str:
    parsed = config(text)
    parsed.name = "e"
    with pytest.raises(ConfigError) as caught:
        read(parsed)
    return str(caught.value)


def read(parsed: pb.ModelConfig) -> None:
    check_ensemble(parsed)
    steps_of(parsed)


def with_step(step: str) -> str:
    return ensemble_config([]).replace("ensemble_scheduling {", f"ensemble_scheduling {{ step {{ {step} }}")


MAPS = 'input_map { key: "a" value: "in" } output_map { key: "x" value: "out" }'


@pytest.mark.parametrize(
    ("text", "phrase"),
    [
        (
            ensemble_config(ONE).replace('"ensemble"', '"onnxruntime_onnx"', 1),
            "ensemble scheduling cannot be set for model 'e' whose platform is not ensemble",
        ),
        ('platform: "ensemble"', "ensemble scheduling must be set for ensemble e whose platform is ensemble"),
        (
            ensemble_config(ONE, more='backend: "python"'),
            "Ensemble model 'e' must have platform type 'ensemble' and empty backend type",
        ),
        (ensemble_config(ONE, more="instance_group { }"), "instance group should not be specified for ensemble 'e'"),
        (ensemble_config(ONE, more="optimization { }"), "optimization should not be specified for ensemble 'e'"),
        (ensemble_config(ONE, more="model_warmup { }"), "model_warmup can not be specified for ensemble 'e'"),
        (
            ensemble_config(ONE, more='parameters { key: "paceline.split_oversized" value { string_value: "true" } }'),
            "paceline.split_oversized should not be specified for ensemble 'e'",
        ),
        (ensemble_config([]), "must specify 'step' for ensemble 'e'"),
        (with_step(MAPS), "must specify 'model_name' in step 0 of ensemble 'e'"),
        (
            with_step('model_name: "m" output_map { key: "x" value: "out" }'),
            "must specify 'input_map' in step 0 of ensemble 'e'",
        ),
        (
            with_step('model_name: "m" input_map { key: "a" value: "in" }'),
            "must specify 'output_map' in step 0 of ensemble 'e'",
        ),
        (
            with_step(f'model_name: "m" model_version: -2 {MAPS}'),
            "step 0: expected model_version -1 or a version, got -2",
        ),
        (
            ensemble_config([*ONE, ("n", {"a": "in"}, {"x": "out"})]),
            "ensemble tensor 'out' can appear in an output map only once for ensemble 'e' step 1",
        ),
        (
            ensemble_config([("m", {"a": "in"}, {"x": "in"})], outputs={"in": "FP32 -1"}),
            "ensemble tensor 'in' can appear in an output map only once for ensemble 'e' step 0",
        ),
        (
            ensemble_config(ONE, {"in": "FP32 -1", "more": "FP32 -1"}),
            "ensemble input 'more' for ensemble 'e' is not used",
        ),
        (
            ensemble_config(ONE, outputs={"out": "FP32 -1", "more": "FP32 -1"}),
            "ensemble output 'more' for ensemble 'e' is not used: no step makes it",
        ),
        (
            ensemble_config([("m", {"a": "inn"}, {"x": "out"})]),
            "ensemble input 'in' for ensemble 'e' is not used: no step needs it; step 0 ('m') needs 'inn', which is "
            "made by nobody",
        ),
        (
            ensemble_config([("m", {"a": "out"}, {"x": "out"})]),
            "is not used: no step needs it; step 0 ('m') needs 'out', which is made only by a step that needs it",
        ),
        (
            ensemble_config([*ONE, ("n", {"a": "in"}, {"x": "left"})]),
            "ensemble tensor 'left' is unused in ensemble 'e': step 1 makes it, and no step and no output uses it",
        ),
        (
            ensemble_config([("m", {"a": "in", "b": "none"}, {"x": "out"})]),
            "output 'out' for ensemble 'e' is not written: at least one of its depending tensors, 'none', is not "
            "connected: step 0 ('m') needs 'none', which is made by nobody",
        ),
        (
            ensemble_config([*ONE, LEFT, RIGHT], outputs={"out": "FP32 -1", "one": "FP32 -1"}),
            "output 'one' for ensemble 'e' is not written: at least one of its depending tensors, 'two', is not "
            "connected: step 1 ('m') needs 'two', which is made only by a step that needs it",
        ),
        (
            ensemble_config([*ONE, LEFT, RIGHT]),
            "output 'one' for ensemble 'e' is not written: at least one of its depending tensors, 'two'",
        ),
        (
            ensemble_config(ONE).replace("dims: [ -1 ]", "dims: [ -1 ] reshape { shape: [ -1 ] }", 1),
            "input 'in': reshape has no meaning for an ensemble's tensors",
        ),
    ],
)
def test_ensemble_that_contradicts_itself_says_how(text: str, phrase: str) -> None:
    assert phrase in said(text)


def test_ensemble_without_inputs_has_no_file_to_take_them_from() -> None:
    text = ensemble_config(ONE)
    assert said(text[: text.index("input {")] + text[text.index("output {") :]) == (
        "expected input with name, data_type and dims, as an ensemble has no file, got none"
    )


@pytest.mark.parametrize(("version", "meant"), [("-1", ""), ("0", ""), ("3", "3")])
def test_step_is_of_a_version_or_of_the_latest(version: str, meant: str) -> None:
    (step,) = steps_of(config(ensemble_config([(f"m:{version}", {"a": "in"}, {"x": "out"})])))
    assert (step.number, step.model, step.version, step.inputs, step.outputs) == (
        0,
        "m",
        meant,
        {"a": "in"},
        {"x": "out"},
    )


def test_requests_at_a_time_are_bounded_even_if_nothing_says_so() -> None:
    assert most_at_once(config(ensemble_config(ONE))) == 1024
    assert most_at_once(config(ensemble_config(ONE, scheduling="max_inflight_requests: 3"))) == 3
