"""The programs that people use on these files, run on them: kustomize as part of kubectl, and a linter of Dockerfiles.

They are looked for in PACELINE_DEPLOY_PROGRAMS, else where `make witness` puts them. Neither connects to anything.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from tests.deploy.commands import accepted
from tests.deploy.dockerfile import DOCKERFILE
from tests.deploy.manifests import manifests, schema
from tests.harness import REPO

PROGRAMS = Path(os.environ.get("PACELINE_DEPLOY_PROGRAMS", REPO / ".witness" / "deploy"))
BASES = sorted(each.file.parent for each in manifests() if each.kind == "Kustomization")

PREDICTOR = """
apiVersion: apps/v1
kind: Deployment
metadata:
  name: churn
spec:
  selector:
    matchLabels:
      app: churn
  template:
    metadata:
      labels:
        app: churn
    spec:
      containers:
        - name: predictor
          image: registry.example.com/churn
          ports:
            - name: grpc
              containerPort: 9000
"""


def run(program: str, *args: str) -> str:
    if not (PROGRAMS / program).exists():
        pytest.skip(f"there is no {program}: `make witness` installs it")
    command = [str(PROGRAMS / program), *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def built(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """The documents that `kubectl apply -k` would send, by kind."""
    found: dict[str, list[dict[str, Any]]] = {}
    for document in yaml.safe_load_all(run("kubectl", "kustomize", str(folder))):
        found.setdefault(document["kind"], []).append(document)
    return found


def validate_pod(deployment: dict[str, Any]) -> dict[str, Any]:
    """The pod's spec, validated."""
    pod: dict[str, Any] = deployment["spec"]["template"]["spec"]
    jsonschema.Draft202012Validator(
        schema("inferenceservices")["properties"]["spec"]["properties"]["predictor"]
    ).validate(pod)
    return pod


@pytest.mark.parametrize("folder", BASES, ids=lambda folder: f"{folder.parent.name}/{folder.name}")
def test_kustomize_builds_each_base_with_our_images(folder: Path) -> None:
    found = built(folder)
    pods = [validate_pod(each) for kind in ("Deployment", "Job") for each in found.get(kind, ())]
    pods += [each["spec"] for each in found.get("ClusterServingRuntime", ())]
    images = {container["image"] for pod in pods for container in pod["containers"]}
    assert images
    assert images <= {"paceline:cpu", "paceline:cuda", "paceline:cpu-bulk"}
    assert ("paceline:cpu-bulk" in images) == ("Job" in found)
    if folder.name == "gpu":
        assert images == {"paceline:cuda"}
        assert pods[0]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "1"


def test_kustomize_adds_the_sidecar_to_an_existing_deployment(tmp_path: Path) -> None:
    (tmp_path / "predictor.yaml").write_text(PREDICTOR)
    component = os.path.relpath(REPO / "deploy" / "kubernetes" / "proxy", tmp_path.resolve())
    (tmp_path / "kustomization.yaml").write_text(f"resources: [predictor.yaml]\ncomponents: [{component}]\n")
    (deployment,) = built(tmp_path)["Deployment"]
    pod = validate_pod(deployment)
    by_name = {each["name"]: each for each in pod["containers"]}
    assert by_name.keys() == {"predictor", "paceline"}
    assert by_name["predictor"] == yaml.safe_load(PREDICTOR)["spec"]["template"]["spec"]["containers"][0]
    assert by_name["paceline"]["image"] == "paceline:cpu"
    assert deployment["metadata"]["name"] == "churn"
    names = [port["name"] for each in pod["containers"] for port in each["ports"]]
    assert len(names) == len(set(names))


def test_guides_overlay_replaces_the_image(tmp_path: Path) -> None:
    base = os.path.relpath(REPO / "deploy" / "kubernetes" / "keda", tmp_path.resolve())
    image = "images: [{name: paceline, newName: registry.example.com/paceline, newTag: '1'}]"
    (tmp_path / "kustomization.yaml").write_text(f"resources: [{base}]\n{image}\n")
    (deployment,) = built(tmp_path)["Deployment"]
    assert validate_pod(deployment)["containers"][0]["image"] == "registry.example.com/paceline:1"


def test_guides_bulk_overlay_changes_shards_and_image(tmp_path: Path) -> None:
    guide = (REPO / "docs" / "guides" / "kubernetes.md").read_text().partition("## Offline work")[2]
    overlay = guide.partition("```yaml\n")[2].partition("```")[0]
    base = os.path.relpath(REPO / "deploy" / "kubernetes" / "bulk", tmp_path.resolve())
    (tmp_path / "kustomization.yaml").write_text(overlay.replace("../paceline/deploy/kubernetes/bulk", base))
    (job,) = built(tmp_path)["Job"]
    (container,) = validate_pod(job)["containers"]
    assert container["image"] == "registry.example.com/paceline:cuda-bulk"
    accepted(container["args"])
    assert container["env"] == [{"name": "JOB_COMPLETIONS", "value": str(job["spec"]["completions"])}]
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert {each["name"] for each in container["volumeMounts"]} == {"models", "data"}


def test_linter_finds_nothing_in_the_dockerfile() -> None:
    # Several RUN in a row: layers of a stage that isn't kept cost nothing, and each step is cached separately.
    run("hadolint", "--ignore", "DL3059", str(DOCKERFILE))
