"""Files on disk, and the models that a server finds at given paths, in one call."""

from __future__ import annotations

from pathlib import Path

from paceline.server.models.layout import Layout, ModelFolder

__all__ = ["find_models", "opened", "touch"]


def find_models(paths: list[Path], config_name: str = "") -> list[ModelFolder]:
    """The models at `paths`, by name. Raises StartError if a path can't be read or holds no model."""
    layout = Layout(paths, config_name)
    layout.open()
    return layout.models()


def opened(*paths: Path) -> Layout:
    """What is at `paths`, which may be nothing yet."""
    layout = Layout(paths)
    layout.open(may_be_empty=True)
    return layout


def touch(path: Path) -> Path:
    """An empty file, and the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    return path
