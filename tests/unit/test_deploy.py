"""The recipes in `deploy/`, read by the tools of their formats; each finds a planted fault."""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonpatch
import pytest
import yaml

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
BASE, OVERLAYS = DEPLOY / "kustomize" / "base", DEPLOY / "kustomize" / "overlays"
OF_OPERATORS = {"ServiceMonitor", "PrometheusRule", "Kustomization"}
"""Kinds whose schemas do not come with Kubernetes."""
TOOLS = {
    "hadolint": ["hadolint"],
    "compose": ["check-jsonschema", "--builtin-schema", "vendor.compose-spec"],
    "ecs": ["cfn-lint"],
    "kubernetes": ["kubernetes-validate", "--strict"],
}


def said(tool: str, path: Path) -> tuple[int, str]:
    """(status, what it wrote) of one of the tools."""
    name, *arguments = TOOLS[tool]
    command = [str(Path(sys.executable).with_name(name)), *arguments, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout + done.stderr


def documents(path: Path) -> list[dict[str, Any]]:
    return [each for each in yaml.safe_load_all(path.read_text()) if each]


CASES = [
    ("hadolint", DEPLOY / "Dockerfile", "USER 10001\n", "USER root\n", "DL3002"),
    ("compose", DEPLOY / "compose.yaml", "restart:", "restarts:", "restarts"),
    ("ecs", DEPLOY / "ecs" / "template.yaml", "NetworkMode:", "NetworkModus:", "NetworkModus"),
    ("kubernetes", BASE / "deployment.yaml", "startupProbe:", "startupProb:", "startupProb"),
]


@pytest.mark.parametrize(("tool", "path", "text", "fault", "name"), CASES, ids=list(TOOLS))
def test_a_recipe_is_valid_and_a_planted_fault_is_named(
    tool: str, path: Path, text: str, fault: str, name: str, tmp_path: Path
) -> None:
    status, told = said(tool, path)
    assert status == 0, told
    assert text in path.read_text()
    spoiled = tmp_path / path.name
    spoiled.write_text(path.read_text().replace(text, fault))
    status, told = said(tool, spoiled)
    assert status != 0
    assert name in told


def resources(folder: Path) -> list[dict[str, Any]]:
    """What a kustomization puts together: its resources, and its patches in the JSON form."""
    [plan] = documents(folder / "kustomization.yaml")
    found: list[dict[str, Any]] = []
    for name in plan["resources"]:
        path = (folder / name).resolve()
        found += resources(path) if path.is_dir() else documents(path)
    for patch in plan.get("patches", []):
        targets = [
            each
            for each in found
            if (each["kind"], each["metadata"]["name"])
            == (patch["target"]["kind"], patch["target"]["name"])
        ]
        assert targets, f"{folder.name}: nothing is {patch['target']}"
        for each in targets:
            found[found.index(each)] = jsonpatch.apply_patch(each, yaml.safe_load(patch["patch"]))
    return found


@pytest.mark.parametrize("folder", [BASE, *sorted(OVERLAYS.iterdir())], ids=lambda each: each.name)
def test_a_kustomization_makes_valid_resources(folder: Path, tmp_path: Path) -> None:
    found = resources(folder)
    names = [(each["kind"], each["metadata"]["name"]) for each in found]
    assert len(set(names)) == len(names)
    checked = [each for each in found if each["kind"] not in OF_OPERATORS]
    path = tmp_path / "all.yaml"
    path.write_text(yaml.safe_dump_all(checked))
    status, told = said("kubernetes", path)
    assert status == 0, told


def test_all_name_the_same_pods_and_ports() -> None:
    """A service, a budget and a monitor that select nobody are valid, and of no use."""
    by_kind = {each["kind"]: each for each in resources(OVERLAYS / "monitoring")}
    pod = by_kind["Deployment"]["spec"]["template"]
    labels, container = pod["metadata"]["labels"], pod["spec"]["containers"][0]
    assert by_kind["Deployment"]["spec"]["selector"]["matchLabels"] == labels
    assert by_kind["Service"]["spec"]["selector"] == labels
    assert by_kind["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"] == labels
    ports = {port["name"] for port in container["ports"]}
    assert {port["targetPort"] for port in by_kind["Service"]["spec"]["ports"]} <= ports
    monitor = by_kind["ServiceMonitor"]["spec"]
    assert monitor["selector"]["matchLabels"] == by_kind["Service"]["metadata"]["labels"]
    assert monitor["endpoints"][0]["port"] in {
        p["name"] for p in by_kind["Service"]["spec"]["ports"]
    }
    claimed = {
        v["persistentVolumeClaim"]["claimName"]
        for v in pod["spec"]["volumes"]
        if "persistentVolumeClaim" in v
    }
    assert claimed == {by_kind["PersistentVolumeClaim"]["metadata"]["name"]}
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["spec"]["volumes"]}


def test_every_recipe_lets_running_answers_end() -> None:
    """Each gives the server longer to end than the drain takes by default."""
    from headway.config.options import ServerOptions

    drain_s = ServerOptions().drain_timeout
    pod = resources(BASE)[0]["spec"]["template"]["spec"]
    compose = documents(DEPLOY / "compose.yaml")[0]["services"]["headway"]
    assert pod["terminationGracePeriodSeconds"] > drain_s + 5
    assert int(compose["stop_grace_period"].removesuffix("s")) > drain_s
    assert "StopTimeout: 60" in (DEPLOY / "ecs" / "template.yaml").read_text()
    assert (
        yaml.safe_load((DEPLOY / "helm/headway/values.yaml").read_text())[
            "terminationGracePeriodSeconds"
        ]
        > drain_s + 5
    )


def test_compose_mounts_what_is_there() -> None:
    services = documents(DEPLOY / "compose.yaml")[0]["services"]
    paths = [
        v.split(":")[0] for name in ("prometheus", "grafana") for v in services[name]["volumes"]
    ]
    assert all((DEPLOY / path).exists() for path in paths if path.startswith("./"))
    assert (
        DEPLOY
        / services["headway"]["build"]["context"]
        / services["headway"]["build"]["dockerfile"]
    ).exists()
    source = documents(DEPLOY / "compose/grafana/provisioning/datasources/prometheus.yaml")[0]
    assert source["datasources"][0]["url"] == "http://prometheus:9090"


CHART = DEPLOY / "helm" / "headway"


def helm(*arguments: str) -> str:
    """What helm writes; the package index has it for Linux on x86-64."""
    own = Path(sys.executable).with_name("helm")
    found = str(own) if own.exists() else shutil.which("helm")
    if found is None:
        pytest.skip("helm is not installed")
    command = [found, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout


def test_a_fault_in_the_chart_is_found(tmp_path: Path) -> None:
    """In what it renders to by Kubernetes' schemas, in a template by helm."""
    chart, path = tmp_path / "headway", tmp_path / "all.yaml"
    shutil.copytree(CHART, chart)
    template = chart / "templates" / "deployment.yaml"
    whole = template.read_text()
    template.write_text(whole.replace("containers:", "contains:", 1))
    path.write_text(helm("template", "headway", str(chart)))
    status, told = said("kubernetes", path)
    assert status != 0 and "'containers' is a required property" in told
    template.write_text(whole.replace("}}", "}", 1))
    with pytest.raises(subprocess.CalledProcessError):
        helm("lint", str(chart))


def test_the_chart_gives_what_the_kustomization_gives(tmp_path: Path) -> None:
    """The same container as the base's, by hand kept alike."""
    helm("lint", str(CHART))
    path = tmp_path / "all.yaml"
    path.write_text(helm("template", "headway", str(CHART)))
    status, told = said("kubernetes", path)
    assert status == 0, told
    rendered = next(each for each in documents(path) if each["kind"] == "Deployment")
    ours, theirs = (
        each["spec"]["template"]["spec"]["containers"][0] for each in (resources(BASE)[0], rendered)
    )
    for name in (
        "startupProbe",
        "readinessProbe",
        "livenessProbe",
        "securityContext",
        "volumeMounts",
    ):
        assert ours[name] == theirs[name]
