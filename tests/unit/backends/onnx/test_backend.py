"""Opening ONNX models: what they declare, and why opening fails. On which device: `test_devices.py`."""

from __future__ import annotations

import os
import re
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper

from paceline.backends.base import ModelSource
from paceline.backends.errors import LoadError
from paceline.backends.onnx.backend import OnnxBackend
from paceline.backends.spec import Length, ModelSpec, TensorSpec
from paceline.backends.trials import LengthAxis, Trial
from paceline.protos.datatypes import DATATYPES
from tests import models, odd_models
from tests.unit.backends.onnx_models import (
    CPU,
    batched,
    floats,
    open_model,
    run_directly,
    run_one,
)


def test_open_simple_model_reports_names_datatypes_and_all_dims(tmp_path: Path) -> None:
    model = open_model(models.add_sub(), tmp_path)

    assert model.platform == "onnxruntime_onnx"
    assert model.spec == ModelSpec(
        inputs=(TensorSpec("INPUT0", "INT32", (-1, 16)), TensorSpec("INPUT1", "INT32", (-1, 16))),
        outputs=tuple(TensorSpec(name, "INT32", (-1, 16), assumed=True) for name in ("OUTPUT0", "OUTPUT1")),
        batched=False,
    )


@pytest.mark.parametrize("datatype", sorted(DATATYPES))
def test_open_identity_of_each_datatype_reports_it(datatype: str, tmp_path: Path) -> None:
    spec = open_model(models.identity(datatype), tmp_path).spec

    assert spec.inputs == (TensorSpec("INPUT0", datatype, (-1, -1), utf8=datatype == "BYTES"),)


@pytest.mark.parametrize(
    ("dims", "expected"),
    [((), ()), (("batch", None, "n"), (-1, -1, -1)), ((4, 3), (4, 3)), ((None, 8, None), (-1, 8, -1)), ((0,), (0,))],
)
def test_open_free_dimensions_are_minus_one_and_others_unchanged(
    dims: models.Dims, expected: tuple[int, ...], tmp_path: Path
) -> None:
    assert open_model(models.identity("FP32", dims), tmp_path).spec.inputs[0].dims == expected


def test_open_folder_reads_the_model_with_its_external_weights(tmp_path: Path) -> None:
    model, folder = models.mlp((64, 64, 4)), tmp_path / "model.onnx"
    x = floats(2, 64)
    expected = run_directly(model, {"INPUT0": x})
    folder.mkdir()
    onnx.save_model(model, folder / "model.onnx", save_as_external_data=True, location="weights.bin", size_threshold=0)
    assert (folder / "weights.bin").stat().st_size > 64 * 64 * 4

    opened = OnnxBackend().open(ModelSource("m", folder), CPU)

    (y,) = run_one(opened.instance(batched(opened.spec), CPU), x)
    np.testing.assert_allclose(y, expected[0], rtol=1e-5)


def test_open_missing_file_names_model_and_path(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"

    with pytest.raises(LoadError, match=re.escape(f"model 'm': no such file: '{path}'")):
        OnnxBackend().open(ModelSource("m", path), CPU)


def test_open_dangling_link_or_pipe_is_refused_as_not_a_file(tmp_path: Path) -> None:
    (tmp_path / "a.onnx").symlink_to("nowhere")
    os.mkfifo(tmp_path / "b.onnx")
    for path in (tmp_path / "a.onnx", tmp_path / "b.onnx"):
        words = f"model 'm': expected a file, got something else or a dangling link: '{path}'"
        with pytest.raises(LoadError, match=f"^{re.escape(words)}$"):
            OnnxBackend().open(ModelSource("m", path), CPU)


def test_open_path_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"\xff.onnx")
    path.write_bytes(b"x")
    with pytest.raises(LoadError, match=r"^model 'm': expected a path in UTF-8, as ONNX Runtime requires: "):
        OnnxBackend().open(ModelSource("m", path), CPU)


def test_open_folder_without_a_model_names_the_file_it_lacks(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=re.escape(f"no such file: '{tmp_path / 'model.onnx'}'")):
        OnnxBackend().open(ModelSource("m", tmp_path), CPU)


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ((), "; the folder is empty"),
        (
            (".net.onnx.part", "net.onnx"),
            "; there is net.onnx; default_model_filename in its config.pbtxt can name another",
        ),
        (("a", "b", "c", "d", "e", "f", "g"), "; there is a, b, c, d, e and 2 more; default_model_filename"),
    ],
)
def test_open_missing_file_names_the_files_beside_it(tmp_path: Path, names: tuple[str, ...], text: str) -> None:
    for name in names:
        (tmp_path / name).touch()
    with pytest.raises(LoadError, match=re.escape(f"model.onnx'{text}")):
        OnnxBackend().open(ModelSource("m", tmp_path / "model.onnx"), CPU)


def test_open_empty_file_is_refused_as_empty(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.touch()

    with pytest.raises(LoadError, match=re.escape(f"model 'm': the file is empty: '{path}'")):
        OnnxBackend().open(ModelSource("m", path), CPU)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"not a model at all", "onnx runtime error 7: "),
        (models.mlp().SerializeToString()[:-20], "onnx runtime error 7: "),
        (
            models.model(
                [helper.make_node("NoSuchOp", ["INPUT0"], ["OUTPUT0"])],
                [models.tensor("INPUT0", "FP32", [1])],
                [models.tensor("OUTPUT0", "FP32", [1])],
            ).SerializeToString(),
            "No Op registered for NoSuchOp",
        ),
    ],
    ids=["garbage", "truncated", "unknown-operator"],
)
def test_open_broken_file_gives_path_and_onnx_runtimes_reason_in_one_line(
    content: bytes, reason: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(content)

    with pytest.raises(LoadError) as caught:
        OnnxBackend().open(ModelSource("m", path), CPU)

    assert str(caught.value).startswith(f"model 'm': can't open '{path}': ")
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "")


def lower_case(**attributes: object) -> onnx.ModelProto:
    """Texts in lower case, as at the beginning of scikit-learn's text vectorizers."""
    return models.model(
        [helper.make_node("StringNormalizer", ["INPUT0"], ["OUTPUT0"], case_change_action="LOWER", **attributes)],
        [models.tensor("INPUT0", "BYTES", [None])],
        [models.tensor("OUTPUT0", "BYTES", [None])],
    )


def test_open_model_without_its_locale_says_how_to_install_it(tmp_path: Path) -> None:
    with pytest.raises(LoadError) as caught:
        open_model(lower_case(locale="qq_QQ.UTF-8"), tmp_path)

    said = str(caught.value)
    assert "its operator StringNormalizer needs the locale 'qq_QQ.UTF-8', which this machine or image lacks" in said
    assert "localedef -i qq_QQ -f UTF-8 qq_QQ.UTF-8), or export the model with the operator's attribute locale" in said


def test_open_model_for_the_built_in_locale_needs_no_installation(tmp_path: Path) -> None:
    model = lower_case(locale="C.UTF-8")

    assert open_model(model, tmp_path).spec.inputs == (TensorSpec("INPUT0", "BYTES", (-1,), utf8=True),)
    assert [*run_directly(model, {"INPUT0": np.array(["One", "ZW\u00d6LF"], object)})[0]] == ["one", "zw\u00f6lf"]


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (odd_models.sequence_output(), "output 'OUTPUT0': seq(tensor(float)) has no datatype in the v2 protocol"),
        (
            odd_models.map_output(),
            "output 'OUTPUT0': seq(map(int64,tensor(float))) has no datatype in the v2 protocol",
        ),
        (odd_models.float8_output(), "output 'OUTPUT0': tensor(float8e4m3fn) has no datatype in the v2 protocol"),
    ],
)
def test_open_type_that_the_protocol_lacks_is_refused_by_name(
    model: onnx.ModelProto, reason: str, tmp_path: Path
) -> None:
    with pytest.raises(LoadError, match=re.escape(f"model 'm': {reason}")):
        open_model(model, tmp_path)


def test_open_unsupported_option_is_refused(tmp_path: Path) -> None:
    path = models.write(models.add_sub(), tmp_path / "model.onnx")

    with pytest.raises(LoadError, match="expected one of cuda, tensorrt, got 'amp'"):
        OnnxBackend().open(ModelSource("m", path, accelerators=(("amp", {}),)), CPU)


@pytest.mark.parametrize("training", [True, False])
def test_normalization_in_training_mode_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, training: bool
) -> None:
    tried = open_model(models.normalizing(training), tmp_path).try_rows()
    assert ("BatchNormalization is in training mode" in tried.why_not) is training
    assert ("after model.eval()" in caplog.text) is training


def test_normalization_that_crashes_in_training_mode_is_deadly(tmp_path: Path) -> None:
    opened = open_model(models.normalizing(training=True, statistics=("", "")), tmp_path)
    assert opened.try_rows() == Trial(opened.spec, "the process that ran it was killed by SIGSEGV", deadly=True)


def test_lengths_of_normalization_in_training_mode_are_untried(tmp_path: Path) -> None:
    opened = open_model(models.normalizing(training=True), tmp_path)
    why_not = opened.try_rows().why_not
    found = opened.try_lengths(batched(opened.spec), [LengthAxis("INPUT0", 2)])
    assert (found.spec.lengths, found.why_not) == ((Length("axis 2", ((0, 2),), ((0, 2),)),), why_not)
    assert opened.try_lengths(batched(opened.spec), None).why_not == why_not
