"""Why a server isn't ready, in words for `/readyz` and the log.

Lives here: the words. Must not: decide what readiness is (`repository`), or know of start and end (`server.health`).
"""

from __future__ import annotations

from paceline.server.models.repository import Repository

__all__ = ["why_not_ready"]


def why_not_ready(repository: Repository) -> str:
    """What keeps `repository` from being ready; "" if it is. Reasons that concern all models come first."""
    if repository.ready:
        return ""
    if repository.waits_for:
        return repository.waits_for
    failed = ", ".join(f"'{name}'" for name in repository.failures)
    if failed:
        return f"models failed to load: {failed}"
    unable = ", ".join(f"'{model.name}'" for model in repository.models if not model.can_execute)
    return f"models have no instance left: {unable}" if unable else "models are loading"
