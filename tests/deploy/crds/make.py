"""KServe's custom resources, cut down to what our manifests use: `python make.py SERVINGRUNTIMES.yaml SERVICES.yaml`.

Takes the generated CRDs of KServe (config/crd/full: serving.kserve.io_clusterservingruntimes.yaml and
serving.kserve.io_inferenceservices.yaml), leaves out descriptions and the fields named in LEFT_OUT, and writes a JSON
schema of each beside itself. A manifest that uses one of those fields fails its test until the field is taken off that
list.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import yaml

LEFT_OUT = {
    "clusterservingruntimes": {"workerSpec", "affinity", "volumes"},
    "inferenceservices": {
        *(
            "explainer",
            "transformer",
            "canary",
            "workerSpec",
            "affinity",
            "initContainers",
            "topologySpreadConstraints",
        ),
        *("huggingface", "lightgbm", "onnx", "paddle", "pmml", "pytorch", "sklearn", "tensorflow", "triton", "xgboost"),
    },
}
VOLUMES = {"name", "persistentVolumeClaim", "emptyDir", "configMap", "secret"}


def without_descriptions(node: Any) -> Any:
    """The schema without descriptions. Properties with that name stay."""
    if isinstance(node, dict):
        return {
            key: without_descriptions(value)
            for key, value in node.items()
            if key != "description" or type(value) is dict
        }
    return [without_descriptions(each) for each in node] if isinstance(node, list) else node


def cut(schema: dict[str, Any], names: set[str]) -> None:
    properties = schema.get("properties", {})
    for name in names & properties.keys():
        del properties[name]


def make(file: Path) -> None:
    crd = yaml.load(file.read_text(), yaml.CSafeLoader)
    name = crd["spec"]["names"]["plural"]
    (version,) = crd["spec"]["versions"]
    schema = without_descriptions(version["schema"]["openAPIV3Schema"])
    spec = schema["properties"]["spec"]
    del schema["properties"]["status"]
    cut(spec, LEFT_OUT[name])
    if predictor := spec["properties"].get("predictor"):
        cut(predictor, LEFT_OUT[name])
        volume = predictor["properties"]["volumes"]["items"]
        cut(volume, volume["properties"].keys() - VOLUMES)
    target = Path(__file__).with_name(f"{name}.json")
    target.write_text(json.dumps(schema, separators=(",", ":"), sort_keys=True) + "\n")


if __name__ == "__main__":
    for given in sys.argv[1:]:
        make(Path(given))
