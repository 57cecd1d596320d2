"""The model that is tuned: its name, and what its own configuration says."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.clients.inputs import InputError
from paceline.protos import model_config_pb2 as pb
from paceline.server.tune.own_model import own_model


def write(file: Path, text: str = "") -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


@pytest.mark.parametrize("place", ["", "bert-1.5", "bert-1.5/1"])
def test_configuration_is_found_from_any_folder(tmp_path: Path, place: str) -> None:
    write(tmp_path / "bert-1.5" / "1" / "model.onnx")
    write(tmp_path / "bert-1.5" / "config.pbtxt", "max_batch_size: 8")
    found = own_model(tmp_path / place)
    assert found == ("bert-1.5", pb.ModelConfig(max_batch_size=8, backend="onnxruntime"))


def test_model_without_configuration_has_the_backend_of_its_files(tmp_path: Path) -> None:
    file = write(tmp_path / "one.two.onnx")
    assert own_model(file) == ("one.two", pb.ModelConfig(backend="onnxruntime"))
    write(tmp_path / "p" / "1" / "model.py")
    assert own_model(tmp_path / "p") == ("p", pb.ModelConfig(backend="python"))


def test_folder_of_many_models_cannot_be_tuned(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write(tmp_path / name / "1" / "model.onnx")
    with pytest.raises(InputError, match="expected one model, got a, b"):
        own_model(tmp_path)
