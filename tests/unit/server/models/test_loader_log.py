"""What a load says: how the model will batch, why it won't, and which settings have no effect."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.backends.spec import ModelSpec, TensorSpec
from paceline.backends.trials import Supervise, Trial, unsupervised
from paceline.protos import model_config_pb2 as pb
from paceline.server.models.defaults import BatchDefaults, LoadDefaults
from paceline.server.models.layout import ModelFolder
from paceline.server.models.loader import load_model
from tests.unit.server.models.shelf import SPEC, Model, VersionBackend, folder


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ("max_batch_size: 4", "batches of up to 4 rows, delay 0 us"),
        (
            "max_batch_size: 4 dynamic_batching { preferred_batch_size: [ 4, 2 ] max_queue_delay_microseconds: 7 }",
            "batches of up to 4 rows, preferred [2, 4], delay 7 us",
        ),
        (
            'max_batch_size: 4 input { name: "a" data_type: TYPE_FP32 dims: 2 } '
            'output { name: "x" data_type: TYPE_FP32 dims: 2 }',
            "up to 4 rows a request, not batched: no dynamic_batching in its configuration",
        ),
        (
            'input { name: "a" data_type: TYPE_FP32 dims: [ -1, 2 ] } '
            'output { name: "x" data_type: TYPE_FP32 dims: [ -1, 2 ] }',
            "no batch axis, requests run one by one (its configuration has input and output, and no max_batch_size)",
        ),
    ],
)
def test_load_logs_how_the_model_will_batch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, config: str, text: str
) -> None:
    with caplog.at_level(logging.INFO, "paceline.server.loader"):
        load_model(folder(tmp_path, 1, config=config), VersionBackend().of)
    (record,) = caplog.records
    assert record.getMessage().startswith("model 'm' version 1 loaded in ")
    assert record.getMessage().endswith(text)


FLAGS = LoadDefaults(
    BatchDefaults(4, flags=(("--max-batch-size", "max_batch_size"), ("--timeout", "default_queue_policy")))
)
IGNORED_FLAGS = (
    "model 'm': --max-batch-size and --timeout have no effect, as it has a configuration; set max_batch_size and "
    "default_queue_policy in that"
)


def warnings_of_load(caplog: pytest.LogCaptureFixture, model: ModelFolder, *given: LoadDefaults, **more: Any) -> object:
    with caplog.at_level(logging.WARNING, "paceline.server.loader"):
        load_model(model, VersionBackend().of, *given, **more)
    return [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize("config", ["", "max_batch_size: 4"])
def test_load_warns_of_flags_that_a_configuration_overrules(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, config: str
) -> None:
    assert warnings_of_load(caplog, folder(tmp_path, 1, config=config), FLAGS) == [IGNORED_FLAGS]


def test_load_warns_of_flags_that_a_callers_configuration_overrules(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert warnings_of_load(caplog, folder(tmp_path, 1), FLAGS, override=pb.ModelConfig()) == [IGNORED_FLAGS]


def test_load_without_a_configuration_follows_flags_silently(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert warnings_of_load(caplog, folder(tmp_path, 1), FLAGS) == []


@pytest.mark.parametrize(
    ("config", "settings"),
    [
        ("model_metrics { }", "model_metrics"),
        (
            'cc_model_filenames { key: "7.5" value: "x" } model_metrics { } '
            "instance_group { rate_limiter { priority: 1 } }",
            "instance_group.rate_limiter, model_metrics, cc_model_filenames",
        ),
    ],
)
def test_load_warns_once_of_settings_without_effect(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, config: str, settings: str
) -> None:
    config = f"version_policy {{ all {{ }} }} {config}"
    warnings = warnings_of_load(caplog, folder(tmp_path, 1, 2, config=config))
    assert warnings == [f"model 'm': not in this build, so without effect: {settings}"]


def test_load_warns_of_a_cache_that_the_server_lacks(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = folder(tmp_path, 1, config="response_cache { enable: true }")
    assert warnings_of_load(caplog, model, LoadDefaults(keeps_responses=True)) == []
    assert warnings_of_load(caplog, model) == [
        "model 'm': response_cache has no effect, as the server has no cache: --cache-config local,size=BYTES"
    ]


@pytest.mark.parametrize(
    "config", ["response_cache { }", "instance_group { count: 2 }", "optimization { priority: 1 }"]
)
def test_load_is_silent_about_settings_that_ask_for_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, config: str
) -> None:
    assert warnings_of_load(caplog, folder(tmp_path, 1, config=config)) == []


@pytest.mark.parametrize(
    ("inputs", "outputs", "why"),
    [
        ({"a": (-1, 2), "state": (2, -1, 8)}, {"x": (-1, 2)}, "input 'state' has a first dimension of 2"),
        ({"a": (-1, 2), "rate": ()}, {"x": (-1, 2)}, "input 'rate' has no dimensions"),
        ({"a": (-1, 2)}, {"x": (1, 2)}, "output 'x' has a first dimension of 1"),
        (
            {"a": (-1, 2)},
            {"x": (-1, 2), "y": ()},
            "output 'y' has no dimensions; it may be left out of `output` in a config.pbtxt",
        ),
        ({"a": (-1, 2)}, {"x": (), "y": (3,)}, "output 'x' has no dimensions"),
        ({}, {"x": (-1, 2)}, "no request has to bring an input"),
    ],
)
def test_load_logs_which_tensor_has_no_batch_axis(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    inputs: dict[str, tuple[int, ...]],
    outputs: dict[str, tuple[int, ...]],
    why: str,
) -> None:
    spec = ModelSpec(
        *(tuple(TensorSpec(name, "FP32", dims) for name, dims in one.items()) for one in (inputs, outputs))
    )
    results = [np.zeros([abs(dim) for dim in one.dims], np.float32) for one in spec.outputs]
    with caplog.at_level(logging.INFO, "paceline.server.loader"):
        load_model(folder(tmp_path, 1), VersionBackend(v1=Model(spec=spec, compute=lambda _: results)).of)
    assert caplog.messages[-1].endswith(f"no batch axis, requests run one by one ({why})")


@pytest.mark.parametrize(
    ("dims", "most", "why"),
    [
        ((1, 2), 32, "output 'x' has a first dimension of 1"),  # as that of a constant is seen
        ((-1, 2), 32, "it gives the same for all"),
        ((-1, 2), 0, "it gives the same for all"),
    ],
)
def test_load_logs_why_a_model_that_was_tried_has_no_batch_axis(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, dims: tuple[int, ...], most: int, why: str
) -> None:
    class Constant(Model):
        def try_rows(self, supervise: Supervise = unsupervised) -> Trial:
            outputs = tuple(replace(tensor, dims=dims) for tensor in SPEC.outputs)
            return Trial(replace(SPEC, outputs=outputs), "it gives the same for all")

    with caplog.at_level(logging.INFO, "paceline.server.loader"):
        load_model(
            folder(tmp_path, 1),
            VersionBackend(v1=Constant()).of,
            LoadDefaults(batching=BatchDefaults(max_batch_rows=most)),
        )
    assert caplog.messages[-1].endswith(f"no batch axis, requests run one by one ({why})")


def test_load_logs_that_batching_is_off_by_default(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "paceline.server.loader"):
        load_model(folder(tmp_path, 1), VersionBackend().of, LoadDefaults(batching=BatchDefaults(max_batch_rows=0)))
    assert caplog.messages[-1].endswith("one by one (the default for max_batch_size is 0)")
