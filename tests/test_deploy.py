"""Files in `deploy/`: units that systemd accepts, manifests that Kubernetes accepts, options that our programs have."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from mission_control.dask.worker import HOST_TOKEN_FILE
from mission_control.service import membership, serving
from tests.conftest import mission

DEPLOY = Path(__file__).parent.parent / "deploy"
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
VARIABLES = {membership.SERVICE, membership.CLUSTER, membership.TOKEN_FILE, membership.CA, HOST_TOKEN_FILE}


def documents() -> list[dict[str, Any]]:
    return [own for path in MANIFESTS for own in yaml.safe_load_all(path.read_text())]


def containers() -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return containers, each with its pod."""
    pods = [own["spec"]["template"]["spec"] for own in documents() if "template" in own["spec"]]
    return [(container, pod) for pod in pods for container in pod["containers"]]


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_manifests_are_of_the_apis_own_types(path):
    for own in yaml.safe_load_all(path.read_text()):
        # All fields exist in the API, with the right type.
        kubernetes_validate.validate(own, "1.31", strict=True)


def test_a_manifest_with_a_field_that_there_is_not_is_refused():
    own = documents()[0]
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate({**own, "spec": {**own["spec"], "clusterIp": "None"}}, "1.31", strict=True)


def test_what_manifests_mount_select_and_call_is_there():
    for container, pod in containers():
        mounted = {own["name"] for own in container["volumeMounts"]}
        there = {own["name"] for own in pod.get("volumes", [])} | {"data"}
        assert mounted <= there, container["name"]
        assert container["resources"]["requests"] and container["resources"]["limits"]
        ports = {own["name"] for own in container.get("ports", [])}
        for probe in ("readinessProbe", "livenessProbe"):
            assert container.get(probe, {}).get("httpGet", {"port": None})["port"] in {*ports, None}
    headless = {own["metadata"]["name"]: own for own in documents() if own["kind"] == "Service"}
    for own in documents():
        if own["kind"] in ("StatefulSet", "Deployment", "DaemonSet"):
            labels = own["spec"]["template"]["metadata"]["labels"]
            assert own["spec"]["selector"]["matchLabels"] == labels
        if own["kind"] == "StatefulSet":
            service = headless[own["spec"]["serviceName"]]
            assert service["spec"]["selector"] == labels and service["spec"]["clusterIP"] == "None"
    # Names of replicas and of members of etcd follow from their sets.
    sets = {own["metadata"]["name"]: own["spec"]["replicas"] for own in documents() if own["kind"] == "StatefulSet"}
    text = "\n".join(path.read_text() for path in MANIFESTS)
    for name, count in sets.items():
        named = {int(number) for number in re.findall(rf"\b{name}-(\d+)\.{name}\.mission-control\.svc", text)}
        assert named == set(range(count)), name


def test_the_words_of_manifests_and_units_are_those_of_our_programs():
    options = {"serve": set(re.findall(r"--[a-z]+", mission("serve", "--help").stdout))}
    commands = [container["command"] for container, _ in containers()]
    (words,) = re.findall(r"^MISSION_SERVE=(.*)$", (DEPLOY / "systemd" / "service.env").read_text(), re.M)
    commands.append(["mission", "serve", *words.split()])
    found = [words for words in commands if words[:2] == ["mission", "serve"]]
    assert len(found) == 2
    for words in found:
        given = [word for word in words if word.startswith("--")]
        assert given and set(given) <= options["serve"], words
        after = dict(pairwise(words))
        serving.check_store(after["--store"])
        serving.parse_listen(after["--listen"])
    for path in UNITS:
        named = re.findall(r"^Environment=(MISSION_[A-Z_]+)=", path.read_text(), re.M)
        assert set(named) <= VARIABLES, path
    named = [own["name"] for container, _ in containers() for own in container.get("env", [])]
    assert {name for name in named if name.startswith("MISSION_")} <= VARIABLES


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd-analyze on the path")
def test_units_are_what_systemd_takes(tmp_path):
    for path in UNITS:
        # Only the existence of our programs in /opt is not checked.
        text = re.sub(r"/opt/mission-control/bin/\w+", sys.executable, path.read_text())
        (tmp_path / path.name).write_text(text)
    units = [str(tmp_path / path.name) for path in UNITS]
    done = subprocess.run(["systemd-analyze", "verify", *units], capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    own = tmp_path / "mission-control.service"
    safe = ["systemd-analyze", "security", "--offline=true", "--threshold=30", str(own)]
    done = subprocess.run(safe, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-300:]


def test_a_token_that_an_orchestrator_mounts_is_read_and_one_of_ours_that_others_read_is_not(tmp_path, monkeypatch):
    path = tmp_path / "viewer.token"
    path.write_text("x" * 32)
    path.chmod(0o440)
    monkeypatch.setattr(serving.os, "geteuid", lambda: path.stat().st_uid + 1)
    assert serving._token(path) == "x" * 32
    monkeypatch.undo()
    with pytest.raises(serving.BadInput, match="chmod 600"):
        serving._token(path)
