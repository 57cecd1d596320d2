"""The Job that does a bulk job's shards, against the product: flags, shards, memory, privileges, and its end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.server.bulk.settings import COMPLETIONS, INDEX, parse_shard
from tests.deploy.commands import accepted
from tests.deploy.manifests import job

SPEC: Mapping[str, Any] = job().spec
POD: Mapping[str, Any] = SPEC["template"]["spec"]
(CONTAINER,) = POD["containers"]
GIB = 2**30


def test_each_pod_does_its_own_shard() -> None:
    assert SPEC["completionMode"] == "Indexed"
    assert 0 < SPEC["parallelism"] <= SPEC["completions"]
    (variable,) = CONTAINER["env"]
    assert variable["name"] == COMPLETIONS
    indexes = range(SPEC["completions"])
    told = [parse_shard(None, {INDEX: str(index), COMPLETIONS: variable["value"]}) for index in indexes]
    assert told == [(index, SPEC["completions"]) for index in indexes]


def test_paceline_accepts_the_jobs_command_line() -> None:
    assert CONTAINER["args"][0] == "bulk"
    given = accepted(CONTAINER["args"])
    mounts = {each["mountPath"]: each.get("readOnly", False) for each in CONTAINER["volumeMounts"]}
    assert mounts == {"/models": True, "/data": False}
    assert given["model"].startswith("/models/")
    assert str(given["out"]).startswith("/data/")
    assert all(pattern.startswith("/data/") for pattern in given["inputs"])
    assert {each["name"] for each in CONTAINER["volumeMounts"]} == {each["name"] for each in POD["volumes"]}


def test_rows_take_a_quarter_of_its_memory() -> None:
    resources = CONTAINER["resources"]
    assert resources["requests"] == resources["limits"]
    assert resources["limits"]["memory"] == "4Gi"
    assert accepted(CONTAINER["args"])["memory_bytes"] == 1 * GIB


def test_failed_shard_is_started_again_alone() -> None:
    """In a new pod, and only when the old one, which holds the shard's lock, is gone; not if the flags are wrong."""
    assert SPEC["backoffLimitPerIndex"] > 0
    assert "backoffLimit" not in SPEC
    assert SPEC["podReplacementPolicy"] == "Failed"
    assert POD["restartPolicy"] == "Never"
    disruptions, usage = SPEC["podFailurePolicy"]["rules"]
    assert disruptions == {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget"}]}
    codes = usage["onExitCodes"]
    assert (usage["action"], codes["operator"], codes["values"]) == ("FailJob", "In", [2])
    assert codes["containerName"] == CONTAINER["name"]


def test_job_has_no_privileges_and_writes_only_data() -> None:
    given = CONTAINER["securityContext"]
    assert given["capabilities"] == {"drop": ["ALL"]}
    assert given["runAsNonRoot"] is given["readOnlyRootFilesystem"] is True
    assert given["allowPrivilegeEscalation"] is given["privileged"] is False
    pod = POD["securityContext"]
    assert pod["fsGroup"] == pod["runAsGroup"] > 0 < pod["runAsUser"]
    assert POD["automountServiceAccountToken"] is False
