"""Manifests against KServe's schemas, and against the product: ports, probes, flags, metrics, times."""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import yaml

from paceline.clients import InferenceClient
from paceline.server import app
from paceline.server.models.defaults import parse_backend_config
from paceline.server.rpc.standard_services import LIVENESS
from tests import models
from tests.deploy.commands import accepted
from tests.deploy.manifests import FOLDERS, Container, Manifest, containers, job, manifests, schema
from tests.harness import ServerProcess
from tests.polling import eventually

INFERENCE = "inference.GRPCInferenceService"
SCHEMAS = {"ClusterServingRuntime": "clusterservingruntimes", "InferenceService": "inferenceservices"}
VERSIONS = {
    "ClusterServingRuntime": "serving.kserve.io/v1alpha1",
    "InferenceService": "serving.kserve.io/v1beta1",
    "Deployment": "apps/v1",
    "Job": "batch/v1",
    "Service": "v1",
    "PodDisruptionBudget": "policy/v1",
    "HorizontalPodAutoscaler": "autoscaling/v2",
    "ScaledObject": "keda.sh/v1alpha1",
    "Kustomization": "kustomize.config.k8s.io/v1beta1",
    "Component": "kustomize.config.k8s.io/v1alpha1",
}
FINAL_STOP_S = 3
MODEL_LOAD_S = 300
_METRIC = re.compile(r"\b(?:nv|paceline)_\w+")

every_container = pytest.mark.parametrize("container", list(containers()), ids=str)


def of_kind(*kinds: str) -> list[Manifest]:
    return [each for each in manifests() if each.kind in kinds]


def validate(instance: Any, rules: dict[str, Any]) -> None:
    jsonschema.Draft202012Validator(rules).validate(instance)


def pod_schema() -> dict[str, Any]:
    """The schema of a predictor, which is a pod's spec and more."""
    predictor: dict[str, Any] = schema("inferenceservices")["properties"]["spec"]["properties"]["predictor"]
    return predictor


def test_all_manifests_are_found() -> None:
    kinds = [each.kind for each in manifests()]
    assert {kind: kinds.count(kind) for kind in ("ClusterServingRuntime", "InferenceService", "ScaledObject")} == {
        "ClusterServingRuntime": 2,
        "InferenceService": 4,
        "ScaledObject": 1,
    }
    assert len(list(containers())) == 6
    assert len([each for each in containers() if each.upstream]) == 2


@pytest.mark.parametrize("manifest", [each for each in manifests() if each.kind], ids=str)
def test_manifest_has_the_expected_api_version(manifest: Manifest) -> None:
    assert manifest.document["apiVersion"] == VERSIONS[manifest.kind]


@pytest.mark.parametrize("manifest", of_kind(*SCHEMAS), ids=str)
def test_manifest_of_kserve_is_valid_by_its_schema(manifest: Manifest) -> None:
    validate(manifest.document, schema(SCHEMAS[manifest.kind]))


@pytest.mark.parametrize("manifest", of_kind("Deployment", "Job"), ids=str)
def test_template_has_a_pod_valid_by_the_schema(manifest: Manifest) -> None:
    validate(manifest.spec["template"]["spec"], pod_schema())


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("spec", "containers", 0, "readinesProbe"), {}),
        (("spec", "containers", 0, "ports", 0, "containerPort"), "8001"),
        (("spec", "containers", 0, "readinessProbe", "grpc"), {"service": ""}),
        (("spec", "terminationGracePeriodSeconds"), 45),
        (("spec", "protocolVersions"), "grpc-v2"),
    ],
    ids=lambda value: ".".join(map(str, value)) if isinstance(value, tuple) else "",
)
def test_schema_refuses_what_kserve_would_refuse_or_drop(path: tuple[str | int, ...], value: object) -> None:
    broken = copy.deepcopy(of_kind("ClusterServingRuntime")[0].document)
    place: Any = broken
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    with pytest.raises(jsonschema.ValidationError):
        validate(broken, schema("clusterservingruntimes"))


@every_container
def test_container_runs_a_command_line_that_paceline_accepts(container: Container) -> None:
    assert container.args[0] == "serve"
    accepted(container.args)


@every_container
def test_container_declares_the_ports_that_its_command_opens(container: Container) -> None:
    flags = accepted(container.args)
    declared = {port["name"]: port["containerPort"] for port in container.body["ports"]}
    if container.kserve:
        # A single port, which Knative and raw mode both take for HTTP/2.
        assert declared == {"h2c": flags["grpc_port"]}
    elif container.upstream:
        # Other containers of the same pod have ports as well.
        assert declared == {"paceline-grpc": flags["grpc_port"], "paceline-prom": flags["metrics_port"]}
    else:
        assert declared == {"grpc": flags["grpc_port"], "metrics": flags["metrics_port"]}


@every_container
def test_container_is_scraped_where_its_metrics_are(container: Container) -> None:
    assert container.annotations["prometheus.io/scrape"] == "true"
    # Only Knative's queue-proxy reads the second.
    for prefix in ("prometheus.io", "prometheus.kserve.io") if container.kserve else ("prometheus.io",):
        assert container.annotations[f"{prefix}/port"] == str(accepted(container.args)["metrics_port"])
        assert container.annotations[f"{prefix}/path"] == "/metrics"


@every_container
def test_container_is_probed_on_its_port_for_the_right_health_services(container: Container) -> None:
    probes = {name: container.body[f"{name}Probe"] for name in ("startup", "readiness", "liveness")}
    asked = {name: (probe["grpc"]["port"], probe["grpc"].get("service", "")) for name, probe in probes.items()}
    port = accepted(container.args)["grpc_port"]
    assert asked == {"startup": (port, LIVENESS), "readiness": (port, ""), "liveness": (port, LIVENESS)}
    assert probes["startup"]["periodSeconds"] * probes["startup"]["failureThreshold"] >= MODEL_LOAD_S


def runtime_of(service: Manifest) -> Container:
    name = service.spec["predictor"]["model"]["runtime"]
    (found,) = (each for each in containers() if each.where.endswith(f"ClusterServingRuntime {name}"))
    return found


def graces() -> Iterator[Any]:
    """What runs, with the pod's grace period; an InferenceService may change its runtime's."""
    for each in containers():
        yield pytest.param(each, each.grace_s, id=str(each))
    for service in of_kind("InferenceService"):
        predictor = service.spec["predictor"]
        if "model" in predictor:
            grace_s = predictor.get("terminationGracePeriodSeconds", 30)
            yield pytest.param(runtime_of(service), grace_s, id=str(service))


@pytest.mark.parametrize(("container", "grace_s"), list(graces()))
def test_container_has_time_for_a_graceful_end(container: Container, grace_s: int) -> None:
    flags = accepted(container.args)
    assert flags["drain_grace_secs"] + flags["exit_timeout_secs"] + FINAL_STOP_S < grace_s


@every_container
def test_container_takes_requests_until_endpoints_have_forgotten_it(container: Container) -> None:
    """Only its flag makes it do so: a hook that sleeps would add to that, and the server would be ready all the
    while."""
    assert accepted(container.args)["drain_grace_secs"] >= 5
    assert "preStop" not in container.body.get("lifecycle", {})


def test_final_stop_takes_as_long_as_the_manifests_assume() -> None:
    assert f"_MAX_FINAL_STOP_S = 1.0, {FINAL_STOP_S}.0" in inspect.getsource(app)


@every_container
def test_container_has_no_privileges_and_writes_nowhere(container: Container) -> None:
    given = container.body["securityContext"]
    assert given["capabilities"] == {"drop": ["ALL"]}
    assert given["runAsNonRoot"] is given["readOnlyRootFilesystem"] is True
    assert given["allowPrivilegeEscalation"] is given["privileged"] is False


@every_container
def test_container_requests_and_limits_the_same_resources(container: Container) -> None:
    resources = container.body["resources"]
    assert resources["requests"].keys() == resources["limits"].keys() >= {"cpu", "memory"}
    assert ("nvidia.com/gpu" in resources["limits"]) == container.body["image"].endswith(":cuda")


@every_container
def test_container_has_memory_for_the_requests_that_may_queue(container: Container) -> None:
    queued_bytes = accepted(container.args)["max_queued_bytes"]
    number, unit = re.fullmatch(r"(\d+)(Mi|Gi)", container.body["resources"]["limits"]["memory"]).groups()
    assert 4 * queued_bytes == int(number) * {"Mi": 2**20, "Gi": 2**30}[unit]


@every_container
def test_container_computes_on_as_many_threads_as_its_cpu_limit(container: Container) -> None:
    backends = parse_backend_config(accepted(container.args)["backend_config"])
    if container.upstream:
        assert not backends.parameters
        return
    assert backends.parameters["intra_op_thread_count"] == container.body["resources"]["limits"]["cpu"]


@pytest.mark.parametrize("manifest", of_kind("InferenceService"), ids=str)
def test_inference_service_names_a_runtime_that_serves_its_format_and_protocol(manifest: Manifest) -> None:
    model = manifest.spec["predictor"].get("model")
    if model is None:
        (container,) = (each for each in manifest.spec["predictor"]["containers"] if each["name"] == "kserve-container")
        assert [each["name"] for each in container["env"]] == ["STORAGE_URI"]
        assert f"--model_name={manifest.name}" in container["args"]
        return
    (runtime,) = (each for each in of_kind("ClusterServingRuntime") if each.name == model["runtime"])
    assert model["protocolVersion"] in runtime.spec["protocolVersions"]
    assert model["modelFormat"]["name"] in {each["name"] for each in runtime.spec["supportedModelFormats"]}


def test_knative_example_uses_nothing_that_knative_refuses() -> None:
    (manifest,) = (each for each in of_kind("InferenceService") if each.file.name == "knative.yaml")
    predictor = manifest.spec["predictor"]
    assert "terminationGracePeriodSeconds" not in predictor
    assert "lifecycle" not in predictor["model"]


def test_runtimes_use_nothing_that_knative_refuses() -> None:
    for manifest in of_kind("ClusterServingRuntime"):
        (container,) = manifest.spec["containers"]
        assert container["name"] == "kserve-container"
        assert "lifecycle" not in container


def test_kserve_sends_requests_to_the_sidecar_which_finds_its_predictor() -> None:
    (manifest,) = (each for each in of_kind("InferenceService") if each.file.name == "proxy.yaml")
    by_name = {each["name"]: each for each in manifest.spec["predictor"]["containers"]}
    assert by_name.keys() == {"kserve-container", "transformer-container"}
    predictor = by_name["kserve-container"]
    (sidecar,) = (each for each in containers() if each.body is by_name["transformer-container"])
    assert "ports" not in predictor
    port = predictor["readinessProbe"]["tcpSocket"]["port"]
    assert sidecar.upstream == f"localhost:{port}"
    assert f"--grpc_port={port}" in predictor["args"]
    (model,) = accepted(sidecar.args)["upstream_model"]
    assert f"--model_name={model}" in predictor["args"]
    # The predictor outlives the batcher, which has accepted requests.
    program, seconds = predictor["lifecycle"]["preStop"]["exec"]["command"]
    assert program == "sleep"
    flags = accepted(sidecar.args)
    ends_s = flags["drain_grace_secs"] + flags["exit_timeout_secs"] + FINAL_STOP_S
    assert ends_s < int(seconds) < sidecar.grace_s


@pytest.mark.parametrize("manifest", of_kind("Service"), ids=str)
def test_service_finds_its_pods_and_their_ports(manifest: Manifest) -> None:
    deployment = whole_deployment()
    assert manifest.spec["selector"].items() <= deployment["template"]["metadata"]["labels"].items()
    ports = {port["name"]: port["containerPort"] for port in deployment["template"]["spec"]["containers"][0]["ports"]}
    for port in manifest.spec["ports"]:
        assert port["port"] == ports[port["targetPort"]]
        assert (port.get("appProtocol") == "kubernetes.io/h2c") == (port["name"] == "grpc")


@pytest.mark.parametrize("manifest", of_kind("PodDisruptionBudget"), ids=str)
def test_disruption_budget_selects_existing_pods(manifest: Manifest) -> None:
    labels = [whole_deployment()["template"]["metadata"]["labels"]]
    labels += [{"serving.kserve.io/inferenceservice": each.name} for each in of_kind("InferenceService")]
    selected = manifest.spec["selector"]["matchLabels"].items()
    assert any(selected <= each.items() for each in labels)


@pytest.mark.parametrize("manifest", of_kind("HorizontalPodAutoscaler", "ScaledObject"), ids=str)
def test_autoscaler_scales_the_deployment(manifest: Manifest) -> None:
    (deployment,) = (each for each in of_kind("Deployment") if "selector" in each.spec)
    target = {"apiVersion": deployment.document["apiVersion"], "kind": deployment.kind, "name": deployment.name}
    assert manifest.spec["scaleTargetRef"] == target
    least = manifest.spec.get("minReplicas") or manifest.spec["minReplicaCount"]
    most = manifest.spec.get("maxReplicas") or manifest.spec["maxReplicaCount"]
    assert deployment.spec["replicas"] <= least < most


def test_overlay_with_an_autoscaler_leaves_the_number_of_pods_to_it() -> None:
    folders = {each.file.parent for each in of_kind("HorizontalPodAutoscaler", "ScaledObject")}
    assert len(folders) == 2
    for manifest in of_kind("Kustomization"):
        patches = [yaml.safe_load(each["patch"]) for each in manifest.document.get("patches", ()) if "patch" in each]
        assert patches == [[{"op": "remove", "path": "/spec/replicas"}]] * (manifest.file.parent in folders)


def test_metrics_that_kserve_scales_by_have_the_fields_that_it_reads() -> None:
    """KServe's webhook and controller read `value` of External metrics, whatever their type is."""
    scaling = [each.spec["predictor"].get("autoScaling", {}) for each in of_kind("InferenceService")]
    targets = [metric["external"]["target"] for each in scaling for metric in each.get("metrics", ())]
    assert [(one["value"], one["averageValue"]) for one in targets] == [("32", "32")]


def whole_deployment() -> dict[str, Any]:
    (deployment,) = (each.spec for each in of_kind("Deployment") if "selector" in each.spec)
    return deployment


@pytest.mark.parametrize("manifest", of_kind("Kustomization", "Component"), ids=str)
def test_kustomization_names_existing_files_and_used_images(manifest: Manifest) -> None:
    folder = manifest.file.parent
    named = [
        *manifest.document.get("resources", ()),
        *(each["path"] for each in manifest.document.get("patches", ()) if "path" in each),
    ]
    assert all((folder / name).exists() for name in named)
    others = ("", "Kustomization", "Component")
    files = {each.file.name for each in manifests() if each.file.parent == folder and each.kind not in others}
    assert files <= set(named)
    images = {each.body["image"].partition(":")[0] for each in containers()}
    images |= {each["image"] for each in job().spec["template"]["spec"]["containers"]}
    assert {each["name"] for each in manifest.document.get("images", ())} <= images


def metrics_named() -> set[str]:
    return {name for folder in FOLDERS for file in folder.rglob("*.yaml") for name in _METRIC.findall(file.read_text())}


@pytest.mark.parametrize("container", [each for each in containers() if each.upstream], ids=str)
def test_sidecar_serves_the_models_behind_its_upstream_port(container: Container, tmp_path: Path) -> None:
    """A real sidecar in front of a real server, which has another port here."""
    models.write(models.add_sub(), tmp_path / "churn" / "1" / "model.onnx")
    with ServerProcess(tmp_path) as predictor:
        there = f"localhost:{predictor.grpc_port}"
        flags = [word.replace(container.upstream, there) for word in container.args[1:]]
        env = {"INFERENCE_SERVICE_NAME": "rendered"} if container.kserve else {}
        with ServerProcess(args=flags, env=env) as server, InferenceClient(server.target) as client:
            eventually(client.server_ready, "ready")
            ones = np.ones((1, 16), np.int32)
            assert (client.infer("churn", {"INPUT0": ones, "INPUT1": ones})["OUTPUT0"] == 2).all()
            assert {client.health(service) for service in ("", LIVENESS)} == {"SERVING"}
            predictor.kill()
            eventually(lambda: not client.server_ready(), "not ready")
            assert client.health(LIVENESS) == "SERVING"
            server.kill()  # its grace period for load balancers doesn't matter here


@pytest.mark.parametrize("container", [each for each in containers() if not each.upstream], ids=str)
def test_container_serves_what_its_probes_and_autoscalers_ask_for(container: Container, tmp_path: Path) -> None:
    """A real server, with the container's flags."""
    models.write(models.add_sub(), tmp_path / "model.onnx")
    flags = [word for word in container.args[1:] if word.startswith("--")]
    kserve = {"STORAGE_URI": str(tmp_path), "INFERENCE_SERVICE_NAME": "rendered"} if container.kserve else {}
    paths = () if container.kserve else (tmp_path,)
    probed = {
        container.body[f"{name}Probe"]["grpc"].get("service", "") for name in ("startup", "readiness", "liveness")
    }
    with ServerProcess(*paths, args=flags, env=kserve) as server, InferenceClient(server.target) as client:
        named = [word.partition("=")[2] for word in flags if word.startswith("--model_name=")]
        assert client.model_ready(named[0] if named else tmp_path.name)
        assert {client.health(service) for service in probed} == {"SERVING"}
        there = {name.partition("{")[0] for name in server.metrics()}
        server.kill()  # its grace period for load balancers doesn't matter here
    assert metrics_named() == {"nv_inference_pending_request_count"} <= there
