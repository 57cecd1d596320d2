"""From a folder on disk to instances that can execute.

Lives here: the blocking part of a load, run on a worker thread. Must not: touch the event loop or what is being served.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from paceline.backends.base import (
    Abandonable,
    Backend,
    CompletesConfig,
    InstanceGroup,
    ModelInstance,
    OpenModel,
    Rounding,
)
from paceline.backends.generation import Generates
from paceline.backends.onnx.options import OWN_PROCESS
from paceline.backends.paths import exists, is_file, open_inside
from paceline.backends.remote import RemoteInstance, RemoteModel
from paceline.backends.trials import Supervise, Triable, Trial
from paceline.protos import model_config_pb2 as pb
from paceline.server.codec.classification import Labels, read_labels
from paceline.server.errors import ConfigError, LoadHangs
from paceline.server.models.batch_policy import backend_name, called_models, limit_of
from paceline.server.models.config_json import config_json, with_completed
from paceline.server.models.defaults import BatchDefaults, LoadDefaults
from paceline.server.models.effective_config import effective_config
from paceline.server.models.ensemble_config import ENSEMBLE, EnsembleInstance, EnsembleModel, is_ensemble, steps_of
from paceline.server.models.layout import (
    DEFAULT_MODEL_FILE,
    MERGED_DECODER_FILE,
    PYTHON_MODEL_FILE,
    ModelFolder,
    Sight,
)
from paceline.server.models.load_config import PYTHON, load_config, wanted_versions
from paceline.server.models.model_config import (
    ServingPlan,
    check_supported,
    ignored_settings,
    instance_groups,
    model_source,
    plan,
)
from paceline.server.models.offline import configured_for, executed_alone
from paceline.server.models.padding import batching_in_words, says_only_padding, with_lengths
from paceline.server.models.sequence_config import of_clients
from paceline.server.models.sequence_states import InitialData, read_initial_data
from paceline.server.models.tensor_config import (
    can_batch,
    declared_spec,
    doubts_outputs,
    fixed_rows,
    freed,
    spelled_out,
    without_datatype,
)
from paceline.server.models.warmup import Supervisor, WarmUp

_log = logging.getLogger("paceline.server.loader")


@dataclass(frozen=True, slots=True)
class Found:
    """What a load has found out, in words: how requests share batches, or why they don't; what the model has executed,
    or why nothing."""

    batching: str = ""
    warm_up: str = ""


@dataclass(frozen=True, slots=True)
class LoadedVersion:
    """One version of a model, warm and ready to execute; loading it took `load_ns`. `config` is its configuration with
    nothing left open; nobody may change it. `labels` are the names of the classes of its outputs. `warm_up` is for
    instances that replace one of these; None if they aren't warmed up. `sight`: what lay on disk before it was loaded;
    None if it wasn't all of it, or something else, that was loaded.

    For a model that another server executes, `version` is that server's name for it, "" for none."""

    name: str
    version: int | str
    config: pb.ModelConfig
    plan: ServingPlan
    labels: Labels
    opened: OpenModel | RemoteModel | EnsembleModel
    instances: tuple[ModelInstance | RemoteInstance | EnsembleInstance, ...]
    warm_up: WarmUp | None = None
    load_ns: int = 0
    found: Found = Found()
    sight: Sight | None = None

    def close(self) -> None:
        """Close the instances and the model; nothing may be executing."""
        for instance in self.instances:
            instance.close()
        self.opened.close()


def load_model(
    folder: ModelFolder,
    backend_of: Callable[[str], Backend],
    defaults: LoadDefaults | None = None,
    *,
    override: pb.ModelConfig | None = None,
    tell_versions: Callable[[list[int]], None] | None = None,
    await_called: Callable[[Sequence[str]], None] | None = None,
) -> list[LoadedVersion]:
    """Load the versions of a model that its policy asks for: all of them, or an error and none.

    `override` replaces the folder's configuration. `tell_versions` is called, on this thread, with the versions that
    will be loaded, as soon as they are known; `await_called` with the models that its code calls, if it does, before
    any of that runs.

    Blocks. Raises ConfigError or LoadError, or LoadHangs if an execution takes longer than allowed.
    """
    defaults = defaults or LoadDefaults()
    config = load_config(folder, override, defaults)
    versions = wanted_versions(config, folder)
    if tell_versions is not None:
        tell_versions(versions)
    if is_ensemble(config):
        return [_load_ensemble(folder, version, config, defaults) for version in versions]
    if await_called is not None and (called := called_models(config)):
        await_called(called)
    backend = backend_of(backend_name(config))
    configured = (override is not None or folder.config) and not says_only_padding(config)
    batching = None if configured else defaults.batching
    _tell_ignored(config, () if batching else defaults.batching.flags)
    if config.response_cache.enable and not defaults.keeps_responses:
        text = "model '%s': response_cache has no effect, as the server has no cache: --cache-config local,size=BYTES"
        _log.warning(text, config.name)
    if defaults.offline is not None:
        config = configured_for(defaults.offline, config)
    loaded: list[LoadedVersion] = []
    with ExitStack() as undo:
        for version in versions:
            one = _load_version(folder, version, config, backend, defaults, batching)
            undo.callback(one.close)
            loaded.append(one)
        undo.pop_all()
    return loaded


def _tell_ignored(config: pb.ModelConfig, flags: Sequence[tuple[str, str]]) -> None:
    """Log what the user asked for and doesn't get: `flags`, as the model has a configuration, and settings in it."""
    if flags:
        names, fields = (" and ".join(texts) for texts in zip(*flags, strict=True))
        have = "has" if len(flags) == 1 else "have"
        text = "model '%s': %s %s no effect, as it has a configuration; set %s in that"
        _log.warning(text, config.name, names, have, fields)
    if settings := ignored_settings(config):
        _log.warning("model '%s': not in this build, so without effect: %s", config.name, ", ".join(settings))


def _load_ensemble(folder: ModelFolder, version: int, config: pb.ModelConfig, defaults: LoadDefaults) -> LoadedVersion:
    """There is nothing to load, and the models that execute its steps aren't known here."""
    _tell_ignored(config, ())
    steps = steps_of(config)
    declared = declared_spec(config)
    if declared is None:
        raise ConfigError(
            f"'{without_datatype(config)[0]}': expected a data_type, as an ensemble has no file, got none"
        )
    served = plan(config, declared)
    whole = effective_config(config, served, platform=ENSEMBLE, file="", groups=())
    labels = read_labels(config, folder.path)
    if defaults.offline is not None:
        served = executed_alone(served)
    return LoadedVersion(folder.name, version, whole, served, labels, EnsembleModel(steps), ())


def _load_version(
    folder: ModelFolder,
    version: int,
    config: pb.ModelConfig,
    backend: Backend,
    defaults: LoadDefaults,
    batching: BatchDefaults | None,
) -> LoadedVersion:
    began_ns = time.monotonic_ns()
    labels = read_labels(config, folder.path)
    groups = [backend.devices([group]) for group in instance_groups(config) or (InstanceGroup(),)]
    devices = [device for group in groups for device in group]
    instances: list[ModelInstance] = []
    with ExitStack() as undo:
        file = _model_file(folder, version, config)
        libraries = _op_libraries(folder, version, config)
        rows = batching.max_batch_rows if batching else defaults.max_batch_rows
        source = replace(model_source(config, file, defaults.parameters, libraries, rows), on_call=defaults.on_call)
        initial_data = read_initial_data(config, folder.path)
        if folder.files is not None:
            source = replace(source, files=folder.files)
        supervise = Supervisor(limit_of(config, defaults.execution_limit_ns))
        undo.callback(supervise.close)
        opened = backend.open(replace(source, supervise=supervise), devices[0])
        undo.callback(opened.close)
        if isinstance(opened, CompletesConfig):
            config = with_completed(config, opened.completed_config)
            check_supported(config)
            opened.declare(spelled_out(config))
            supervise = Supervisor(limit_of(config, defaults.execution_limit_ns))
            undo.callback(supervise.close)
        try:
            tried = _tried(config, opened, supervise)
            if tried.deadly and OWN_PROCESS not in source.parameters:
                opened.close()
                # What callers send may end the process, as the trial did.
                _log.warning("model '%s' runs in its own process, because it crashed its trial process", config.name)
                config = deepcopy(config)
                config.parameters[OWN_PROCESS].string_value = "true"
                source = replace(source, parameters={**source.parameters, OWN_PROCESS: "true"})
                opened = backend.open(source, devices[0])
                undo.callback(opened.close)
            served = _plan(config, opened, tried, defaults, batching, initial_data)
            padding = with_lengths(config, served, opened, devices, supervise)
            served = padding.plan
            warm_up = WarmUp(config, served, folder.path)
            whole = effective_config(config, served, platform=opened.platform, file=file.name, groups=groups)
            if isinstance(opened, CompletesConfig):
                opened.configure(config_json(whole))
            for device in devices:
                instance = opened.instance(served.spec.executed, device)
                undo.callback(instance.close)
                instances.append(instance)
            warm_up.run(instances, supervise)
        except LoadHangs as error:
            _give_up(instances, undo.pop_all(), error)
            raise
        supervise.close()
        undo.pop_all()
    took_ns = time.monotonic_ns() - began_ns
    if padding.why_not and served.spec.lengths:
        differs = "model '%s': requests are filled up as paceline.pad says, though %s"
        _log.warning(differs, folder.name, padding.why_not)
    text = opened.in_words if isinstance(opened, Generates) else batching_in_words(padding, config, tried)
    _log.info("model '%s' version %d loaded in %.2f s: %s", folder.name, version, took_ns / 1e9, text)
    found = Found(text, warm_up.in_words)
    if defaults.offline is not None:
        served = executed_alone(served)
    return LoadedVersion(folder.name, version, whole, served, labels, opened, tuple(instances), warm_up, took_ns, found)


def _give_up(instances: Sequence[ModelInstance], undo: ExitStack, error: LoadHangs) -> None:
    """Run `undo` once the hanging execution has ended, if ever: closing what executes isn't safe."""
    error.ended.add_done_callback(lambda _: undo.close())
    for instance in instances:
        if isinstance(instance, Abandonable):
            instance.abandon()


def _tried(config: pb.ModelConfig, opened: OpenModel, supervise: Supervise) -> Trial:
    """The model's own spec, tried out if the configuration doesn't say what the first dimensions are, or if what it
    says contradicts the model. Of fixed ones, only `max_batch_size` says that they are a batch axis."""
    is_fixed = fixed_rows(config, opened.spec) > 1
    own = freed(config, opened.spec) if is_fixed else opened.spec
    batches = config.max_batch_size > 0 or (config.HasField("dynamic_batching") and not is_fixed)
    says = config.max_batch_size or batches or config.input or config.output
    clients = of_clients(config, own, batched=True)
    agreed = says and (not batches or can_batch(config, clients)) and not doubts_outputs(config, own)
    if agreed or not isinstance(opened, Triable):
        return Trial(opened.spec)
    tried = opened.try_rows(supervise)
    return replace(tried, why_not="") if says else tried


def _plan(
    config: pb.ModelConfig,
    opened: OpenModel,
    tried: Trial,
    defaults: LoadDefaults,
    batching: BatchDefaults | None,
    initial_data: InitialData,
) -> ServingPlan:
    """How to serve it; not batched if the trial spoke against that. Logs what the user may not expect: that, or that
    requests share batches of a model that rounds by all rows of a batch."""
    rounds_by = opened.rounds_by if isinstance(opened, Rounding) else ""
    planned = partial(
        plan,
        config,
        tried.spec,
        execution_limit_ns=defaults.execution_limit_ns,
        confirmed_rows=tried.fixed_rows,
        initial_data=initial_data,
        for_triton=isinstance(opened, CompletesConfig),
        prompts=opened.together if isinstance(opened, Generates) else 0,
    )
    try:
        served = planned(batching, defaults.max_batch_rows)
    except ConfigError as error:
        if fixed_rows(config, tried.spec) > 1 and tried.why_not:  # so batch settings are refused
            raise ConfigError(f"{error}; {tried.why_not}") from None
        raise
    if tried.why_not and served.max_batch_rows:
        because = f" ({rounds_by} scales by the largest number in a batch)" if rounds_by else ""
        text = "model '%s' isn't batched: %s%s; to batch it anyway, set max_batch_size in a config.pbtxt"
        _log.warning(text, config.name, tried.why_not, because)
        return planned(batching and replace(batching, max_batch_rows=0), 0)
    if rounds_by and served.max_batch_rows > 1 and served.policy.max_batch_requests != 1:
        text = (
            "model '%s': %s scales by the largest number in a batch, so answers depend a little on the other requests "
            "in it; if that matters, quantize the model statically, or give it a config.pbtxt with the names of its "
            "inputs and outputs and no dynamic_batching: then each request is executed by itself"
        )
        _log.warning(text, config.name, rounds_by)
    return served


def _model_file(folder: ModelFolder, version: int, config: pb.ModelConfig) -> Path:
    if folder.file is not None:
        return folder.file
    default, place = (
        PYTHON_MODEL_FILE if backend_name(config) == PYTHON else DEFAULT_MODEL_FILE,
        folder.versions[version],
    )
    if default == DEFAULT_MODEL_FILE and not exists(place / default) and exists(place / MERGED_DECODER_FILE):
        default = MERGED_DECODER_FILE
    name = Path(config.default_model_filename or default)
    if name.is_absolute() or ".." in name.parts:
        raise ConfigError(f"default_model_filename: expected a file inside the version folder, got '{name}'")
    path = place / name
    try:
        is_file(path)
    except OSError as error:
        raise ConfigError(f"default_model_filename: {path}: {error.strerror}") from None
    return path


def _op_libraries(folder: ModelFolder, version: int, config: pb.ModelConfig) -> tuple[Path, ...]:
    """The libraries of operators that the configuration names, from the version's folder or else the model's."""

    def find(name: str) -> Path:
        for place in (folder.versions[version], folder.path):
            with suppress(OSError):
                if (file := open_inside(place, name)) is not None:
                    file.close()
                    return place / name
        raise ConfigError(
            "model_operations.op_library_filename: expected a file inside the version's or the model's folder, "
            f"got '{name}'"
        )

    return tuple(map(find, config.model_operations.op_library_filename))
