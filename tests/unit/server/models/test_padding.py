"""Lengths that a configuration asks for, or that a trial finds: in the plan, the log and the served configuration."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.backends.base import Device, DeviceKind, InstanceGroup
from paceline.backends.errors import LoadError
from paceline.backends.spec import Length, ModelSpec, TensorSpec
from paceline.backends.trials import LengthAxis, LengthTrial, Supervise, Trial, unsupervised
from paceline.server.errors import ConfigError
from paceline.server.models.defaults import BatchDefaults, LoadDefaults
from paceline.server.models.loader import LoadedVersion, load_model
from tests.unit.server.models.shelf import Model, VersionBackend, folder

SPEC = ModelSpec(
    (
        TensorSpec("ids", "INT64", (-1, -1)),
        TensorSpec("mask", "INT64", (-1, -1)),
        TensorSpec("word", "BYTES", (-1, -1)),
    ),
    (TensorSpec("x", "FP32", (-1, -1)),),
)
WORDS = Length("words", ((0, 1), (1, 1)), ((0, 1),))
IO = 'input { name: "ids" } input { name: "mask" } input { name: "word" } output { name: "x" } max_batch_size: 4 '


class Masked(Model):
    """Has the `lengths` that are found, or those that are asked for; `why_not` is what a trial says."""

    def __init__(self, *lengths: Length, why_not: str = "", spec: ModelSpec = SPEC) -> None:
        super().__init__(spec=spec)
        self.lengths = lengths
        self.why_not = why_not
        self.asked: list[Sequence[LengthAxis] | None] = []

    def try_rows(self, supervise: Supervise = unsupervised) -> Trial:
        return Trial(self.spec)

    def try_lengths(
        self, spec: ModelSpec, asked: Sequence[LengthAxis] | None, supervise: Supervise = unsupervised
    ) -> LengthTrial:
        self.asked.append(asked)
        lengths, inputs = self.lengths, list(spec.inputs)
        if asked is not None:
            names = [tensor.name for tensor in inputs]
            if any(one.axis > 1 for one in asked):
                raise LoadError("input 'ids': expected an axis up to 1, got 2")
            for one in asked:
                inputs[names.index(one.input)] = replace(inputs[names.index(one.input)], fill=one.fill)
            lengths = (Length("words", tuple((names.index(one.input), one.axis) for one in asked), ((0, 1),)),)
        return LengthTrial(replace(spec, inputs=tuple(inputs), lengths=lengths), self.why_not)


class OnGpu(VersionBackend):
    def devices(self, groups: Sequence[InstanceGroup]) -> tuple[Device, ...]:
        return Device(), Device(DeviceKind.GPU)


def parameters(**given: str) -> str:
    return " ".join(
        f'parameters {{ key: "paceline.{key}" value {{ string_value: "{text}" }} }}' for key, text in given.items()
    )


def loaded(
    tmp_path: Path, model: Model, config: str | None, *given: LoadDefaults, shelf: type[VersionBackend] = VersionBackend
) -> LoadedVersion:
    (version,) = load_model(folder(tmp_path, 1, config=config), shelf(v1=model).of, *given)
    version.close()
    return version


def refused(tmp_path: Path, model: Model, config: str) -> str:
    with pytest.raises(ConfigError) as caught:
        loaded(tmp_path, model, config)
    return str(caught.value)


def test_lengths_that_a_trial_finds_are_served(tmp_path: Path) -> None:
    model = Masked(WORDS)
    plan = loaded(tmp_path, model, None).plan
    assert model.asked == [None]
    assert plan.spec.lengths == (WORDS,)
    assert [padded(33) for padded in plan.policy.lengths] == [33]


def test_lengths_that_are_asked_for_are_served(tmp_path: Path) -> None:
    model = Masked()
    plan = loaded(tmp_path, model, parameters(pad="ids[1]=7, word[1]", pad_sizes="8,16")).plan
    assert model.asked == [(LengthAxis("ids", 1, 7), LengthAxis("word", 1))]
    assert plan.spec.lengths == (Length("words", ((0, 1), (2, 1)), ((0, 1),), sizes=(8, 16)),)
    assert [tensor.fill for tensor in plan.spec.inputs] == [7, 0, 0]
    assert [padded(9) for padded in plan.policy.lengths] == [16]


def test_lengths_on_a_gpu_have_sizes_in_steps(tmp_path: Path) -> None:
    plan = loaded(tmp_path, Masked(WORDS), None, shelf=OnGpu).plan
    assert [padded(33) for padded in plan.policy.lengths] == [36]


@pytest.mark.parametrize(("shelf", "grows"), [(VersionBackend, False), (OnGpu, True)])
def test_batches_stop_to_grow_on_cpus_alone(tmp_path: Path, shelf: type[VersionBackend], grows: bool) -> None:
    assert loaded(tmp_path, Model(spec=SPEC), None, shelf=shelf).plan.policy.grows_always == grows


def test_length_of_a_fixed_size_is_none(tmp_path: Path) -> None:
    fixed = replace(SPEC, inputs=(replace(SPEC.inputs[0], dims=(-1, 8)), *SPEC.inputs[1:]))
    plan = loaded(tmp_path, Masked(WORDS, spec=fixed), None).plan
    assert plan.spec.lengths == plan.policy.lengths == ()


@pytest.mark.parametrize("config", [parameters(pad="off"), "max_batch_size: 4 " + parameters(pad="off")])
def test_lengths_switched_off_are_not_tried(tmp_path: Path, config: str) -> None:
    model = Masked(WORDS)
    plan = loaded(tmp_path, model, config).plan
    assert (model.asked, plan.spec.lengths, plan.max_batch_rows > 1) == ([], (), True)


def test_configuration_of_padding_alone_leaves_the_flags_in_effect(tmp_path: Path) -> None:
    given = LoadDefaults(BatchDefaults(5, max_queue_delay_ns=9_000))
    policy = loaded(tmp_path, Masked(WORDS), 'name: "m" ' + parameters(max_batch_elements="640"), given).plan.policy
    assert (policy.max_batch_rows, policy.max_queue_delay_ns, policy.max_batch_elements) == (5, 9_000, 640)


def test_configuration_of_more_than_padding_overrules_the_flags(tmp_path: Path) -> None:
    config = parameters(pad="ids[1]", isolate_failures="true")
    assert loaded(tmp_path, Masked(), config, LoadDefaults(BatchDefaults(5))).plan.policy.max_batch_rows == 32


@pytest.mark.parametrize("config", [None, parameters(pad="mask[1]=3, word[1]", pad_sizes="8", batch_growth="always")])
def test_served_configuration_loaded_again_serves_the_same_lengths(tmp_path: Path, config: str | None) -> None:
    first = loaded(tmp_path, Masked(WORDS), config)
    shelf = VersionBackend(v1=Masked(WORDS))
    (again,) = load_model(folder(tmp_path / "again", 1), lambda name: shelf, override=first.config)
    again.close()
    assert again.config == first.config
    assert again.plan.spec == first.plan.spec
    assert again.plan.policy.grows_always == first.plan.policy.grows_always


def test_served_configuration_names_the_axes_that_were_found(tmp_path: Path) -> None:
    config = loaded(tmp_path, Masked(WORDS), None).config
    assert config.parameters["paceline.pad"].string_value == "ids[1]=0, mask[1]=0"


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (Masked(WORDS), "delay 0 us; different lengths filled up in ids[1], mask[1]"),
        (
            Masked(why_not="output 'x' differs by 0.5 of its scale"),
            "delay 0 us; different lengths not batched together: output 'x' differs by 0.5 of its scale",
        ),
        (
            Masked(),
            "delay 0 us; different lengths not batched together: no mask is known to go with ids[1], mask[1], "
            "word[1]; name the axes to fill up in paceline.pad",
        ),
    ],
)
def test_load_logs_which_axes_are_filled_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, model: Model, text: str
) -> None:
    with caplog.at_level(logging.INFO, "paceline.server.loader"):
        loaded(tmp_path, model, None)
    assert [record.getMessage().endswith(text) for record in caplog.records] == [True]


def test_load_warns_of_asked_lengths_that_change_answers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plan = loaded(tmp_path, Masked(why_not="output 'x' differs"), parameters(pad="ids[1]")).plan
    assert plan.spec.lengths
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING] == [
        "model 'm': requests are filled up as paceline.pad says, though output 'x' differs"
    ]


RAGGED = 'max_batch_size: 4 dynamic_batching { } input { name: "a" allow_ragged_batch: true }'


@pytest.mark.parametrize(
    ("model", "config", "text"),
    [
        (Masked(), parameters(pad="ids[2]"), "paceline.pad: input 'ids': expected an axis up to 1, got 2"),
        (
            Masked(),
            parameters(pad="word[1]=0"),
            "paceline.pad: input 'word': expected no fill, as text is filled up with empty strings, got 0",
        ),
        (
            Masked(),
            parameters(pad_sizes="8"),
            "paceline.pad_sizes: expected none, as no axes were found along which requests may be filled up; name them "
            "in paceline.pad, got [8]",
        ),
        (
            Masked(why_not="output 'x' differs"),
            parameters(max_batch_elements="64"),
            "paceline.max_batch_elements: expected 0, as output 'x' differs, got 64",
        ),
        (
            Masked(),
            parameters(pad="off", pad_sizes="8"),
            "paceline.pad_sizes: expected none, as paceline.pad is off, got [8]",
        ),
        (
            Masked(),
            IO + parameters(pad="ids[1]"),
            "paceline.pad: expected off, as requests don't share batches: no dynamic_batching in its configuration, "
            "got ids[1]",
        ),
        (
            Masked(),
            IO.replace("max_batch_size: 4", "") + parameters(pad="ids[1], mask[1]"),
            "paceline.pad: expected off, as the model has no batch axis, got ids[1], mask[1]",
        ),
        (
            Masked(spec=replace(SPEC, inputs=(TensorSpec("a", "FP32", (-1,)),))),
            RAGGED + parameters(pad="a[1]"),
            "paceline.pad: expected off, as requests can't be filled up with allow_ragged_batch, batch_input, "
            "batch_output, optional or is_shape_tensor, got a[1]",
        ),
        (
            Model(),
            parameters(pad="a[1]"),
            "paceline.pad: expected off, as models of memory aren't filled up, got a[1]",
        ),
    ],
)
def test_padding_that_cannot_be_had_is_refused_by_name(tmp_path: Path, model: Model, config: str, text: str) -> None:
    assert refused(tmp_path, model, config) == text
