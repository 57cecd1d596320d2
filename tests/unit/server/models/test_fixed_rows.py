"""Models that always take the same number of rows: which are served by rows all the same, and what a load says."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest
from google.protobuf import text_format

from paceline.backends.spec import ModelSpec, TensorSpec
from paceline.backends.trials import Supervise, Trial, unsupervised
from paceline.protos import model_config_pb2 as pb
from paceline.server.errors import ConfigError
from paceline.server.models.defaults import BatchDefaults, LoadDefaults
from paceline.server.models.loader import load_model
from paceline.server.models.model_config import ServingPlan, plan
from paceline.server.models.tensor_config import EXPORT_AGAIN
from tests.unit.server.models.shelf import Model, VersionBackend, folder

ROWS = 16
INPUT = 'input { name: "a" data_type: TYPE_FP32 dims: [ %s ] } '
OUTPUT = 'output { name: "x" data_type: TYPE_FP32 dims: [ %s ] } '
SIZES = 'parameters { key: "paceline.batch_sizes" value { string_value: "%s" } } '


def model(*shapes: tuple[int, ...], outputs: tuple[tuple[int, ...], ...] = ((ROWS, 3),)) -> ModelSpec:
    inputs, results = shapes or ((ROWS, 3),), dict(zip("xyz", outputs, strict=False))
    return ModelSpec(
        tuple(TensorSpec(name, "FP32", dims) for name, dims in zip("abc", inputs, strict=False)),
        tuple(TensorSpec(name, "FP32", dims) for name, dims in results.items()),
    )


def planned(text: str, own: ModelSpec | None = None, confirmed: int = 0, default: int = 32) -> ServingPlan:
    config = text_format.Parse(text, pb.ModelConfig())
    return plan(config, own or model(), max_batch_rows=default, confirmed_rows=confirmed)


def rows_of(served: ServingPlan) -> tuple[int, int, tuple[int, ...]]:
    return served.max_batch_rows, served.spec.fixed_rows, served.policy.batch_sizes


BY_ROWS, AS_IT_IS = (ROWS, ROWS, (ROWS,)), (0, 0, ())


@pytest.mark.parametrize("text", ["", SIZES % ROWS, "dynamic_batching { }"])
def test_fixed_rows_are_batched_once_they_are_confirmed(text: str) -> None:
    served = planned(text, confirmed=ROWS)
    assert rows_of(served) == BY_ROWS
    assert [one.dims for one in (*served.spec.inputs, *served.spec.outputs)] == [(3,), (3,)]


@pytest.mark.parametrize(
    "text",
    [
        "",
        f"{SIZES % ROWS} dynamic_batching {{ }}",
        INPUT % 3 + OUTPUT % 3,
        OUTPUT % 3,
    ],
)
def test_fixed_rows_are_batched_if_max_batch_size_says_so(text: str) -> None:
    assert rows_of(planned(f"max_batch_size: {ROWS} {text}")) == BY_ROWS


@pytest.mark.parametrize(
    "text", ["", "dynamic_batching { }", INPUT % "16, 3" + OUTPUT % "16, 3", INPUT % "16, 3", OUTPUT % "16, 3"]
)
def test_fixed_rows_stay_part_of_the_shape_otherwise(text: str) -> None:
    served = planned(text, confirmed=0 if text in ("", "dynamic_batching { }") else ROWS)
    assert rows_of(served) == AS_IT_IS
    assert [one.dims for one in (*served.spec.inputs, *served.spec.outputs)] == [(16, 3), (16, 3)]


def test_fixed_rows_stay_part_of_the_shape_if_the_default_is_no_batch_axis() -> None:
    assert rows_of(planned("", confirmed=ROWS, default=0)) == AS_IT_IS
    assert rows_of(planned("", confirmed=ROWS, default=4)) == BY_ROWS


def test_fixed_rows_alone_look_like_vectors_of_one() -> None:
    (a,) = planned("max_batch_size: 16", model((ROWS,))).spec.inputs
    assert (a.dims, a.reshape) == ((1,), ())


def test_fixed_rows_leave_shape_tensors_and_unused_outputs_as_they_are() -> None:
    own = model((ROWS, 3), (ROWS,), outputs=((-1, 3), (5,)))
    shape = 'input { name: "b" data_type: TYPE_FP32 dims: [ 16 ] is_shape_tensor: true }'
    served = planned(f"max_batch_size: 16 {INPUT % 3} {shape} {OUTPUT % 3}", own)
    assert rows_of(served) == BY_ROWS
    assert [one.dims for one in served.spec.inputs] == [(3,), (ROWS,)]


@pytest.mark.parametrize(
    "own",
    [
        model((ROWS, 3), (4, 3)),
        model((ROWS, 3), ()),
        model((ROWS, 3), (-1, 3)),
        model(outputs=((ROWS, 3), (4, 2))),
        model(outputs=((ROWS, 3), ())),
    ],
)
def test_fixed_rows_have_to_be_the_same_everywhere(own: ModelSpec) -> None:
    assert rows_of(planned("", own, confirmed=ROWS)) == AS_IT_IS
    with pytest.raises(ConfigError, match="max_batch_size: expected 0, as not all tensors"):
        planned("max_batch_size: 16", own)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (
            "max_batch_size: 8",
            "max_batch_size: expected 16, the fixed first dimension of all tensors of the model, or 0 with whole "
            "shapes in input and output, got 8",
        ),
        (
            "max_batch_size: 16 " + SIZES % "8,16",
            "paceline.batch_sizes: expected 16, the number of rows that the model always takes, got [8, 16]",
        ),
        (
            "max_batch_size: 16 " + SIZES % "8",
            "paceline.batch_sizes: expected ascending sizes from 1 up, the last 16, the largest batch, got [8]",
        ),
        (
            "max_batch_size: 16 " + INPUT % "16, 3",
            "input 'a': expected dims of the model, [3], got [16, 3]; dims don't include the batch axis",
        ),
    ],
)
def test_fixed_rows_contradicted_are_refused_naming_the_number(text: str, fault: str) -> None:
    with pytest.raises(ConfigError) as caught:
        planned(text, confirmed=ROWS)
    assert str(caught.value) == fault


def test_fixed_rows_that_cannot_be_padded_are_refused() -> None:
    own = model((ROWS, 3), (-1,))
    text = (
        'max_batch_size: 16 batch_input { kind: BATCH_ELEMENT_COUNT target_name: "b" data_type: TYPE_FP32 '
        f'source_input: "a" }} {INPUT % 3} {OUTPUT % 3}'
    )
    with pytest.raises(ConfigError, match="max_batch_size: expected 0, as the model always takes 16 rows, to which"):
        planned(text, own)


class Tried(Model):
    """Of fixed rows, with the verdict of a trial."""

    def __init__(self, why_not: str = "", rows: int = 0, spec: ModelSpec | None = None) -> None:
        super().__init__(spec=spec or model())
        self._verdict = Trial(self.spec, why_not, fixed_rows=rows)
        self.trials = 0

    def try_rows(self, supervise: Supervise = unsupervised) -> Trial:
        self.trials += 1
        return self._verdict


def says(caplog: pytest.LogCaptureFixture, root: Path, tried: Tried, config: str | None = None, most: int = 32) -> str:
    with caplog.at_level(logging.INFO, "paceline.server.loader"):
        defaults = LoadDefaults(batching=BatchDefaults(most))
        (loaded,) = load_model(folder(root, 1, config=config), VersionBackend(v1=tried).of, defaults)
    loaded.close()
    return next(text for text in caplog.messages if "version 1 loaded in" in text).partition(" s: ")[2]


NONE = "no batch axis, requests run one by one (%s)"
DOUBTED = NONE % (
    "all its tensors have a fixed first dimension of 16; %s; "
    "to batch it anyway, set max_batch_size: 16 in a config.pbtxt"
)


@pytest.mark.parametrize(
    ("tried", "text"),
    [
        (Tried(rows=ROWS), "batches of up to 16 rows, padded to that many, delay 0 us"),
        (Tried("its rows differ"), DOUBTED % "its rows differ"),
        (Tried(), DOUBTED % "it was not tried"),
        (
            Tried(spec=model((1, 3), outputs=((1, 3),))),
            NONE % f"its inputs have a first dimension of 1; {EXPORT_AGAIN}",
        ),
    ],
    ids=["confirmed", "against", "untried", "one"],
)
def test_load_of_fixed_rows_logs_whether_they_are_batched(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, tried: Tried, text: str
) -> None:
    assert says(caplog, tmp_path, tried) == text


def test_load_of_fixed_rows_logs_the_flag_that_says_otherwise(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert says(caplog, tmp_path, Tried(rows=ROWS), most=0) == NONE % "the default for max_batch_size is 0"


@pytest.mark.parametrize(
    ("config", "trials", "text"),
    [
        ("max_batch_size: 16", 0, "batches of up to 16 rows, padded to that many, delay 0 us"),
        ("dynamic_batching { }", 1, DOUBTED % "its rows differ"),
        (
            INPUT % "16, 3" + OUTPUT % "16, 3",
            0,
            NONE % "its configuration has input and output, and no max_batch_size",
        ),
    ],
)
def test_load_of_fixed_rows_believes_a_max_batch_size_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, config: str, trials: int, text: str
) -> None:
    tried = Tried("its rows differ")
    assert says(caplog, tmp_path, tried, config) == text
    assert tried.trials == trials


def test_load_of_fixed_rows_with_sizes_fails_with_what_the_trial_showed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_model(folder(tmp_path, 1, config=SIZES % ROWS), VersionBackend(v1=Tried("its rows differ")).of)
    assert str(caught.value) == (
        "paceline.batch_sizes: expected none, as the model has no batch axis (max_batch_size 0), got [16]; "
        "its rows differ"
    )


def test_load_of_fixed_rows_with_wrong_outputs_is_tried_for_these(tmp_path: Path) -> None:
    declared = replace(model(), outputs=(TensorSpec("x", "FP32", (1, 3)),))
    seen = replace(declared, outputs=(TensorSpec("x", "FP32", (-1, 3)),))

    class Seen(Tried):
        def try_rows(self, supervise: Supervise = unsupervised) -> Trial:
            return Trial(seen)

    config = f"max_batch_size: {ROWS}"
    (loaded,) = load_model(folder(tmp_path, 1, config=config), VersionBackend(v1=Seen(spec=declared)).of)
    assert rows_of(loaded.plan) == BY_ROWS
    loaded.close()
