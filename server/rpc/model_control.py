"""Loading and unloading models by RPC, and the index of models.

Lives here: the three RPCs of Triton's "model repository" extension; each converts, calls and converts back. Must not:
load, or keep state; that is the repository's.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager

from paceline.protos import inference_pb2 as pb
from paceline.server.config import ControlMode
from paceline.server.errors import LoadFailed, ModelNotFound, ModelNotReady, NotSupported
from paceline.server.files import in_utf8
from paceline.server.models.layout import Layout, ModelFolder
from paceline.server.models.load_request import (
    Override,
    checked_name,
    parse_load_parameters,
    parse_unload_parameters,
    scratch_folder,
)
from paceline.server.models.model_record import IndexLine, ModelState
from paceline.server.models.repository import Repository
from paceline.server.rpc.calls import Context, answering

__all__ = ["ModelControl"]

_log = logging.getLogger("paceline.server.control")


class ModelControl:
    """RPCs over a repository of models and the folders that they come from."""

    def __init__(self, repository: Repository, layout: Layout, mode: ControlMode) -> None:
        self._repository = repository
        self._layout = layout
        self._mode = mode
        explicit = mode is ControlMode.EXPLICIT
        self.extensions = ("model_repository", "model_repository(unload_dependents)") if explicit else ()

    @answering
    async def RepositoryIndex(self, request: pb.RepositoryIndexRequest, context: Context) -> pb.RepositoryIndexResponse:
        _refuse_repository(request.repository_name)
        if self._mode is ControlMode.EXPLICIT:
            await self._look()
        lines = self._repository.index()
        return pb.RepositoryIndexResponse(
            models=[_line(line) for line in lines if line.state is ModelState.READY or not request.ready]
        )

    @answering
    async def RepositoryModelLoad(
        self, request: pb.RepositoryModelLoadRequest, context: Context
    ) -> pb.RepositoryModelLoadResponse:
        self._refuse_unless_explicit()
        _refuse_repository(request.repository_name)
        name = checked_name(request.model_name)
        override = parse_load_parameters(name, request.parameters)
        try:
            await self._repository.load(
                name, lambda: self._folder(name, override), override.config if override else None
            )
        except LoadFailed as error:
            _log.error("%s", str(error))  # a handler that keeps the record mustn't keep what the traceback leads to
            raise
        return pb.RepositoryModelLoadResponse()

    @answering
    async def RepositoryModelUnload(
        self, request: pb.RepositoryModelUnloadRequest, context: Context
    ) -> pb.RepositoryModelUnloadResponse:
        self._refuse_unless_explicit()
        _refuse_repository(request.repository_name)
        # Without ensembles no model depends on another.
        parse_unload_parameters(request.parameters)
        await self._repository.unload(checked_name(request.model_name))
        return pb.RepositoryModelUnloadResponse()

    def _refuse_unless_explicit(self) -> None:
        if self._mode is not ControlMode.EXPLICIT:
            raise NotSupported(
                "explicit model load / unload is not allowed: expected a server with --model-control-mode explicit, "
                f"got one with {self._mode.value}"
            )

    async def _look(self) -> None:
        """Tell the repository which models are on disk now."""
        try:
            self._repository.take_note(await asyncio.to_thread(self._layout.models))
        except OSError as error:
            _log.warning("the repositories can't be read, so RepositoryIndex lists only known models: %s", error)

    @contextmanager
    def _folder(self, name: str, override: Override | None) -> Iterator[ModelFolder]:
        """The folder to load. Runs on a thread."""
        if override and override.files:
            with scratch_folder(name, override.files) as scratch:
                yield scratch
            return
        try:
            folder = self._layout.model(name)
        except OSError as error:
            raise ModelNotReady(f"failed to load '{name}', failed to poll from model repository: {error}") from None
        if folder is None:
            why = f"no model of that name in {self._layout}"
            raise ModelNotFound(f"failed to load '{name}', failed to poll from model repository: {why}")
        yield folder


def _refuse_repository(name: str) -> None:
    if name:
        raise NotSupported(f"'repository_name' specification is not supported: expected none, got '{name}'")


def _line(line: IndexLine) -> pb.RepositoryIndexResponse.ModelIndex:
    return pb.RepositoryIndexResponse.ModelIndex(
        name=in_utf8(line.name),
        version=line.version,
        state=line.state.value if line.state else "",
        reason=in_utf8(line.reason),
    )
