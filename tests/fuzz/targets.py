"""All decoders that are fuzzed, by name, and their corpus."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from tests.fuzz import configurations, framing, requests, services
from tests.fuzz.judging import Target

__all__ = ["CORPUS", "NAMES", "inputs", "target"]

CORPUS = Path(__file__).parent / "corpus"
NAMES = ("config", "contents", "frames", "headers", "infer", "load", "service", "stream", "tensor")

_MAKERS = {
    **dict.fromkeys(("infer", "tensor", "contents", "headers"), requests),
    **dict.fromkeys(("config", "load"), configurations),
    **dict.fromkeys(("service", "stream"), services),
    "frames": framing,
}


@cache
def _made(module: object) -> dict[str, Target]:
    return {one.name: one for one in module.targets()}  # type: ignore[attr-defined]


def target(name: str) -> Target:
    """The target, made on first use."""
    return _made(_MAKERS[name])[name]


def inputs(name: str) -> list[Path]:
    """The files of the target's corpus."""
    return sorted((CORPUS / name).iterdir())
