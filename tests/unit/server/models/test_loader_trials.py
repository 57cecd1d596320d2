"""Whether a load tries the model, and what becomes of trials and warm-ups that hang or kill."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.backends.base import Device, DeviceKind, Execution, InstanceGroup
from paceline.backends.errors import ExecutionError
from paceline.backends.onnx.options import OWN_PROCESS
from paceline.backends.spec import ModelSpec, Tensors
from paceline.backends.trials import Supervise, Trial, unsupervised
from paceline.server.errors import LoadHangs
from paceline.server.models.defaults import LoadDefaults
from paceline.server.models.loader import load_model
from tests.memory_models import MemoryInstance, MemoryModel
from tests.polling import eventually
from tests.unit.server.models.shelf import SPEC, Model, VersionBackend, folder


class Untried(Model):
    """May not be tried."""

    def try_rows(self, supervise: Supervise = unsupervised) -> Trial:
        raise AssertionError("it was tried")


@pytest.mark.parametrize("config", ["max_batch_size: 4", "dynamic_batching { }"])
def test_load_of_a_model_that_is_configured_to_batch_tries_nothing(tmp_path: Path, config: str) -> None:
    (loaded,) = load_model(folder(tmp_path, 1, config=config), VersionBackend(v1=Untried()).of)
    assert loaded.plan.max_batch_rows > 1
    loaded.close()


@pytest.mark.parametrize("config", ["max_batch_size: 4", "dynamic_batching { }"])
def test_load_of_a_model_that_is_configured_to_batch_against_its_declaration_is_tried(
    tmp_path: Path, config: str
) -> None:
    class Seen(Model):
        def try_rows(self, supervise: Supervise = unsupervised) -> Trial:
            return Trial(SPEC)

    declared = ModelSpec(SPEC.inputs, tuple(replace(tensor, dims=()) for tensor in SPEC.outputs))
    (loaded,) = load_model(folder(tmp_path, 1, config=config), VersionBackend(v1=Seen(spec=declared)).of)
    assert loaded.plan.max_batch_rows > 1
    loaded.close()


class HangingTrial(Model):
    """Hangs in its trial run until `gate` opens."""

    def try_rows(self, supervise: Supervise = unsupervised) -> Trial:
        return supervise(lambda: (self.gate.enter(), Trial(self.spec))[1])


@pytest.mark.usefixtures("without_minimum_execution_limit")
def test_load_with_a_hanging_trial_fails_and_closes_nothing_until_that_has_ended(tmp_path: Path) -> None:
    model = HangingTrial()
    model.gate.close()
    shelf = VersionBackend(v1=model)
    with pytest.raises(LoadHangs) as caught:
        load_model(folder(tmp_path, 1), shelf.of, LoadDefaults(execution_limit_ns=1_000_000))
    assert not model.closed
    model.gate.open()
    caught.value.ended.result(30)
    eventually(lambda: model.closed, "the model closed")


class CrashingTrial(Model):
    """Kills the process of its trial run."""

    def try_rows(self, supervise: Supervise = unsupervised) -> Trial:
        return Trial(self.spec, "it was killed", deadly=True)


class Mixed(VersionBackend):
    def devices(self, groups: Sequence[InstanceGroup]) -> tuple[Device, ...]:
        return Device(), Device(DeviceKind.GPU)


@pytest.mark.parametrize("shelf", [VersionBackend, Mixed])
@pytest.mark.parametrize("told", ["", "false"])
def test_model_that_kills_its_trial_gets_its_own_process(
    told: str, shelf: type[VersionBackend], tmp_path: Path
) -> None:
    own = f'parameters {{ key: "{OWN_PROCESS}" value {{ string_value: "{told}" }} }}' if told else ""
    backend = shelf(v1=CrashingTrial())
    (loaded,) = load_model(folder(tmp_path, 1, config=own), backend.of)
    says = [source.parameters.get(OWN_PROCESS) for source in backend.sources]
    assert says == ([told] if told else [None, "true"])
    assert loaded.config.parameters[OWN_PROCESS].string_value == (told or "true")
    assert not loaded.plan.max_batch_rows
    loaded.close()


class Watched(Model):
    """Records on which thread its trial ran."""

    def try_rows(self, supervise: Supervise = unsupervised) -> Trial:
        self.tried_on = supervise(threading.current_thread)
        return Trial(self.spec)


def test_load_leaves_no_trial_thread_behind(tmp_path: Path) -> None:
    model = Watched()
    (loaded,) = load_model(folder(tmp_path, 1), VersionBackend(v1=model).of, LoadDefaults(execution_limit_ns=1_000_000))
    assert model.tried_on is not threading.current_thread()
    model.tried_on.join(30)
    assert not model.tried_on.is_alive()
    loaded.close()


@pytest.mark.usefixtures("without_minimum_execution_limit")
def test_load_uses_the_models_own_execution_limit(tmp_path: Path) -> None:
    config = 'parameters { key: "paceline.execution_timeout_ms" value { string_value: "%d" } }'
    shelf = VersionBackend()
    (loaded,) = load_model(folder(tmp_path, 1, config=config % 0), shelf.of, LoadDefaults(execution_limit_ns=1))
    loaded.close()
    assert shelf.leaked == []


class Abandoned(MemoryInstance):
    """Hangs until it is abandoned."""

    def __init__(self, model: MemoryModel, spec: ModelSpec, device: Device) -> None:
        super().__init__(model, spec, device)
        self._abandoned = threading.Event()

    def execute(self, requests: Sequence[Tensors], padded_rows: int = 0) -> Execution:
        self._abandoned.wait(30)
        raise ExecutionError("abandoned")

    def abandon(self) -> None:
        self._abandoned.set()


class Abandoning(Model):
    def instance(self, spec: ModelSpec, device: Device) -> MemoryInstance:
        instance = Abandoned(self, spec, device)
        self._instances.append(instance)
        return instance


@pytest.mark.usefixtures("without_minimum_execution_limit")
def test_load_with_a_hanging_warm_up_abandons_instances_that_allow_it_and_closes_them(tmp_path: Path) -> None:
    shelf = VersionBackend(v1=Abandoning())
    with pytest.raises(LoadHangs) as caught:
        load_model(folder(tmp_path, 1), shelf.of, LoadDefaults(execution_limit_ns=1_000_000))
    assert isinstance(caught.value.ended.exception(10), ExecutionError)
    eventually(lambda: shelf.leaked == [], "all closed")
