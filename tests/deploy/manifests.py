"""The manifests of deploy/, parsed: documents, and our containers in them.

Lives here: reading and the schemas. Must not: assertions.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from tests.harness import REPO

__all__ = ["FOLDERS", "Container", "Manifest", "containers", "job", "manifests", "schema", "strict"]

FOLDERS = (REPO / "deploy" / "kserve", REPO / "deploy" / "kubernetes")
_SCHEMAS = Path(__file__).parent / "crds"
_SHORTEST_GRACE_S = 30
"""terminationGracePeriodSeconds where nobody sets it."""


@dataclass(frozen=True)
class Manifest:
    """One document of a file."""

    file: Path
    document: dict[str, Any]

    def __str__(self) -> str:
        name = self.document.get("metadata", {}).get("name", "")
        return f"{self.file.parent.name}/{self.file.name} {self.kind} {name}".strip()

    @property
    def kind(self) -> str:
        return str(self.document.get("kind", ""))

    @property
    def name(self) -> str:
        return str(self.document["metadata"]["name"])

    @property
    def spec(self) -> dict[str, Any]:
        spec: dict[str, Any] = self.document["spec"]
        return spec


@dataclass(frozen=True)
class Container:
    """A container that runs paceline, with its pod's settings for it. `annotations` are the pod's."""

    where: str
    kserve: bool
    body: dict[str, Any]
    annotations: dict[str, str]
    grace_s: int

    def __str__(self) -> str:
        return self.where

    @property
    def args(self) -> list[str]:
        """As KServe renders them for an InferenceService named `rendered`."""
        return [word.replace("{{.Name}}", "rendered") for word in self.body["args"]]

    @property
    def upstream(self) -> str:
        """The server that it is in front of; empty if it has its own models."""
        flag = "--upstream="
        return next((word.removeprefix(flag) for word in self.args if word.startswith(flag)), "")


@cache
def manifests() -> tuple[Manifest, ...]:
    """All documents, including kustomizations and Helm values."""
    files = sorted(file for folder in FOLDERS for file in folder.rglob("*.yaml"))
    return tuple(Manifest(file, each) for file in files for each in yaml.safe_load_all(file.read_text()))


def job() -> Manifest:
    """The only Job."""
    (found,) = (each for each in manifests() if each.kind == "Job")
    return found


def containers() -> Iterator[Container]:
    """Our containers that serve and have a command line; patches of them are left to kustomize."""
    for manifest in manifests():
        if manifest.kind == "ClusterServingRuntime":
            pod, kserve, annotations = manifest.spec, True, manifest.spec["annotations"]
        elif manifest.kind == "InferenceService":
            pod, kserve, annotations = (
                manifest.spec["predictor"],
                True,
                manifest.document["metadata"].get("annotations", {}),
            )
        elif manifest.kind == "Deployment":
            template = manifest.spec["template"]
            pod, kserve, annotations = template["spec"], False, template.get("metadata", {}).get("annotations", {})
        else:
            continue
        grace_s = pod.get("terminationGracePeriodSeconds", _SHORTEST_GRACE_S)
        for body in pod.get("containers", ()):
            if "args" in body and body["image"].partition(":")[0] == "paceline":
                yield Container(str(manifest), kserve, body, annotations, grace_s)


@cache
def schema(plural: str) -> dict[str, Any]:
    """The JSON schema of KServe's resource, in which unknown fields are errors."""
    found: dict[str, Any] = strict(json.loads((_SCHEMAS / f"{plural}.json").read_text()))
    return found


def strict(node: Any) -> Any:
    """The schema with every object closed that lists its properties: an API server drops fields that it doesn't know,
    and they have no effect."""
    if isinstance(node, list):
        return [strict(each) for each in node]
    if not isinstance(node, dict):
        return node
    closed = {key: strict(value) for key, value in node.items()}
    is_schema = isinstance(node.get("properties"), dict) and node.get("type") == "object"
    if is_schema and not node.get("x-kubernetes-preserve-unknown-fields"):
        closed.setdefault("additionalProperties", False)
    return closed
