"""Every field of Triton's ModelConfig, without exception: it changes what is served, or is ignored, or refused.

Lives here: the whole list, compared with the message's descriptor. A field is *read* if two configurations that differ
only in it load into something different, *ignored* if they don't, which docs/configuration.md has to say.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from google.protobuf.descriptor import Descriptor

from paceline.backends.base import Backend, Device, InstanceGroup, ModelSource
from paceline.backends.errors import BackendError
from paceline.backends.spec import Array, ModelSpec, Tensors
from paceline.protos import model_config_pb2 as pb
from paceline.server.errors import ServerError
from paceline.server.models.defaults import LoadDefaults
from paceline.server.models.ensemble_config import EnsembleModel, most_at_once
from paceline.server.models.loader import load_model
from tests.harness import REPO
from tests.memory_models import MemoryModel
from tests.unit.server.found import find_models
from tests.unit.server.models.config_fields import IGNORED, OWN, READ, REFUSED


class Recorder:
    """A backend of one model that records what it is asked for and what is executed."""

    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec
        self.asked: list[object] = []

    def named(self, name: str) -> Backend:
        self.asked.append(name)
        return self

    def devices(self, groups: Sequence[InstanceGroup]) -> tuple[Device, ...]:
        self.asked.append(groups)
        return (Device(),)

    def open(self, source: ModelSource, device: Device) -> MemoryModel:
        self.asked.append((source.path, source.parameters, source.graph_level))
        self.asked.append((source.accelerators, source.cpu_accelerators, source.op_libraries, source.cuda_graphs))
        return MemoryModel(self._spec, self._compute)

    def _compute(self, inputs: Tensors) -> list[Array]:
        self.asked.append([array.tolist() for array in inputs])
        return list(inputs[:1])


def loaded(folder: Path, text: str, own: ModelSpec) -> object:
    """All results of a load that can be compared; the reason if it fails."""
    recorder = Recorder(own)
    for version in "12":
        (folder / "m" / version).mkdir(parents=True, exist_ok=True)
    for name, label in (("one.txt", "cat"), ("two.txt", "dog")):
        (folder / "m" / name).write_text(label)
    (folder / "m" / "initial_state").mkdir(exist_ok=True)
    (folder / "m" / "initial_state" / "eight").write_bytes(b"12345678")
    (folder / "m" / "config.pbtxt").write_text(text)
    (model,) = find_models([folder])
    try:
        found = load_model(model, recorder.named, LoadDefaults(allow_op_libraries=True))
    except (ServerError, BackendError) as error:
        return f"{type(error).__name__}: {error}"
    steps = [(one.opened.steps, most_at_once(one.config)) for one in found if isinstance(one.opened, EnsembleModel)]
    return [(one.name, one.version, repr(one.plan), one.labels) for one in found], recorder.asked, steps


def outcomes(folder: Path, text: str) -> list[object]:
    return [loaded(folder, text, own) for own in OWN.values()]


def fields(message: Descriptor, prefix: str = "") -> Iterator[str]:
    """The paths of all fields that hold a value, and of messages without fields."""
    for field in message.fields:
        path, kind = prefix + field.name, field.message_type
        if kind is not None and kind.GetOptions().map_entry:
            kind = kind.fields_by_name["value"].message_type
        if kind is None or not kind.fields:
            yield path
        else:
            yield from fields(kind, f"{path}.")


FIELDS = list(fields(pb.ModelConfig.DESCRIPTOR))


def known(path: str) -> list[str]:
    """The lists that contain the field, or a message that it is part of."""
    parts = path.split(".")
    whole = {".".join(parts[: count + 1]) for count in range(len(parts))}
    return [name for name, table in (("read", READ), ("ignored", IGNORED), ("refused", REFUSED)) if whole & set(table)]


def documented(path: str) -> bool:
    text = (REPO / "docs" / "configuration.md").read_text(encoding="utf-8")
    return re.search(rf"`(\w+\.)*{path.rpartition('.')[2]}`", text) is not None


def test_fields_are_many() -> None:
    assert len(FIELDS) > 100
    assert {"max_batch_size", "version_policy.all", "dynamic_batching.priority_queue_policy.max_queue_size"} <= set(
        FIELDS
    )


@pytest.mark.parametrize("path", FIELDS)
def test_each_field_is_in_exactly_one_list(path: str) -> None:
    assert len(known(path)) == 1, f"{path} is in {known(path)}: is it read, ignored or refused?"


@pytest.mark.parametrize("path", [*READ, *IGNORED, *REFUSED])
def test_lists_have_only_existing_fields(path: str) -> None:
    assert any(field == path or field.startswith(f"{path}.") for field in FIELDS)


@pytest.mark.parametrize("path", READ)
def test_read_field_makes_a_difference(tmp_path: Path, path: str) -> None:
    without, with_it = (outcomes(tmp_path, text) for text in READ[path])
    assert without != with_it
    assert any(not isinstance(one, str) for one in (*without, *with_it)) or "warmup" in path


@pytest.mark.parametrize("path", IGNORED)
def test_ignored_field_makes_no_difference_and_is_documented(tmp_path: Path, path: str) -> None:
    without, with_it = IGNORED[path]
    assert outcomes(tmp_path, without) == outcomes(tmp_path, with_it)
    assert any(not isinstance(one, str) for one in outcomes(tmp_path, with_it))
    assert documented(path)


@pytest.mark.parametrize("path", REFUSED)
def test_refused_field_is_named_and_documented(tmp_path: Path, path: str) -> None:
    for outcome in outcomes(tmp_path, REFUSED[path]):
        assert isinstance(outcome, str)
        assert outcome.startswith("ConfigError: ")
        assert path.rpartition(".")[2] in outcome
        assert "is not supported by this build" in outcome
    assert documented(path)
