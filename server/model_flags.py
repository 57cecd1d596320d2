"""The flags about models and batches, which all commands that load models share, and the settings made of them.

Lives here: where models are, how they are loaded and batched. Must not: when they are loaded, or what they are asked
(`server.cli`).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import click

from paceline.server.cpus import usable_cpus
from paceline.server.flags import AMOUNT, COUNT, NATURAL, Decorator, Given, Section, flag, usage_errors
from paceline.server.model_path import ModelPath, models_to_serve
from paceline.server.models.defaults import BackendConfig, BatchDefaults, parse_backend_config, parse_cache_config

_log = logging.getLogger("paceline.server")

MODEL_PATH = ModelPath()
_DELAY = "dynamic_batching.max_queue_delay_microseconds"
_BATCHING = {
    "max_batch_size": "max_batch_size",
    "max_queue_delay_microseconds": _DELAY,
    "max_latency": _DELAY,
    "max_batch_time": _DELAY,
    "timeout": "dynamic_batching.default_queue_policy.default_timeout_microseconds",
}
"""Flags for models without a configuration, and the fields that say the same in one."""
_DELAYS_NS = {"max_queue_delay_microseconds": 10**3, "max_latency": 10**6, "max_batch_time": 10**9}
_MAX_US = 10**12
"""A million seconds, the maximum of `AMOUNT`."""
_MAX_ROWS = 2**31 - 1
"""The maximum of `max_batch_size` in a model's configuration."""


_models, _batching = partial(flag, Section.MODELS), partial(flag, Section.BATCHING)

PATH_FLAGS: Sequence[Decorator] = (
    _models("model-repository", (), "Another PATH, under Triton's name for it.", multiple=True, also="--model-store",
        type=MODEL_PATH),
    _models("model-name", "", "Name of a single model that isn't in a repository.", also="--model_name"),
)  # fmt: skip

LOAD_FLAGS: Sequence[Decorator] = (
    _models("model-load-thread-count", 4, "Models to load at the same time.", type=COUNT),
    _models("model-load-retry-count", 0, "How often to retry a load that fails.", type=NATURAL),
    _models("model-config-name", "",
        "Read configs/NAME.pbtxt in a model's folder, if it exists, as its configuration."),
    _models("disable-auto-complete-config", False, "Serve only models whose configuration spells out their tensors.",
        is_flag=True),
    _models("backend-config", (), "Setting of a backend, under Triton's name for it.", multiple=True,
        metavar="BACKEND,KEY=VALUE"),
    _models("cache-config", (), "Size of the response cache, for models that ask for one.", multiple=True,
        metavar="local,size=BYTES"),
    _models("allow-python-models", False, "Whether models may be Python code, which runs in separate processes."),
    _models("allow-op-libraries", False, "Whether models may bring operators, whose code runs in the server."),
    _batching("max-batch-size", None, "Largest batch, in rows; by default 32. *", type=click.IntRange(1, _MAX_ROWS),
        also="--max-batchsize"),
    _batching("max-queue-delay-microseconds", None, "Longest wait for more requests. *",
        type=click.IntRange(0, _MAX_US)),
    _batching("max-latency", None, "The same in milliseconds, as in KServe's batcher. *", type=AMOUNT),
    _batching("max-batch-time", None, "The same in seconds, as in MLServer. *", type=AMOUNT),
    _batching("timeout", None, "Longest time in the queue, in seconds. *", type=AMOUNT),
    _batching("execution-timeout-secs", 0.0, "Longest execution before its instance is replaced; 0: no limit.",
        type=AMOUNT),
)  # fmt: skip


def model_paths(paths: Sequence[Path], given: Given) -> Given:
    """Where the models are, as fields of Settings. Raises click.UsageError if nothing says that."""
    with usage_errors():
        served, name = models_to_serve((*paths, *given["model_repository"]), given["model_name"], os.environ)
    if not served:
        raise click.UsageError("expected at least one PATH: a model repository, a model's folder or a .onnx file")
    return {"paths": served, "model_name": name}


def load_settings(given: Given) -> Given:
    """Fields of Settings, from the flags' values. Raises click.UsageError."""
    if Path(given["model_config_name"]).name != given["model_config_name"]:
        raise click.UsageError(f"--model-config-name: expected the name of a file, got '{given['model_config_name']}'")
    with usage_errors("--backend-config"):
        backends = parse_backend_config(given["backend_config"])
    with usage_errors("--cache-config"):
        cache_bytes = parse_cache_config(given["cache_config"])
    return {
        "cache_bytes": cache_bytes,
        "backend_config": backends,
        "auto_complete": not given["disable_auto_complete_config"],
        "batching": _batch_defaults(backends, given),
    }


def within_cpus(given: BackendConfig) -> BackendConfig:
    """Sessions that nobody has given a number of threads have no more than there are CPUs. On a whole machine ONNX
    Runtime decides: it knows which cores are virtual."""
    cpus = usable_cpus()
    if not cpus.limited_by:
        return given
    threads = given.intra_op_threads or cpus.count
    _log.info("CPUs: %d (%s); intra_op_thread_count is %d by default", cpus.count, cpus.limited_by, threads)
    return replace(given, intra_op_threads=threads)


def _batch_defaults(backends: BackendConfig, given: Given) -> BatchDefaults:
    among = given["max_batch_size"], backends.max_batch_rows, BatchDefaults().max_batch_rows
    rows = next(value for value in among if value is not None)
    # One delay, in whichever of three units it was given.
    delays_ns = [given[name] * unit_ns for name, unit_ns in _DELAYS_NS.items() if given[name] is not None]
    if len(delays_ns) > 1:
        raise click.UsageError(
            "expected one of --max-queue-delay-microseconds, --max-latency and --max-batch-time, got several"
        )
    flags = [(f"--{name.replace('_', '-')}", field) for name, field in _BATCHING.items() if given[name] is not None]
    return BatchDefaults(rows, int(sum(delays_ns)), int((given["timeout"] or 0) * 1e9), tuple(flags))
