"""The RPC of the extension "model_configuration".

Lives here: the RPC. Must not: make configurations; the repository has them.
"""

from __future__ import annotations

from paceline.protos import inference_pb2 as pb
from paceline.server.models.repository import Repository
from paceline.server.rpc.calls import Context, answering

__all__ = ["Configuration"]


class Configuration:
    """Tells how models are configured."""

    extensions = ("model_configuration",)

    def __init__(self, repository: Repository) -> None:
        self._repository = repository

    @answering
    async def ModelConfig(self, request: pb.ModelConfigRequest, context: Context) -> pb.ModelConfigResponse:
        """The configuration, with everything filled in that it leaves open; the latest version's if `version` is ""."""
        return pb.ModelConfigResponse(config=self._repository.get(request.name, request.version).config)
