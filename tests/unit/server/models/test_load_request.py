"""What a load request may bring, and the folder made of its files. (Refusals over gRPC: test_load_parameters.py.)"""

from __future__ import annotations

from pathlib import Path, PurePosixPath

import pytest

from paceline.protos.inference_pb2 import ModelRepositoryParameter
from paceline.server.errors import InvalidRequest
from paceline.server.models.load_request import (
    checked_name,
    parse_load_parameters,
    parse_unload_parameters,
    scratch_folder,
)

CONFIG = ModelRepositoryParameter(
    string_param='{"maxBatchSize": 4, "version_policy": {"specific": {"versions": ["2"]}}}'
)


def test_no_parameters_mean_no_override() -> None:
    assert parse_load_parameters("m", {}) is None


def test_config_is_read_in_both_spellings_of_json() -> None:
    override = parse_load_parameters("m", {"config": CONFIG})
    assert override is not None
    assert (override.config.max_batch_size, list(override.config.version_policy.specific.versions)) == (4, [2])
    assert not override.files


def test_files_are_keyed_by_normalized_path() -> None:
    files = {
        "file:1/model.onnx": ModelRepositoryParameter(bytes_param=b"a"),
        "file:./1/./weights//w.bin": ModelRepositoryParameter(bytes_param=b""),
    }
    override = parse_load_parameters("m", {"config": CONFIG, **files})
    assert override is not None
    assert override.files == {PurePosixPath("1/model.onnx"): b"a", PurePosixPath("1/weights/w.bin"): b""}


@pytest.mark.parametrize("key", ["config", "file:1/model.onnx", "other"])
def test_parameter_without_a_value_is_refused(key: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^failed to load 'm', .*{key}"):
        parse_load_parameters("m", {key: ModelRepositoryParameter()})


@pytest.mark.parametrize("name", ["m", "a b", "modèle", "1", "...", ".hidden", "x" * 500])
def test_name_that_does_not_lead_elsewhere_is_accepted(name: str) -> None:
    assert checked_name(name) == name


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/a", "a/", "..\\a", "a\0"])
def test_name_that_leads_elsewhere_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequest):
        checked_name(name)


def test_name_of_more_than_1024_bytes_is_refused() -> None:
    assert checked_name("é" * 512) == "é" * 512
    with pytest.raises(InvalidRequest, match=r"^invalid model name 'é{64}…': expected at most 1024 bytes, got 1026$"):
        checked_name("é" * 513)


def test_unload_dependents_is_read() -> None:
    assert parse_unload_parameters({"unload_dependents": ModelRepositoryParameter(bool_param=True)})
    assert not parse_unload_parameters({"unload_dependents": ModelRepositoryParameter(bool_param=False)})
    assert not parse_unload_parameters({})


def test_scratch_folder_holds_the_files_during_the_block() -> None:
    files = {PurePosixPath("2/model.onnx"): b"content", PurePosixPath("10/deep/er/w.bin"): b""}
    with scratch_folder("m", files) as folder:
        assert (folder.name, sorted(folder.versions)) == ("m", [2, 10])
        assert (folder.versions[2] / "model.onnx").read_bytes() == b"content"
        assert (folder.versions[10] / "deep" / "er" / "w.bin").read_bytes() == b""
        where = folder.path
    assert not where.exists()


def test_scratch_folder_is_removed_when_the_load_fails_too() -> None:
    seen: list[Path] = []

    def load() -> None:
        with scratch_folder("m", {PurePosixPath("1/x"): b""}) as folder:
            seen.append(folder.path)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        load()
    assert not seen[0].exists()
