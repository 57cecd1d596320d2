"""Fuzz targets: a model's configuration, from `config.pbtxt` and from a load request, up to a model that serves.

Lives here: running the server's own steps, in their order. Must not: judge memory or time.
"""

from __future__ import annotations

import asyncio
import math
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from paceline.backends.errors import LoadError
from paceline.backends.registry import backend
from paceline.protos import model_config_pb2 as config_pb
from paceline.protos.inference_pb2 import RepositoryModelLoadRequest
from paceline.server.errors import ConfigError
from paceline.server.models.config_text import parse_config
from paceline.server.models.layout import ModelFolder, model_folder
from paceline.server.models.load_request import checked_name, parse_load_parameters, scratch_folder
from paceline.server.models.loader import load_model
from paceline.server.models.served_model import ServedModel
from paceline.server.telemetry.metrics import Metrics
from tests.fuzz.judging import Finding, Target, refused

__all__ = ["targets"]

_MANY = 64
_MAX_INSTANCES = 1024
_NOT_TO_BE_HAD = 2**31
"""More elements than any warm-up takes."""


def targets() -> list[Target]:
    """All targets of this module, ready to run."""
    folder = Path(tempfile.mkdtemp(prefix="paceline-fuzz-"))
    loop = asyncio.new_event_loop()
    return [
        Target("config", _config(folder, loop), fixed_bytes=4_000_000, times=400),
        Target("load", _load(folder, loop), fixed_bytes=4_000_000, times=400),
    ]


def _config(parent: Path, loop: asyncio.AbstractEventLoop) -> Callable[[bytes], None]:
    """The bytes are a `config.pbtxt`."""
    folder = parent / "m"
    (folder / "1").mkdir(parents=True)
    path = folder / "config.pbtxt"

    def run(data: bytes) -> None:
        path.write_bytes(data)
        _serve(model_folder("m", folder), None, loop)

    return run


def _load(parent: Path, loop: asyncio.AbstractEventLoop) -> Callable[[bytes], None]:
    """The bytes are a load request."""
    scratches = parent / "scratch"
    scratches.mkdir()

    def run(data: bytes) -> None:
        try:
            request = RepositoryModelLoadRequest.FromString(data)
        except Exception:  # noqa: BLE001 - the service answers what protobuf refuses before any of this
            return
        before = os.environ.get("TMPDIR", "")
        os.environ["TMPDIR"] = str(scratches)
        try:
            name = checked_name(request.model_name)
            override = parse_load_parameters(name, request.parameters)
            if override is not None:
                with scratch_folder(name, override.files) as folder:
                    _serve(folder, override.config, loop)
        except Exception as error:  # noqa: BLE001 - `refused` tells them apart
            refused(error)
        finally:
            os.environ["TMPDIR"] = before
        if list(scratches.iterdir()) or {one.name for one in parent.iterdir()} - {"m", "scratch"}:
            raise Finding("files lie where none should")

    return run


def _serve(folder: ModelFolder, override: config_pb.ModelConfig | None, loop: asyncio.AbstractEventLoop) -> None:
    """Load, start and stop it, and load it again with the configuration that it reports.

    The size of warm-up batches, that of tensors and, up to the allowed number, the count of instances are the author's
    choice, and nothing to hold against the loader.
    """
    try:
        config = override or (parse_config(folder.config) if folder.config else config_pb.ModelConfig())
    except ConfigError:
        return
    if _asks_for_much(config):
        return
    try:
        loaded = load_model(folder, backend, override=override)
    except (ConfigError, LoadError):
        return
    first = loaded[0]
    loop.run_until_complete(_start_and_stop([ServedModel(one, metrics) for one in loaded for metrics in [Metrics()]]))
    (again, *others) = load_model(folder, backend, override=first.config)
    for one in (again, *others):
        one.close()
    if again.version == first.version and again.plan != first.plan:
        raise Finding(f"served as {first.plan}, and given back as {again.plan}")


def _asks_for_much(config: config_pb.ModelConfig) -> bool:
    sizes = [tuple(one.dims) for one in (*config.input, *config.output)]
    for sample in config.model_warmup:
        if sample.batch_size > _MANY:
            return True
        sizes += [tuple(one.dims) for one in sample.inputs.values()]
    if _MANY < sum(max(1, one.count) * max(1, len(one.gpus)) for one in config.instance_group) <= _MAX_INSTANCES:
        return True
    delays = ("execute_delay_ms", "paceline.execute_delay_per_row_us")
    if any(config.parameters[key].string_value not in ("", "0") for key in delays if key in config.parameters):
        return True
    return any(_MANY**2 < abs(math.prod(size)) < _NOT_TO_BE_HAD for size in sizes)


async def _start_and_stop(models: list[ServedModel]) -> None:
    for model in models:
        model.start()
        await model.stop()
