"""The KubeRay manifest, read offline: its pods by Kubernetes' schemas, its application by ours."""

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from headway.cluster import ray_app

MANIFEST = Path(__file__).resolve().parents[3] / "deploy" / "kuberay" / "rayservice.yaml"
TEXT = {"type": "string"}
COUNT = {"type": "integer", "minimum": 0}
PARAMS = {"type": "object", "additionalProperties": TEXT}
POD = {"type": "object", "required": ["spec"]}


def only(required: list[str], **properties: Any) -> dict[str, Any]:
    """An object of these properties and no others."""
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


WORKERS = only(
    ["groupName", "replicas", "minReplicas", "maxReplicas", "template"],
    groupName=TEXT,
    replicas=COUNT,
    minReplicas=COUNT,
    maxReplicas=COUNT,
    rayStartParams=PARAMS,
    template=POD,
)
CLUSTER = only(
    ["rayVersion", "headGroupSpec", "workerGroupSpecs"],
    rayVersion=TEXT,
    enableInTreeAutoscaling={"type": "boolean"},
    authOptions=only(["mode"], mode={"enum": ["token", "disabled"]}),
    headGroupSpec=only(["template"], rayStartParams=PARAMS, template=POD),
    workerGroupSpecs={"type": "array", "items": WORKERS, "minItems": 1},
)
RAY_SERVICE = only(
    ["apiVersion", "kind", "metadata", "spec"],
    apiVersion={"const": "ray.io/v1"},
    kind={"const": "RayService"},
    metadata={"type": "object", "required": ["name"]},
    spec=only(["serveConfigV2", "rayClusterConfig"], serveConfigV2=TEXT, rayClusterConfig=CLUSTER),
)
"""The fields that we use of the resource (KubeRay's API reference), no others."""


@pytest.fixture
def service() -> dict[str, Any]:
    found: dict[str, Any] = next(iter(yaml.safe_load_all(MANIFEST.read_text())))
    return found


def application(service: dict[str, Any]) -> dict[str, Any]:
    [found] = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"]
    return dict(found)


def pods(service: dict[str, Any]) -> list[dict[str, Any]]:
    """The pods that its groups make, as resources of their own."""
    cluster = service["spec"]["rayClusterConfig"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    return [
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": f"pod-{number}", **group["template"].get("metadata", {})},
            "spec": group["template"]["spec"],
        }
        for number, group in enumerate(groups)
    ]


def test_the_resource_has_the_fields_of_a_rayservice_and_a_planted_fault_is_named(service):
    jsonschema.validate(service, RAY_SERVICE)
    spoiled = copy.deepcopy(service)
    cluster = spoiled["spec"]["rayClusterConfig"]
    cluster["workerGroupSpec"] = cluster.pop("workerGroupSpecs")
    with pytest.raises(jsonschema.ValidationError, match="workerGroupSpec"):
        jsonschema.validate(spoiled, RAY_SERVICE)


def test_its_pods_and_its_service_are_valid(service, tmp_path):
    others = list(yaml.safe_load_all(MANIFEST.read_text()))[1:]
    for each in [*pods(service), *others]:
        path = tmp_path / "resource.yaml"
        path.write_text(yaml.safe_dump(each))
        command = [str(Path(sys.executable).with_name("kubernetes-validate")), "--strict"]
        done = subprocess.run([*command, str(path)], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr


def test_the_application_is_ours_and_its_arguments_are_known(service):
    found = application(service)
    module, _, name = found["import_path"].partition(":")
    assert getattr(sys.modules[module], name) is ray_app.app
    wanted = ray_app.parse_arguments(found["args"])
    cluster = service["spec"]["rayClusterConfig"]
    (group,) = cluster["workerGroupSpecs"]
    assert group["maxReplicas"] >= wanted.most and group["minReplicas"] >= wanted.least
    for pod, other in zip(pods(service), [wanted.drain_s] * 2, strict=True):
        assert pod["spec"]["terminationGracePeriodSeconds"] > other
    (worker,) = group["template"]["spec"]["containers"]
    assert float(worker["resources"]["requests"]["cpu"]) >= wanted.num_cpus
    mounts = [mount["mountPath"] for mount in worker["volumeMounts"]]
    assert any(wanted.folder.startswith(mount + "/") for mount in mounts)


def test_clients_find_the_gateway_on_the_head_alone(service):
    *_, balancer = yaml.safe_load_all(MANIFEST.read_text())
    head, *workers = pods(service)
    selector = balancer["spec"]["selector"]
    assert selector.items() <= head["metadata"]["labels"].items()
    for worker in workers:
        assert not selector.items() <= worker["metadata"]["labels"].items()
    wanted = ray_app.parse_arguments(application(service)["args"])
    start = service["spec"]["rayClusterConfig"]["headGroupSpec"]["rayStartParams"]
    assert f'\\"{wanted.gateway_resource}\\"' in start["resources"]
    (port,) = head["spec"]["containers"][0]["ports"]
    assert port["containerPort"] == wanted.port
    assert float(start["num-cpus"]) < wanted.num_cpus, "a server would fit on the head"
