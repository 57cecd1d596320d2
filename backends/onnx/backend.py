"""Models of ONNX Runtime.

Lives here: `OnnxBackend`, from groups to devices, and `OnnxModel`, from a file to sessions and instances. Must not: how
sessions are opened (`sessions`), how batches run (`instance`).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import onnxruntime as ort  # type: ignore[import-untyped,unused-ignore]

from paceline.backends.base import Device, DeviceKind, GroupKind, InstanceGroup, ModelSource, on_cpu, on_gpus
from paceline.backends.cuda.accelerator import CudaAccelerator, accelerator_of
from paceline.backends.cuda.driver import count_gpus
from paceline.backends.cuda.long_calls import captures
from paceline.backends.device_blocks import BlockPool
from paceline.backends.errors import DeviceError, DriverFailed, LoadError, NoDriver
from paceline.backends.onnx.decoder import DecoderModel, decoder_of
from paceline.backends.onnx.device_steps import DeviceSteps
from paceline.backends.onnx.instance import OnnxInstance
from paceline.backends.onnx.model_files import Stamp, files_changed
from paceline.backends.onnx.options import OnnxOptions, parse_options, without_graphs
from paceline.backends.onnx.sessions import CUDA, OpenSession, open_session, probe_cuda
from paceline.backends.onnx.shared import Shared, why_not_staged
from paceline.backends.onnx.spec import check_served, find_spec
from paceline.backends.onnx.staged import StagedInstance
from paceline.backends.own_process.served import OwnProcessOnnxModel
from paceline.backends.own_process.session import Job, OwnProcessSession, Runs, TriedModel
from paceline.backends.paths import is_file, is_folder
from paceline.backends.spec import ModelSpec

Accelerators = Callable[[Device], CudaAccelerator | None]

_MAX_NAMES = 5
_MAX_APART = 2**29
"""Bytes of a model's files. Their weights are in memory twice while it is tried in a separate process:
for a larger one there may be memory for one copy only."""

_log = logging.getLogger("paceline.backends.onnx")


class OnnxBackend:
    """`Backend` for `.onnx` files.

    `count_gpus` returns how many GPUs there are or raises LoadError, `available_providers` returns what onnxruntime has
    built in, `shared_threads` tells whether `share_threads` was called, `accelerators` returns what stages a device's
    batches.
    """

    def __init__(
        self,
        count_gpus: Callable[[], int] = count_gpus,
        available_providers: Callable[[], Sequence[str]] = ort.get_available_providers,
        shared_threads: bool = False,
        accelerators: Accelerators | None = None,
    ) -> None:
        self._count_gpus = count_gpus
        self._available_providers = available_providers
        self._shared_threads = shared_threads
        self._accelerators = accelerators or accelerator_of
        self._logged: set[tuple[GroupKind, str]] = set()

    def devices(self, groups: Sequence[InstanceGroup]) -> tuple[Device, ...]:
        """One device per instance; blocks for about a second when it first asks the CUDA driver for GPUs.

        KIND_GPU gets GPUs or is refused; KIND_AUTO and KIND_MODEL take the CPU if no GPU is usable, and log that.
        """
        return tuple(device for group in groups or (InstanceGroup(),) for device in self._place(group))

    def open(self, source: ModelSource, device: Device) -> OnnxModel | DecoderModel | OwnProcessOnnxModel:
        options = replace(parse_options(source), shared_threads=self._shared_threads)
        if options.own_process:
            return OwnProcessOnnxModel(
                Job(source.name, _model_file(source), options, device, source.declared), source.files
            )

        def open_file(path: Path, source: ModelSource) -> OnnxModel:
            return OnnxModel(source, path, options, device, self._accelerators)

        model = open_file(_model_file(source), source)
        try:
            open_beside = partial(open_file, source=replace(source, declared=None))
            return decoder_of(source, model, open_beside, device) or model
        except BaseException:
            model.close()
            raise

    def _place(self, group: InstanceGroup) -> list[Device]:
        if group.kind is GroupKind.CPU:
            return on_cpu(group)
        try:
            gpus = self._count_gpus()
            available = self._available_providers()
            if CUDA not in available:
                raise LoadError(
                    f"this onnxruntime {ort.__version__} has no {CUDA}, only {', '.join(available)}; "
                    "the package onnxruntime-gpu has it"
                )
        except LoadError as reason:
            if group.kind is GroupKind.GPU:
                raise LoadError(
                    f"instance_group KIND_GPU: {reason}; KIND_CPU and KIND_AUTO don't need a GPU"
                ) from reason
            if (group.kind, str(reason)) not in self._logged:  # it is the same for every model
                self._logged.add((group.kind, str(reason)))
                # There may be a GPU: in a box whose fabric manager isn't running, for instance, none is usable.
                level = logging.WARNING if isinstance(reason, DriverFailed) else logging.INFO
                why = "no GPU" if isinstance(reason, NoDriver) else reason
                _log.log(level, "%s instances run on the CPU: %s", group.kind.value, why)
            return on_cpu(group)
        devices = on_gpus(group, gpus)
        if group.kind is GroupKind.GPU:
            return devices
        try:
            # During another model's warm-up, what this allocates would break its graph capture.
            if (accelerator := self._accelerators(devices[0])) is not None:
                accelerator.enter()
            with captures.synchronizing():
                probe_cuda(devices[0], OnnxOptions(shared_threads=self._shared_threads))
        except (DeviceError, LoadError) as reason:
            _log.warning("%s instances run on the CPU although there is a GPU: %s", group.kind.value, reason)
            return on_cpu(group)
        indices = dict.fromkeys(device.index for device in devices)
        _log.info("%s instances run on GPU %s", group.kind.value, ", ".join(map(str, indices)))
        return devices


class OnnxModel(TriedModel):
    """`OpenModel` of one ONNX file. `accelerators` returns what stages a device's batches, or None.

    CPU instances share one session: its Run is thread-safe, and a session per instance would hold the weights again and
    start another thread pool, all competing for the same cores. Each instance on an accelerator has its own session,
    because a session computes on one stream, where a second instance's kernels would only queue.
    """

    def __init__(
        self, source: ModelSource, path: Path, options: OnnxOptions, device: Device, accelerators: Accelerators
    ) -> None:
        self._name, self._path = source.name, path
        self._files, self._keeps_files = source.files, False
        self._accelerators = accelerators
        self._stamps: Mapping[str, Stamp] | None = None
        opened = self._opened(device, options)
        self._sessions = {device: opened}
        self._blocks: dict[int, BlockPool] = {}
        found = find_spec(source.name, opened.session, opened.facts, source.declared)
        super().__init__(source.name, found, options, device, on_gpu=device.kind is DeviceKind.GPU)
        self.operators = opened.facts.operators

    def instance(self, spec: ModelSpec, device: Device) -> OnnxInstance | StagedInstance:
        check_served(self._name, spec, self.spec)
        opened, options = self._session(device), self._options
        if opened.streams is None:
            return OnnxInstance(opened, spec, device, options)
        if reason := why_not_staged(opened, spec):
            _log.info("model '%s': ONNX Runtime copies its tensors itself, as %s", self._name, reason)
            return OnnxInstance(opened, spec, device, options)
        try:
            reopen = partial(self._opened, device, without_graphs(options))
            blocks = self._blocks_of(opened.streams.accelerator)
            return StagedInstance(Shared(self._name, opened, spec, device, options, reopen, blocks))
        except DeviceError as error:
            raise LoadError(f"model '{self._name}': {error}") from error

    def stepped(self, spec: ModelSpec, device: Device) -> OnnxInstance:
        """What runs it with arrays of any shapes; `spec` is some of its tensors. On a device all outputs but the first
        stay there, for later inputs."""
        return self._steps(self._session(device), spec, device)

    def tried(self, spec: ModelSpec, device: Device) -> OnnxInstance:
        """The same before there are instances, the first of which has the same session."""
        return self._steps(self._sessions[device], spec, device)

    def _steps(self, opened: OpenSession, spec: ModelSpec, device: Device) -> OnnxInstance:
        kind = OnnxInstance if opened.streams is None else DeviceSteps
        return kind(opened, spec, device, self._options)

    def close(self) -> None:
        self._sessions.clear()
        for pool in self._blocks.values():
            pool.close()
        if self._keeps_files:
            self._keeps_files = False
            self._files.release()

    @contextmanager
    def _trying(self, spec: ModelSpec) -> Iterator[Runs]:
        """A separate process, unless the model is on a GPU or large, or no process can be had."""
        ((device, session), *_), options, path = self._sessions.items(), self._options, self._path
        size_bytes = sum(size for size, _ in session.facts.stamps.values())
        with ExitStack() as stack:
            runs: Runs | None = None
            if device.kind is DeviceKind.CPU and session.streams is None and size_bytes <= _MAX_APART:
                try:
                    runs = stack.enter_context(OwnProcessSession(Job(self._name, path, options), spec))
                except LoadError as error:
                    _log.info(
                        "model '%s' is tried in the server's own process, as no other can be had: %s", self._name, error
                    )
            # If left open, the session and all its device memory would stay.
            yield runs or stack.enter_context(closing(OnnxInstance(session, spec, device, options)))

    def _blocks_of(self, accelerator: CudaAccelerator) -> BlockPool:
        """What all instances on its device keep beyond executions is in one pool, until the device is lost."""
        pool = self._blocks.get(accelerator.gpu)
        if pool is None or pool.is_lost:
            pool = self._blocks[accelerator.gpu] = BlockPool(accelerator)
        return pool

    def _session(self, device: Device) -> OpenSession:
        """The CPU's shared session; otherwise the one that the model was opened with, once, and a new one after
        that."""
        opened = self._sessions.pop(device, None) or self._opened(device, self._options)
        if opened.streams is None and device.kind is DeviceKind.CPU:
            self._sessions[device] = opened
        elif not self._keeps_files:
            # For the sessions of instances that replace others later.
            self._keeps_files = True
            self._files.keep()
        return opened

    def _opened(self, device: Device, options: OnnxOptions) -> OpenSession:
        """A new session. Blocks; raises LoadError, also if the files have changed since the first was opened."""
        try:
            accelerator = self._accelerators(device)
        except DeviceError as error:
            raise LoadError(
                f"model '{self._name}': can't open '{self._path}': onnxruntime couldn't use GPU {device.index}: {error}"
            ) from error
        with captures.synchronizing() if accelerator is not None else nullcontext():
            opened = open_session(self._name, self._path, options, device, accelerator)
        if self._stamps not in (None, opened.facts.stamps):
            raise files_changed(self._name)
        self._stamps = opened.facts.stamps
        return opened


def _model_file(source: ModelSource) -> Path:
    """The file to read: `source.path`, or `model.onnx` in it if that is a folder, as it is with external weights."""
    path = source.path / "model.onnx" if is_folder(source.path) else source.path
    if not is_file(path) and os.path.lexists(path):
        raise LoadError(f"model '{source.name}': expected a file, got something else or a dangling link: '{path}'")
    if not is_file(path):
        raise LoadError(f"model '{source.name}': no such file: '{path}'{_instead(path.parent)}")
    if path.stat().st_size == 0:
        raise LoadError(f"model '{source.name}': the file is empty: '{path}'")
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise LoadError(
            f"model '{source.name}': expected a path in UTF-8, as ONNX Runtime requires: '{path}'"
        ) from None
    return path


def _instead(folder: Path) -> str:
    """What lies where a model file should, for a user who has named it differently."""
    if not is_folder(folder):
        return ""
    names = sorted(entry.name for entry in folder.iterdir() if not entry.name.startswith("."))
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    hint = "; default_model_filename in its config.pbtxt can name another file than model.onnx" if names else ""
    return f"; there is {', '.join(names[:_MAX_NAMES])}{more}{hint}" if names else "; the folder is empty"
