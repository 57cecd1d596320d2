"""The models to serve according to KServe's environment variables."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.server.model_path import MOUNT, models_to_serve

OWN = Path("/srv/resnet")


@pytest.mark.parametrize(
    ("paths", "name", "environment", "expected"),
    [
        ((), "", {}, ((), "")),
        ((OWN,), "", {}, ((OWN,), "")),
        ((OWN,), "m", {}, ((OWN,), "m")),
        ((), "", {"STORAGE_URI": "/mnt/models"}, ((MOUNT,), "")),
        ((), "", {"STORAGE_URI": "/data"}, ((Path("/data"),), "")),
        ((), "", {"INFERENCE_SERVICE_NAME": "svc"}, ((MOUNT,), "svc")),
        ((), "", {"INFERENCE_SERVICE_NAME": "svc", "STORAGE_URI": "/data/"}, ((Path("/data"),), "svc")),
        ((), "m", {"INFERENCE_SERVICE_NAME": "svc"}, ((MOUNT,), "m")),
        ((MOUNT,), "", {"INFERENCE_SERVICE_NAME": "svc"}, ((MOUNT,), "svc")),
        ((Path("/mnt/models/."),), "", {"INFERENCE_SERVICE_NAME": "svc"}, ((MOUNT,), "svc")),
        ((OWN,), "", {"INFERENCE_SERVICE_NAME": "svc"}, ((OWN,), "")),
        ((OWN,), "", {"INFERENCE_SERVICE_NAME": "svc", "STORAGE_URI": "s3://b/m"}, ((OWN,), "")),
        ((MOUNT, OWN), "", {"INFERENCE_SERVICE_NAME": "svc"}, ((MOUNT, OWN), "")),
    ],
)
def test_models_to_serve_are_those_given_or_else_those_of_kserve(
    paths: tuple[Path, ...], name: str, environment: dict[str, str], expected: tuple[tuple[Path, ...], str]
) -> None:
    assert models_to_serve(paths, name, environment) == expected


@pytest.mark.parametrize("uri", ["s3://bucket/model", "pvc://claim/m", "file:///m", "models"])
def test_models_to_serve_from_a_storage_uri_that_is_no_folder_are_refused(uri: str) -> None:
    with pytest.raises(ValueError, match=rf"STORAGE_URI: expected the folder .* got '{uri}'"):
        models_to_serve((), "", {"STORAGE_URI": uri, "INFERENCE_SERVICE_NAME": "svc"})
