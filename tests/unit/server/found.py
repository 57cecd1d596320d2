"""The models that a server finds at given paths, in one call."""

from __future__ import annotations

from pathlib import Path

from paceline.server.models.layout import Layout, ModelFolder

__all__ = ["find_models"]


def find_models(paths: list[Path], config_name: str = "") -> list[ModelFolder]:
    """The models at `paths`, by name. Raises StartError if a path can't be read or holds no model."""
    layout = Layout(paths, config_name)
    layout.open()
    return layout.models()
