"""From a folder on disk to instances that can execute.

Lives here: the blocking part of a load, run on a worker thread. Must not: touch the event loop or what is being served.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from paceline.backends.base import (
    Abandonable,
    Backend,
    InstanceGroup,
    ModelInstance,
    ModelSource,
    OpenModel,
    Rounding,
    Supervise,
    Triable,
    Trial,
)
from paceline.backends.onnx.options import OWN_PROCESS
from paceline.backends.opening import open_inside
from paceline.backends.paths import is_file
from paceline.backends.remote import RemoteInstance, RemoteModel
from paceline.protos import model_config_pb2 as pb
from paceline.server.codec.classification import Labels, read_labels
from paceline.server.errors import ConfigError, LoadHangs
from paceline.server.models.batch_policy import BatchDefaults, limit_of
from paceline.server.models.effective_config import effective_config
from paceline.server.models.layout import DEFAULT_MODEL_FILE, PYTHON_MODEL_FILE, ModelFolder
from paceline.server.models.model_config import (
    ServingPlan,
    backend_name,
    check_supported,
    ignored_settings,
    instance_groups,
    is_complete,
    model_source,
    parse_config,
    plan,
)
from paceline.server.models.model_record import DUPLICATE_NAME
from paceline.server.models.python_models import PYTHON, check_python_allowed, is_python
from paceline.server.models.tensor_config import can_batch, doubts_outputs, why_no_batch_axis, without_datatype
from paceline.server.models.warmup import Supervisor, WarmUp

__all__ = ["LoadDefaults", "LoadedVersion", "load_model"]

_log = logging.getLogger("paceline.server.loader")


@dataclass(frozen=True, slots=True)
class LoadDefaults:
    """What flags set for models that don't set it themselves.

    `batching` is for models without any configuration. `max_batch_rows` is for those whose configuration leaves
    `max_batch_size` to the model; `parameters` are defaults for the configuration's own. Without `auto_complete`, a
    configuration has to spell out its tensors; without `allow_op_libraries`, models can't bring libraries of operators,
    and without `allow_python_models`, none may be Python code. `execution_limit_ns` limits executions of models that
    set no limit; 0: none.
    """

    batching: BatchDefaults = field(default_factory=BatchDefaults)
    max_batch_rows: int = BatchDefaults().max_batch_rows
    parameters: Mapping[str, str] = field(default_factory=dict)
    auto_complete: bool = True
    allow_op_libraries: bool = False
    execution_limit_ns: int = 0
    allow_python_models: bool = False


@dataclass(frozen=True, slots=True)
class LoadedVersion:
    """One version of a model, warm and ready to execute; loading it took `load_ns`. `config` is its configuration with
    nothing left open; nobody may change it. `labels` are the names of the classes of its outputs. `warm_up` is for
    instances that replace one of these; None if they aren't warmed up.

    For a model that another server executes, `version` is that server's name for it, "" for none."""

    name: str
    version: int | str
    config: pb.ModelConfig
    plan: ServingPlan
    labels: Labels
    opened: OpenModel | RemoteModel
    instances: tuple[ModelInstance | RemoteInstance, ...]
    warm_up: WarmUp | None = None
    load_ns: int = 0

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
) -> list[LoadedVersion]:
    """Load the versions of a model that its policy asks for: all of them, or an error and none.

    `override` replaces the folder's configuration. `tell_versions` is called, on this thread, with the versions that
    will be loaded, as soon as they are known.

    Blocks. Raises ConfigError or LoadError, or LoadHangs if an execution takes longer than allowed.
    """
    defaults = defaults or LoadDefaults()
    config = _configuration(folder, override)
    _check_allowed(config, defaults, from_client=override is not None)
    if backend_name(config) == PYTHON:
        check_python_allowed(config, folder, allowed=defaults.allow_python_models, from_client=override is not None)
    versions = wanted_versions(config, folder)
    if tell_versions is not None:
        tell_versions(versions)
    backend = backend_of(backend_name(config))
    batching = None if override is not None or folder.config else defaults.batching
    _tell_ignored(config, () if batching else defaults.batching.flags)
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


def _check_allowed(config: pb.ModelConfig, defaults: LoadDefaults, *, from_client: bool) -> None:
    """Raise ConfigError for what the flags don't allow, or what a configuration `from_client` may not have."""
    if not (defaults.auto_complete or is_complete(config)):
        raise ConfigError("expected input and output in its configuration, as --disable-auto-complete-config is given")
    if not defaults.auto_complete and (names := without_datatype(config)):
        raise ConfigError(f"'{names[0]}': expected a data_type, as --disable-auto-complete-config is given")
    if from_client and (setting := _writes(config)):
        raise ConfigError(f"{setting}: clients may not choose where the server writes files; set it in the repository")
    if not config.model_operations.op_library_filename:
        return
    if from_client:
        raise ConfigError(
            "model_operations.op_library_filename: clients may not upload code; put it into the repository"
        )
    if not defaults.allow_op_libraries:
        raise ConfigError(
            "model_operations.op_library_filename: the library's code would run in the server; start the server with "
            "--allow-op-libraries true if you trust everyone who can write to the model repository"
        )


def _writes(config: pb.ModelConfig) -> str:
    """The first parameter of an execution accelerator that makes the server write files in places of its choice."""
    accelerators = config.optimization.execution_accelerators
    for one in (*accelerators.gpu_execution_accelerator, *accelerators.cpu_execution_accelerator):
        for key in sorted(one.parameters):
            if key.endswith(("_path", "_dir")) or "_dump_" in key:
                return f"execution accelerator '{one.name}': {key}"
    return ""


def _configuration(folder: ModelFolder, override: pb.ModelConfig | None) -> pb.ModelConfig:
    """The configuration to load the model with, its name filled in. Raises ConfigError for what can't be loaded."""
    if folder.problem:
        raise ConfigError(folder.problem)
    if folder.duplicates:
        raise ConfigError(f"{DUPLICATE_NAME}: {', '.join(map(str, folder.duplicates))}")
    for stray in folder.strays:
        _log.warning("%s is ignored: expected a version folder, named by a number without leading zeros", stray)
    config = pb.ModelConfig()
    if override is not None:
        config.CopyFrom(override)
    elif folder.config:
        config = parse_config(folder.config)
    if config.name not in ("", folder.name) and not folder.renamed:
        raise ConfigError(f"name: expected '{folder.name}', the name of its folder, got '{config.name}'")
    config.name = folder.name
    if is_python(config, folder):
        config.backend = PYTHON
    check_supported(config)
    return config


def wanted_versions(config: pb.ModelConfig, folder: ModelFolder) -> list[int]:
    """The versions that `version_policy` picks from those on disk; by default the latest one."""
    policy, present = config.version_policy, sorted(folder.versions)
    if not present:
        raise ConfigError(f"no version to load: expected folders named by version numbers in {folder.path}, found none")
    if policy.HasField("all"):
        return present
    if not policy.HasField("specific"):
        return present[-max(1, policy.latest.num_versions) :]
    asked = sorted(set(policy.specific.versions))
    wanted = [version for version in asked if version in folder.versions]
    if not wanted:
        raise ConfigError(f"no version to load: version_policy asks for {asked}, found {present} in {folder.path}")
    for version in asked:
        if version not in folder.versions:
            _log.warning("model '%s': version %d of its version_policy is not in %s", folder.name, version, folder.path)
    return wanted


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
        source = model_source(config, file, defaults.parameters, libraries, rows)
        if folder.files is not None:
            source = replace(source, files=folder.files)
        opened = backend.open(source, devices[0])
        undo.callback(opened.close)
        supervise = Supervisor(limit_of(config, defaults.execution_limit_ns))
        undo.callback(supervise.close)
        try:
            tried = _tried(config, opened, supervise)
            if tried.deadly and OWN_PROCESS not in source.parameters:
                opened.close()
                config, source = _in_own_process(config, source)
                opened = backend.open(source, devices[0])
                undo.callback(opened.close)
            served = _plan(config, tried, defaults, batching, _rounds_by(opened))
            _tell_if_rounded(opened, folder.name, served)
            warm_up = WarmUp(config, served, folder.path)
            for device in devices:
                instance = opened.instance(served.spec, device)
                undo.callback(instance.close)
                instances.append(instance)
            warm_up.run(instances, supervise)
        except LoadHangs as error:
            _give_up(instances, undo.pop_all(), error)
            raise
        supervise.close()
        whole = effective_config(config, served, platform=opened.platform, file=file.name, groups=groups)
        undo.pop_all()
    took_ns = time.monotonic_ns() - began_ns
    text = _say(served, config, tried)
    _log.info("model '%s' version %d loaded in %.2f s: %s", folder.name, version, took_ns / 1e9, text)
    return LoadedVersion(folder.name, version, whole, served, labels, opened, tuple(instances), warm_up, took_ns)


def _give_up(instances: Sequence[ModelInstance], undo: ExitStack, error: LoadHangs) -> None:
    """Run `undo` once the hanging execution has ended, if ever: closing what executes isn't safe."""
    error.ended.add_done_callback(lambda _: undo.close())
    for instance in instances:
        if isinstance(instance, Abandonable):
            instance.abandon()


def _tried(config: pb.ModelConfig, opened: OpenModel, supervise: Supervise) -> Trial:
    """The model's own spec, tried out if the configuration doesn't say what the first dimensions are, or if what it
    says contradicts the model."""
    batches = config.max_batch_size > 0 or config.HasField("dynamic_batching")
    says = config.max_batch_size or batches or config.input or config.output
    agreed = says and (not batches or can_batch(config, opened.spec)) and not doubts_outputs(config, opened.spec)
    if agreed or not isinstance(opened, Triable):
        return Trial(opened.spec)
    tried = opened.try_rows(supervise)
    return replace(tried, why_not="") if says else tried


def _in_own_process(config: pb.ModelConfig, source: ModelSource) -> tuple[pb.ModelConfig, ModelSource]:
    """The same, but in a process of its own: what callers send may end the process, as the trial did."""
    text = "model '%s' runs in its own process, because it crashed its trial process"
    _log.warning(text, config.name)
    changed = pb.ModelConfig()
    changed.CopyFrom(config)
    changed.parameters[OWN_PROCESS].string_value = "true"
    return changed, replace(source, parameters={**source.parameters, OWN_PROCESS: "true"})


def _plan(
    config: pb.ModelConfig, tried: Trial, defaults: LoadDefaults, batching: BatchDefaults | None, rounds_by: str
) -> ServingPlan:
    limit_ns = defaults.execution_limit_ns
    served = plan(config, tried.spec, batching, defaults.max_batch_rows, limit_ns)
    if not (tried.why_not and served.max_batch_rows):
        return served
    _log.warning(
        "model '%s' isn't batched: %s%s; to batch it anyway, set max_batch_size in a config.pbtxt",
        config.name,
        tried.why_not,
        f" ({rounds_by} scales by the largest number in a batch)" if rounds_by else "",
    )
    return plan(config, tried.spec, batching and replace(batching, max_batch_rows=0), 0, limit_ns)


def _tell_if_rounded(opened: OpenModel, name: str, served: ServingPlan) -> None:
    """Log a warning if requests share batches of a model that rounds by all rows of a batch."""
    shares = served.max_batch_rows > 1 and served.policy.max_batch_requests != 1
    if shares and _rounds_by(opened):
        text = (
            "model '%s': %s scales by the largest number in a batch, so answers depend a little on the other requests "
            "in it; if that matters, quantize the model statically, or give it a config.pbtxt with input and output "
            "and without dynamic_batching"
        )
        _log.warning(text, name, _rounds_by(opened))


def _rounds_by(opened: OpenModel) -> str:
    return opened.rounds_by if isinstance(opened, Rounding) else ""


def _model_file(folder: ModelFolder, version: int, config: pb.ModelConfig) -> Path:
    if folder.file is not None:
        return folder.file
    default = PYTHON_MODEL_FILE if backend_name(config) == PYTHON else DEFAULT_MODEL_FILE
    name = Path(config.default_model_filename or default)
    if name.is_absolute() or ".." in name.parts:
        raise ConfigError(f"default_model_filename: expected a file inside the version folder, got '{name}'")
    path = folder.versions[version] / name
    try:
        is_file(path)
    except OSError as error:
        raise ConfigError(f"default_model_filename: {path}: {error.strerror}") from None
    return path


def _op_libraries(folder: ModelFolder, version: int, config: pb.ModelConfig) -> tuple[Path, ...]:
    """The libraries of operators that the configuration names, from the version's folder or else the model's."""
    found = []
    for name in config.model_operations.op_library_filename:
        there = [place / name for place in (folder.versions[version], folder.path) if _is_inside(place, name)]
        if not there:
            raise ConfigError(
                "model_operations.op_library_filename: expected a file inside the version's or the model's folder, "
                f"got '{name}'"
            )
        found.append(there[0])
    return tuple(found)


def _is_inside(place: Path, name: str) -> bool:
    try:
        file = open_inside(place, name)
    except OSError:
        return False
    if file is None:
        return False
    file.close()
    return True


def _say(served: ServingPlan, config: pb.ModelConfig, tried: Trial) -> str:
    policy = served.policy
    if not served.max_batch_rows:
        return f"no batch axis, requests run one by one ({_why_not_batched(config, tried)})"
    if policy.max_batch_requests == 1:
        return f"up to {served.max_batch_rows} rows a request, not batched: no dynamic_batching in its configuration"
    preferred = f", preferred {sorted(policy.preferred_batch_rows)}" if policy.preferred_batch_rows else ""
    return f"batches of up to {policy.max_batch_rows} rows{preferred}, delay {policy.max_queue_delay_ns // 1_000} us"


def _why_not_batched(config: pb.ModelConfig, tried: Trial) -> str:
    if config.input and config.output:
        return "its configuration has input and output, and no max_batch_size"
    return why_no_batch_axis(config, tried.spec) or tried.why_not or "the default for max_batch_size is 0"
