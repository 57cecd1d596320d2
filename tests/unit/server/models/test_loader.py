"""From a folder to instances: which versions, which file, and that failed loads leave nothing open."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
from google.protobuf import text_format

from paceline.backends.errors import ExecutionError, LoadError
from paceline.backends.spec import ModelSpec, TensorSpec
from paceline.protos import model_config_pb2 as pb
from paceline.server.errors import ConfigError
from paceline.server.models.defaults import LoadDefaults
from paceline.server.models.layout import ModelFolder, model_folder
from paceline.server.models.load_config import wanted_versions
from paceline.server.models.loader import load_model
from tests.unit.server.found import find_models
from tests.unit.server.models.shelf import Model, VersionBackend, folder
from tests.unit.server.privileges import open_folder, unprivileged


def test_load_without_configuration_loads_the_latest_version(tmp_path: Path) -> None:
    shelf = VersionBackend()
    (loaded,) = load_model(folder(tmp_path, 1, 3, 20), shelf.of)
    assert (loaded.name, loaded.version, len(loaded.instances)) == ("m", 20, 1)
    assert shelf.sources[0].path == tmp_path / "m" / "20" / "model.onnx"
    loaded.close()
    assert not shelf.leaked


def test_load_several_versions_opens_each_in_ascending_order(tmp_path: Path) -> None:
    shelf = VersionBackend()
    loaded = load_model(folder(tmp_path, 10, 9, config="version_policy { all { } }"), shelf.of)
    assert [one.version for one in loaded] == [9, 10]
    assert [source.path.parent.name for source in shelf.sources] == ["9", "10"]


def test_load_of_instance_groups_makes_an_instance_per_device(tmp_path: Path) -> None:
    groups = "instance_group [ { count: 2 }, { count: 1 } ]"
    (loaded,) = load_model(folder(tmp_path, 1, config=groups), VersionBackend().of)
    assert len(loaded.instances) == 3


def test_load_gives_the_backend_its_part_of_the_configuration(tmp_path: Path) -> None:
    shelf = VersionBackend()
    text = 'parameters { key: "k" value { string_value: "v" } } optimization { graph { level: 1 } }'
    load_model(folder(tmp_path, 1, config=text), shelf.of)
    (source,) = shelf.sources
    assert (source.name, source.parameters, source.graph_level) == ("m", {"k": "v"}, 1)


def test_load_parameters_of_the_configuration_override_those_of_flags(tmp_path: Path) -> None:
    shelf = VersionBackend()
    flags = LoadDefaults(parameters={"intra_op_thread_count": "3", "inter_op_thread_count": "4"})
    text = 'parameters { key: "intra_op_thread_count" value { string_value: "1" } }'
    load_model(folder(tmp_path, 1, config=text), shelf.of, flags)
    assert shelf.sources[0].parameters == {"intra_op_thread_count": "1", "inter_op_thread_count": "4"}


@pytest.mark.parametrize(
    ("config", "rows"),
    [(None, 32), ("", 6), ("max_batch_size: 0", 6), ("max_batch_size: 3", 3), ("dynamic_batching { }", 6)],
)
def test_load_rows_of_flags_apply_to_configurations_that_leave_them_open(
    tmp_path: Path, config: str | None, rows: int
) -> None:
    (loaded,) = load_model(folder(tmp_path, 1, config=config), VersionBackend().of, LoadDefaults(max_batch_rows=6))
    assert loaded.plan.max_batch_rows == rows


def test_load_rows_of_flags_may_be_0_which_means_no_batch_axis(tmp_path: Path) -> None:
    (loaded,) = load_model(folder(tmp_path, 1, config=""), VersionBackend().of, LoadDefaults(max_batch_rows=0))
    assert (loaded.plan.max_batch_rows, loaded.plan.spec.inputs[0].dims) == (0, (-1, 2))


TENSORS = """
    input { name: "a" data_type: TYPE_FP32 dims: [ 2 ] } output { name: "x" data_type: TYPE_FP32 dims: [ 2 ] }
"""


@pytest.mark.parametrize("config", [None, "", "max_batch_size: 2", TENSORS.partition("output")[0]])
def test_load_without_auto_complete_refuses_what_is_left_to_the_model(tmp_path: Path, config: str | None) -> None:
    shelf = VersionBackend()
    with pytest.raises(ConfigError) as caught:
        load_model(folder(tmp_path, 1, config=config), shelf.of, LoadDefaults(auto_complete=False))
    assert str(caught.value) == (
        "expected input and output in its configuration, as --disable-auto-complete-config is given"
    )
    assert not shelf.sources


def test_load_without_auto_complete_refuses_tensors_without_a_datatype(tmp_path: Path) -> None:
    config = 'backend: "memory" input { name: "a" dims: [ 1 ] } output { name: "x" data_type: TYPE_FP32 dims: [ 1 ] }'
    with pytest.raises(ConfigError, match="'a': expected a data_type, as --disable-auto-complete-config is given"):
        load_model(folder(tmp_path, 1, config=config), VersionBackend().of, LoadDefaults(auto_complete=False))


def test_load_without_auto_complete_accepts_a_complete_configuration(tmp_path: Path) -> None:
    config = f"max_batch_size: 2 {TENSORS}"
    (loaded,) = load_model(folder(tmp_path, 1, config=config), VersionBackend().of, LoadDefaults(auto_complete=False))
    assert loaded.plan.max_batch_rows == 2


def test_load_reads_the_labels_of_outputs(tmp_path: Path) -> None:
    model = folder(tmp_path, 1, config=TENSORS.replace("[ 2 ] }", '[ 2 ] label_filename: "l.txt" }').partition("}")[2])
    with pytest.raises(ConfigError, match=r"^output 'x': label_filename: .*/l\.txt: No such file or directory$"):
        load_model(model, VersionBackend().of)
    (model.path / "l.txt").write_text("cat\ndog\n")
    (loaded,) = load_model(model, VersionBackend().of)
    assert loaded.labels == {"x": (b"cat", b"dog")}


def test_load_of_a_bare_file_opens_that_file(tmp_path: Path) -> None:
    (tmp_path / "res.net.onnx").touch()
    shelf = VersionBackend()
    (model,) = find_models([tmp_path / "res.net.onnx"])
    (loaded,) = load_model(model, shelf.of)
    assert (loaded.name, loaded.version, shelf.sources[0].path) == ("res.net", 1, tmp_path / "res.net.onnx")


@pytest.mark.parametrize("other", ["encoder_model.onnx", "model.onnx"])
def test_load_opens_merged_decoder_if_there_is_no_model(tmp_path: Path, other: str) -> None:
    shelf = VersionBackend()
    for name in (other, "decoder_model_merged.onnx"):
        path = tmp_path / "m" / "1" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    load_model(model_folder("m", tmp_path / "m"), shelf.of)
    opened = "model.onnx" if other == "model.onnx" else "decoder_model_merged.onnx"
    assert shelf.sources[0].path == tmp_path / "m" / "1" / opened


@pytest.mark.parametrize("name", ["other.onnx", "sub/model.onnx", "model.onnx/"])
def test_load_default_model_filename_is_looked_up_inside_the_version(tmp_path: Path, name: str) -> None:
    shelf = VersionBackend()
    load_model(folder(tmp_path, 1, config=f'default_model_filename: "{name}"'), shelf.of)
    assert shelf.sources[0].path == tmp_path / "m" / "1" / name


def test_load_default_model_filename_too_long_for_a_file_is_refused(tmp_path: Path) -> None:
    shelf = VersionBackend()
    with pytest.raises(ConfigError, match=r"^default_model_filename: .*: File name too long$"):
        load_model(folder(tmp_path, 1, config=f'default_model_filename: "{"x" * 300}"'), shelf.of)
    assert not shelf.sources


@pytest.mark.parametrize("name", ["/etc/passwd", "../2/model.onnx", "sub/../../x", ".."])
def test_load_default_model_filename_outside_of_the_version_is_refused(tmp_path: Path, name: str) -> None:
    shelf = VersionBackend()
    with pytest.raises(ConfigError) as caught:
        load_model(folder(tmp_path, 1, config=f'default_model_filename: "{name}"'), shelf.of)
    assert str(caught.value) == (
        f"default_model_filename: expected a file inside the version folder, got '{Path(name)}'"
    )
    assert not shelf.sources


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ('name: "n"', "name: expected 'm', the name of its folder, got 'n'"),
        ('name: "../m"', "name: expected 'm', the name of its folder, got '../m'"),
        ("instance_group { passive: true }", "instance_group.passive is not supported by this build"),
        (
            "max_batch_siz: 1",
            'm/config.pbtxt:1:1 : Message type "inference.ModelConfig" has no field named "max_batch_siz". '
            "Did you mean max_batch_size?",
        ),
    ],
)
def test_load_refuses_an_invalid_configuration_before_anything_is_opened(
    tmp_path: Path, config: str, text: str
) -> None:
    shelf = VersionBackend()
    with pytest.raises(ConfigError) as caught:
        load_model(folder(tmp_path, 1, config=config), shelf.of)
    assert str(caught.value).removeprefix(f"{tmp_path}/") == text
    assert not shelf.sources


def test_load_folder_with_a_problem_fails_with_it(tmp_path: Path) -> None:
    broken = ModelFolder("m", tmp_path / "m", {}, problem="m: Permission denied")
    with pytest.raises(ConfigError, match=r"^m: Permission denied$"):
        load_model(broken, VersionBackend().of)


def policy(text: str) -> pb.ModelConfig:
    return text_format.Parse(f"version_policy {{ {text} }}" if text else "", pb.ModelConfig())


@pytest.mark.parametrize(
    ("text", "versions"),
    [
        ("", [10]),
        ("latest { }", [10]),
        ("latest { num_versions: 1 }", [10]),
        ("latest { num_versions: 2 }", [9, 10]),
        ("latest { num_versions: 99 }", [1, 9, 10]),
        ("all { }", [1, 9, 10]),
        ("specific { versions: [ 9 ] }", [9]),
        ("specific { versions: [ 10, 1, 10 ] }", [1, 10]),
        ("specific { versions: [ 1, 2 ] }", [1]),
    ],
)
def test_wanted_versions_follow_the_policy(tmp_path: Path, text: str, versions: list[int]) -> None:
    assert wanted_versions(policy(text), folder(tmp_path, 1, 9, 10)) == versions


def test_wanted_versions_that_are_missing_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "paceline.server.loader"):
        wanted_versions(policy("specific { versions: [ 1, 2, 3 ] }"), folder(tmp_path, 1))
    assert [record.getMessage() for record in caplog.records] == [
        f"model 'm': version {version} of its version_policy is not in {tmp_path}/m" for version in (2, 3)
    ]


@pytest.mark.parametrize("text", ["", "all { }", "latest { num_versions: 3 }"])
def test_wanted_versions_of_a_folder_without_any_is_an_error(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        wanted_versions(policy(text), folder(tmp_path))
    assert str(caught.value) == (
        f"no version to load: expected folders named by version numbers in {tmp_path}/m, found none"
    )


def test_version_taken_for_a_model_is_told_what_it_lacks(tmp_path: Path) -> None:
    (tmp_path / "net" / "1").mkdir(parents=True)
    (model,) = find_models([tmp_path / "net"])
    with pytest.raises(ConfigError, match=r"version of net itself, expected model\.onnx or model\.py in it$"):
        wanted_versions(policy(""), model)


@pytest.mark.parametrize("text", ["specific { versions: [ 7, 5 ] }", "specific { }"])
def test_wanted_versions_none_of_which_exists_is_an_error(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        wanted_versions(policy(text), folder(tmp_path, 1, 2))
    asked = [5, 7] if "7" in text else []
    assert str(caught.value) == (f"no version to load: version_policy asks for {asked}, found [1, 2] in {tmp_path}/m")


ALL = "version_policy { all { } } instance_group { count: 2 }"


def failing_warm_up() -> Model:
    model = Model()
    model.faults.raise_when(lambda inputs: True, ExecutionError("not today"))
    return model


@pytest.mark.parametrize(
    ("config", "second", "error", "text"),
    [
        (ALL, LoadError("damaged"), LoadError, "damaged"),
        (ALL, Model(instances=0), LoadError, "no room for another instance"),
        (ALL, Model(instances=1), LoadError, "no room for another instance"),
        (
            f'{ALL} model_warmup {{ name: "w" batch_size: 1 inputs {{ key: "a" value {{ data_type: TYPE_FP32 dims: 2 '
            "zero_data: true } } }",
            failing_warm_up(),
            ConfigError,
            "failed to run warmup sample 'w': not today",
        ),
        (
            f"{ALL} max_batch_size: 4 dynamic_batching {{ preferred_batch_size: 9 }}",
            Model(),
            ConfigError,
            "dynamic_batching.preferred_batch_size: expected 1 to max_batch_size, 4, got 9",
        ),
    ],
    ids=["open", "first instance", "second instance", "warm-up", "plan"],
)
def test_load_that_fails_in_a_later_step_leaves_nothing_open(
    tmp_path: Path, config: str, second: Model | Exception, error: type[Exception], text: str
) -> None:
    shelf = VersionBackend(v2=second)
    with pytest.raises(error) as caught:
        load_model(folder(tmp_path, 1, 2, config=config), shelf.of)
    assert str(caught.value) == text
    assert "1" in shelf.opened
    assert not shelf.leaked


def test_load_that_fails_unexpectedly_leaves_nothing_open_either(tmp_path: Path) -> None:
    shelf = VersionBackend(v2=MemoryError())
    with pytest.raises(MemoryError):
        load_model(folder(tmp_path, 1, 2, config=ALL), shelf.of)
    assert not shelf.leaked


def test_load_of_tensors_that_no_message_can_hold_leaves_nothing_open(tmp_path: Path) -> None:
    spec = ModelSpec((TensorSpec("a", "FP32", (-1, -1)),), (TensorSpec("x", "FP32", (-1, 2**63)),))
    shelf = VersionBackend(v1=Model(spec=spec))
    with pytest.raises(ValueError, match="9223372036854775808"):
        load_model(folder(tmp_path, 1), shelf.of)
    assert not shelf.leaked


def test_loaded_version_is_warm_and_executes(tmp_path: Path) -> None:
    shelf = VersionBackend()
    (loaded,) = load_model(folder(tmp_path, 1), shelf.of)
    assert shelf.opened["1"].batches == [(1,)]
    (result,) = loaded.instances[0].execute([[np.ones((2, 2), np.float32)]]).results
    assert result[0].tolist() == [[1, 1], [1, 1]]


@pytest.mark.parametrize("name", ["1/config.pbtxt", "config.txt", "config.pbtx", "Config.pbtxt", "config.prototxt"])
def test_load_logs_a_configuration_that_is_not_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    found = folder(tmp_path, 1)
    for stray in (name, "config.json", "config.py", "labels.txt", ".config.pbtxt.swp"):
        (tmp_path / "m" / stray).touch()
    with caplog.at_level(logging.WARNING, "paceline.server.loader"):
        load_model(found, VersionBackend().of)
    expected = f"{tmp_path}/m/{name} is ignored: expected the model's configuration to be {tmp_path}/m/config.pbtxt"
    assert caplog.messages == [expected]
    caplog.clear()
    load_model(folder(tmp_path, config=""), VersionBackend().of)
    assert not caplog.messages


def test_load_of_a_file_logs_a_configuration_beside_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "m.onnx"
    for name in ("m.onnx", "config.pbtxt"):
        (tmp_path / name).touch()
        with caplog.at_level(logging.WARNING, "paceline.server.loader"):
            load_model(ModelFolder("m", file, {1: tmp_path}, file), VersionBackend().of)
    (said,) = caplog.messages
    assert said.startswith(f"{tmp_path}/config.pbtxt is ignored, as a model that is a file has no configuration: serve")


def test_load_of_a_version_that_can_not_be_entered_says_so() -> None:
    with open_folder() as home:
        found = folder(home, 1)
        (home / "m" / "1").chmod(0o444)
        with unprivileged(), pytest.raises(ConfigError, match=f"^{home}/m/1: Permission denied; expected a folder"):
            load_model(found, VersionBackend().of)


def test_load_logs_folders_that_are_not_versions(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "m" / "abc").mkdir(parents=True)
    with caplog.at_level(logging.WARNING, "paceline.server.loader"):
        load_model(folder(tmp_path, 1), VersionBackend().of)
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path}/m/abc is ignored: expected a version folder, named by a number without leading zeros"
    ]
