"""Ensembles on disk, for tests.

Lives here: their configurations, written from steps in short. Must not: assertions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

__all__ = ["Step", "ensemble_config", "write_ensemble"]

Step = tuple[str, Mapping[str, str], Mapping[str, str]]
"""A model, possibly with its version as in "m:2", its inputs and its outputs, each with the ensemble's tensor."""


def ensemble_config(
    steps: Sequence[Step],
    inputs: Mapping[str, str] | None = None,
    outputs: Mapping[str, str] | None = None,
    rows: int = 8,
    more: str = "",
    scheduling: str = "",
) -> str:
    """`inputs` and `outputs` have datatype and dims of each, as in "FP32 -1"; by default `in` and `out` are that."""
    tensors = [
        f'{kind} {{ name: "{name}" data_type: TYPE_{said.split()[0]} dims: [ {", ".join(said.split()[1:])} ] }}'
        for kind, named in (("input", inputs or {"in": "FP32 -1"}), ("output", outputs or {"out": "FP32 -1"}))
        for name, said in named.items()
    ]
    made = []
    for model, reads, writes in steps:
        name, _, version = model.partition(":")
        maps = [
            f'{kind} {{ key: "{key}" value: "{value}" }}'
            for kind, named in (("input_map", reads), ("output_map", writes))
            for key, value in named.items()
        ]
        made.append(f'step {{ model_name: "{name}" model_version: {version or -1} {" ".join(maps)} }}')
    graph = f"ensemble_scheduling {{ {scheduling} {' '.join(made)} }}"
    return f'platform: "ensemble" max_batch_size: {rows} {" ".join(tensors)} {graph} {more}'


def write_ensemble(root: Path, name: str, config: str) -> Path:
    """The model's folder, with an empty folder for its version."""
    folder = root / name
    (folder / "1").mkdir(parents=True, exist_ok=True)
    (folder / "config.pbtxt").write_text(config)
    return folder
