"""From a folder on disk to instances that can execute.

Lives here: the blocking part of a load, run on a worker thread. Must not: touch the event loop or what is being served.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from backends.base import Backend, ModelInstance, OpenModel
from protos import model_config_pb2 as pb
from server.batch_policy import BatchDefaults
from server.errors import ConfigError
from server.layout import DEFAULT_MODEL_FILE, ModelFolder
from server.model_config import (
    ServingPlan,
    backend_name,
    check_supported,
    instance_groups,
    model_source,
    parse_config,
    plan,
)
from server.warmup import warm_up

__all__ = ["LoadedVersion", "load_model"]

_log = logging.getLogger("paceline.server.loader")


@dataclass(frozen=True, slots=True)
class LoadedVersion:
    """One version of a model, warm and ready to execute, which took `load_ns`."""

    name: str
    version: int
    plan: ServingPlan
    opened: OpenModel
    instances: tuple[ModelInstance, ...]
    load_ns: int = 0

    def close(self) -> None:
        """Give everything back; nothing may be executing."""
        for instance in self.instances:
            instance.close()
        self.opened.close()


def load_model(
    folder: ModelFolder,
    backend_of: Callable[[str], Backend],
    defaults: BatchDefaults | None = None,
    *,
    override: pb.ModelConfig | None = None,
    tell_versions: Callable[[list[int]], None] | None = None,
) -> list[LoadedVersion]:
    """Load the versions of a model that its policy asks for: all of them, or an error and none.

    `defaults` say how it batches if it has no configuration; `override` is one that takes the place of the folder's.
    `tell_versions` is called, on this thread, with what will be loaded as soon as that is known.

    Blocks. Raises ConfigError or LoadError.
    """
    config = _configuration(folder, override)
    versions = wanted_versions(config, folder)
    if tell_versions is not None:
        tell_versions(versions)
    backend = backend_of(backend_name(config))
    if override is not None or folder.config:
        defaults = None
    loaded: list[LoadedVersion] = []
    with ExitStack() as undo:
        for version in versions:
            one = _load_version(folder, version, config, backend, defaults)
            undo.callback(one.close)
            loaded.append(one)
        undo.pop_all()
    return loaded


def _configuration(folder: ModelFolder, override: pb.ModelConfig | None) -> pb.ModelConfig:
    """What the model is to be loaded with, its name filled in. Raises ConfigError for what can't be loaded at all."""
    if folder.problem:
        raise ConfigError(folder.problem)
    if folder.rivals:
        raise ConfigError(f"model appears in two or more repositories: {', '.join(map(str, folder.rivals))}")
    for stray in folder.strays:
        _log.warning("%s is no version folder: expected a folder named by a number without leading zeros", stray)
    config = pb.ModelConfig()
    if override is not None:
        config.CopyFrom(override)
    elif folder.config:
        config = parse_config(folder.config)
    if config.name not in ("", folder.name):
        raise ConfigError(f"name: expected '{folder.name}', the name of its folder, got '{config.name}'")
    config.name = folder.name
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
    folder: ModelFolder, version: int, config: pb.ModelConfig, backend: Backend, defaults: BatchDefaults | None
) -> LoadedVersion:
    began_ns = time.monotonic_ns()
    devices = backend.devices(instance_groups(config))
    instances: list[ModelInstance] = []
    with ExitStack() as undo:
        opened = backend.open(model_source(config, folder.name, _model_file(folder, version, config)), devices[0])
        undo.callback(opened.close)
        served = plan(config, opened.spec, defaults)
        for device in devices:
            instance = opened.instance(served.spec, device)
            undo.callback(instance.close)
            instances.append(instance)
        warm_up(config, served, folder.path, instances)
        undo.pop_all()
    took_ns = time.monotonic_ns() - began_ns
    _log.info("model '%s' version %d loaded in %.2f s: %s", folder.name, version, took_ns / 1e9, _say(served))
    return LoadedVersion(folder.name, version, served, opened, tuple(instances), took_ns)


def _model_file(folder: ModelFolder, version: int, config: pb.ModelConfig) -> Path:
    if folder.file is not None:
        return folder.file
    name = Path(config.default_model_filename or DEFAULT_MODEL_FILE)
    if name.is_absolute() or ".." in name.parts:
        raise ConfigError(f"default_model_filename: expected a file inside the version folder, got '{name}'")
    return folder.versions[version] / name


def _say(served: ServingPlan) -> str:
    policy = served.policy
    if not served.max_batch_rows:
        return "no batch axis, requests run one by one"
    if policy.max_batch_requests == 1:
        return f"up to {served.max_batch_rows} rows a request, not batched: no dynamic_batching in its configuration"
    preferred = f", preferred {sorted(policy.preferred_batch_rows)}" if policy.preferred_batch_rows else ""
    return f"batches of up to {policy.max_batch_rows} rows{preferred}, delay {policy.max_queue_delay_ns // 1_000} us"
