"""The recipes in `deploy/`, rendered and read by tools of their formats, which find faults."""

import dataclasses
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import jsonpatch
import pytest
import yaml

import headway
from headway.cli.main import VERBS, main
from headway.config.options import ServerOptions
from headway.config.options.field import flag_name
from headway.gateway.config import DNS_SCHEME

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
KUSTOMIZE, CHART = DEPLOY / "kustomize", DEPLOY / "helm" / "headway"
BASE, EXAMPLE = KUSTOMIZE / "base", KUSTOMIZE / "example"
COMPONENTS = sorted((KUSTOMIZE / "components").iterdir())
ALL = ("--values", str(CHART / "ci" / "all-values.yaml"))
HPA = ("--set=gateway.enabled=false", "--set=autoscaling.enabled=true,autoscaling.kind=hpa")
CLAIM = ("--set=model.create.enabled=true",)
OF_OPERATORS = {"ServiceMonitor", "PrometheusRule", "ScaledObject"}
"""Kinds whose schemas do not come with Kubernetes."""
TOOLS = {
    "hadolint": ["hadolint"],
    "compose": ["check-jsonschema", "--builtin-schema", "vendor.compose-spec"],
    "ecs": ["cfn-lint"],
    "kubernetes": ["kubernetes-validate", "--strict"],
}
Resource = dict[str, Any]


def report_of(tool: str, path: Path) -> tuple[int, str]:
    """(status, what it wrote) of one of the tools."""
    name, *arguments = TOOLS[tool]
    program = Path(sys.executable).with_name(name)
    if not program.exists():
        pytest.skip(f"{name} is not installed")
    command = [str(program), *arguments, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout + done.stderr


def documents(path: Path) -> list[Resource]:
    return [each for each in yaml.safe_load_all(path.read_text()) if each]


CASES = [
    ("hadolint", DEPLOY / "Dockerfile", "USER 10001\n", "USER root\n", "DL3002"),
    ("compose", DEPLOY / "compose.yaml", "restart:", "restarts:", "restarts"),
    ("ecs", DEPLOY / "ecs" / "template.yaml", "NetworkMode:", "NetworkModus:", "NetworkModus"),
    ("kubernetes", BASE / "server.yaml", "startupProbe:", "startupProb:", "startupProb"),
]


@pytest.mark.parametrize(("tool", "path", "text", "fault", "name"), CASES, ids=list(TOOLS))
def test_a_recipe_is_valid_and_a_planted_fault_is_named(
    tool: str, path: Path, text: str, fault: str, name: str, tmp_path: Path
) -> None:
    status, report = report_of(tool, path)
    assert status == 0, report
    assert text in path.read_text()
    copy = tmp_path / path.name
    copy.write_text(path.read_text().replace(text, fault))
    status, report = report_of(tool, copy)
    assert status != 0
    assert name in report


# ── kustomize ───────────────────────────────────────────────────────────────────────────────


def resources(folder: Path, components: Sequence[Path] = ()) -> list[Resource]:
    """What a kustomization puts together, with these components beside its own."""
    [plan] = documents(folder / "kustomization.yaml")
    found: list[Resource] = []
    for name in plan.get("resources", []):
        path = (folder / name).resolve()
        found += resources(path) if path.is_dir() else documents(path)
    for component in [*(folder / name for name in plan.get("components", [])), *components]:
        [part] = documents(component / "kustomization.yaml")
        for name in part.get("resources", []):
            found += documents(component / name)
        change(part, found)
    change(plan, found)
    return found


def change(plan: Resource, found: list[Resource]) -> None:
    """Apply the patches, the images and the namespace of a kustomization."""
    for patch in plan.get("patches", []):
        target = patch["target"]["kind"], patch["target"]["name"]
        [number] = [n for n, each in enumerate(found) if name_of(each) == target]
        found[number] = jsonpatch.apply_patch(found[number], yaml.safe_load(patch["patch"]))
    images = {
        each["name"]: f"{each['newName']}:{each['newTag']}" for each in plan.get("images", [])
    }
    for each in found:
        if "namespace" in plan:
            each["metadata"]["namespace"] = plan["namespace"]
        for container in containers_of(each):
            name = container["image"].rpartition("/")[2].partition(":")[0]
            container["image"] = images.get(name, container["image"])


def name_of(resource: Resource) -> tuple[str, str]:
    return resource["kind"], resource["metadata"]["name"]


def containers_of(*found: Resource) -> list[Resource]:
    """The containers of Deployments, those that run first among them."""
    pods = [each["spec"]["template"]["spec"] for each in found if each["kind"] == "Deployment"]
    return [each for pod in pods for each in [*pod.get("initContainers", []), *pod["containers"]]]


@pytest.mark.parametrize("component", [None, *COMPONENTS], ids=lambda each: each and each.name)
def test_a_kustomization_makes_valid_resources(component: Path | None, tmp_path: Path) -> None:
    """The base alone, and with each component by itself."""
    check(resources(BASE, [component] if component else []), tmp_path)


def test_the_example_has_each_component(tmp_path: Path) -> None:
    [plan] = documents(EXAMPLE / "kustomization.yaml")
    assert plan["components"] == [f"../components/{each.name}" for each in COMPONENTS]
    check(resources(EXAMPLE), tmp_path)


@pytest.mark.parametrize("folder", [BASE, EXAMPLE], ids=lambda each: each.name)
def test_kubectl_makes_the_same(folder: Path) -> None:
    """What `kubectl apply -k` would send is what these tests check."""
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("kubectl is not installed")
    command = [kubectl, "kustomize", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if done.returncode and "omponent" in done.stderr:
        pytest.skip("kubectl is older than 1.21, and its kustomize knows no components")
    assert done.returncode == 0, done.stderr
    rendered = {name_of(each): each for each in yaml.safe_load_all(done.stdout) if each}
    assert rendered == {name_of(each): each for each in resources(folder)}


# ── what holds for all resources of Kubernetes ──────────────────────────────────────────────


def check(found: Sequence[Resource], folder: Path) -> None:
    """Kubernetes' schemas know all that is not an operator's, and names fit each other."""
    assert len({name_of(each) for each in found}) == len(found)
    path = folder / "all.yaml"
    path.write_text(yaml.safe_dump_all(each for each in found if each["kind"] not in OF_OPERATORS))
    status, report = report_of("kubernetes", path)
    assert status == 0, report
    by_kind: dict[str, list[Resource]] = {}
    for each in found:
        by_kind.setdefault(each["kind"], []).append(each)
    check_selectors(by_kind)
    check_volumes(by_kind)
    check_scaling(by_kind)
    check_gateway(by_kind)
    check_flags(found)


def check_selectors(by_kind: dict[str, list[Resource]]) -> None:
    """A service, a budget, a monitor or a policy that selects nothing is valid, and of no use."""
    pods = [each["spec"]["template"] for each in by_kind["Deployment"]]

    def selected(labels: dict[str, str]) -> list[Resource]:
        return [pod for pod in pods if labels.items() <= pod["metadata"]["labels"].items()]

    for each in by_kind["Deployment"]:
        assert each["spec"]["selector"]["matchLabels"].items() <= (
            each["spec"]["template"]["metadata"]["labels"].items()
        )
    for each in by_kind["Service"]:
        [pod] = selected(each["spec"]["selector"])
        ports = {port["name"] for port in pod["spec"]["containers"][0]["ports"]}
        assert {port["targetPort"] for port in each["spec"]["ports"]} <= ports
    for each in by_kind.get("PodDisruptionBudget", []):
        assert len(selected(each["spec"]["selector"]["matchLabels"])) == 1
    for each in by_kind.get("NetworkPolicy", []):
        assert len(selected(each["spec"]["podSelector"]["matchLabels"])) == 1
    services = {each["metadata"]["name"]: each for each in by_kind["Service"]}
    for each in by_kind.get("Ingress", []):
        [path] = [path for rule in each["spec"]["rules"] for path in rule["http"]["paths"]]
        assert path["backend"]["service"]["name"] in services
    for each in by_kind.get("ServiceMonitor", []):
        check_monitor(each["spec"], list(services.values()), len(pods))


def check_monitor(spec: Resource, services: list[Resource], num_pods: int) -> None:
    """Each pod is scraped by one service, and its job is a name that the alerts know."""
    wanted = spec["selector"].get("matchLabels", {})
    ways = spec["selector"].get("matchExpressions", [])
    found = [
        each
        for each in services
        if wanted.items() <= each["metadata"]["labels"].items()
        and all(each["metadata"]["labels"].get(way["key"]) in way["values"] for way in ways)
    ]
    jobs = [each["metadata"]["labels"][spec["jobLabel"]] for each in found]
    assert len(set(jobs)) == len(jobs) == num_pods
    assert all(job.startswith("headway-") for job in jobs)
    port = spec["endpoints"][0]["port"]
    assert all(port in {each["name"] for each in service["spec"]["ports"]} for service in found)


def check_volumes(by_kind: dict[str, list[Resource]]) -> None:
    """What is mounted is there; a claim is made by the recipe, or is the one with the models."""
    claims = {each["metadata"]["name"] for each in by_kind.get("PersistentVolumeClaim", [])}
    for each in by_kind["Deployment"]:
        volumes = {v["name"]: v for v in each["spec"]["template"]["spec"]["volumes"]}
        mounted = {
            m["name"] for container in containers_of(each) for m in container["volumeMounts"]
        }
        assert mounted <= volumes.keys() and volumes.keys() - mounted <= {"models"}
        named = {
            v["persistentVolumeClaim"]["claimName"]
            for v in volumes.values()
            if "persistentVolumeClaim" in v
        }
        assert named <= claims | {"headway-models"}
        if named - {"headway-models"}:
            # two pods of one rollout cannot both write to it
            assert each["spec"]["replicas"] == 1 and each["spec"]["strategy"] == {
                "type": "Recreate"
            }


def check_scaling(by_kind: dict[str, list[Resource]]) -> None:
    """What is scaled is there, and does not state a number that each apply would restore."""
    deployments = {each["metadata"]["name"]: each for each in by_kind["Deployment"]}
    for kind in ("ScaledObject", "HorizontalPodAutoscaler"):
        for each in by_kind.get(kind, []):
            assert "replicas" not in deployments[each["spec"]["scaleTargetRef"]["name"]]["spec"]


def check_gateway(by_kind: dict[str, list[Resource]]) -> None:
    """The gateway's upstream is the headless Service of the servers, asked with a key."""
    configs = [each for each in by_kind.get("ConfigMap", []) if "gateway.yaml" in each["data"]]
    for config in configs:
        row = yaml.safe_load(config["data"]["gateway.yaml"])["upstreams"][0]
        url = urlsplit(row["url"])
        [service] = [s for s in by_kind["Service"] if s["metadata"]["name"] == url.hostname]
        assert url.scheme == DNS_SCHEME and service["spec"]["clusterIP"] == "None"
        assert service["spec"]["ports"][0]["port"] == url.port
        [gateway] = [c for c in containers_of(*by_kind["Deployment"]) if c["name"] == "gateway"]
        assert row["key_env"] in {each["name"] for each in gateway["env"]}


def check_flags(found: Sequence[Resource]) -> None:
    """Each flag in a container's arguments is an option of its verb."""
    for container in containers_of(*found):
        verb, *arguments = container.get("args", ["serve"])
        known = {
            flag_name(f.name) for table in VERBS[verb].tables for f in dataclasses.fields(table)
        }
        flags = {each.partition("=")[0] for each in arguments if each.startswith("--")}
        assert flags <= known, container["name"]


def test_gateways_of_recipes_start_with_their_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--dry-run` of each gateway.yaml names its routes; a planted fault is an error."""
    texts = [
        (DEPLOY / "compose" / "gateway.yaml").read_text(),
        *(
            each["data"]["gateway.yaml"]
            for each in [*resources(BASE), *rendered_chart(*ALL)]
            if each["kind"] == "ConfigMap" and "gateway.yaml" in each["data"]
        ),
    ]
    assert len(texts) == 3
    path = tmp_path / "gateway.yaml"
    for text in texts:
        path.write_text(text)
        assert main(["gateway", str(path), "--dry-run"]) == 0
        assert "servers" in capsys.readouterr().out
        path.write_text(text.replace("key_env", "key_evn"))
        assert main(["gateway", str(path), "--dry-run"]) == 2


# ── Helm ────────────────────────────────────────────────────────────────────────────────────


def helm(*arguments: str) -> str:
    """What helm writes; the package index has it for Linux on x86-64."""
    own = Path(sys.executable).with_name("helm")
    program = str(own) if own.exists() else shutil.which("helm")
    if program is None:
        pytest.skip("helm is not installed")
    command = [program, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout


def rendered_chart(*values: str) -> list[Resource]:
    text = helm("template", "headway", str(CHART), *values)
    return [each for each in yaml.safe_load_all(text) if each]


@pytest.mark.parametrize("values", [(), ALL, HPA, CLAIM], ids=["default", "all", "hpa", "claim"])
def test_the_chart_makes_valid_resources(values: tuple[str, ...], tmp_path: Path) -> None:
    helm("lint", "--strict", str(CHART), *values)
    found = rendered_chart(*values)
    check(found, tmp_path)
    if values == ALL:
        kinds = {each["kind"] for each in found}
        assert kinds > OF_OPERATORS | {"Ingress", "NetworkPolicy", "PersistentVolumeClaim"}
        secret = [c["name"] for c in containers_of(*found) if "OPENAI_API_KEY" in str(c["env"])]
        assert secret == ["gateway"], "servers have no use for the keys of providers"


def test_all_values_are_another_than_the_default() -> None:
    """The file of all values states each option of the chart in another way."""
    default, stated = (
        yaml.safe_load(path.read_text()) for path in (CHART / "values.yaml", Path(ALL[1]))
    )
    assert stated.keys() == default.keys() - {"keys", "resources", "terminationGracePeriodSeconds"}
    assert [name for name in stated if stated[name] == default[name]] == []


def test_a_fault_in_the_chart_is_found(tmp_path: Path) -> None:
    """In what it renders to by Kubernetes' schemas, in a template by helm, in values by theirs."""
    chart, path = tmp_path / "headway", tmp_path / "all.yaml"
    shutil.copytree(CHART, chart)
    template = chart / "templates" / "server.yaml"
    whole = template.read_text()
    template.write_text(whole.replace(" containers:", " contains:", 1))
    path.write_text(helm("template", "headway", str(chart)))
    status, report = report_of("kubernetes", path)
    assert status != 0 and "'containers' is a required property" in report
    template.write_text(whole.replace("}}", "}", 1))
    with pytest.raises(subprocess.CalledProcessError):
        helm("lint", str(chart))
    for fault in ("replicaCounts=2", "replicaCount=0", "autoscaling.kind=vpa", "keys="):
        with pytest.raises(subprocess.CalledProcessError) as error:
            helm("template", "headway", str(CHART), f"--set={fault}")
        assert fault.partition("=")[0].split(".")[-1] in error.value.stderr


def test_the_chart_gives_what_the_kustomization_gives() -> None:
    """The same pods as the base's, by hand kept alike."""
    ours = {name_of(each): each for each in resources(BASE)}
    theirs = {name_of(each): each for each in rendered_chart()}
    assert ours.keys() - theirs.keys() == {("PersistentVolumeClaim", "headway-models")}
    assert theirs.keys() <= ours.keys()
    for name in (("Deployment", "headway-server"), ("Deployment", "headway-gateway")):
        pods = [each[name]["spec"]["template"]["spec"] for each in (ours, theirs)]
        for container in pods[1]["containers"]:
            assert container.pop("imagePullPolicy") == "IfNotPresent"
        assert pods[0] == pods[1], name
        assert ours[name]["spec"]["strategy"] == theirs[name]["spec"]["strategy"]
    for name in (("Service", "headway"), ("Service", "headway-servers")):
        assert ours[name]["spec"]["ports"] == theirs[name]["spec"]["ports"]


# ── all recipes ─────────────────────────────────────────────────────────────────────────────


def test_all_recipes_name_the_image_of_this_version() -> None:
    """One tag everywhere: of kustomize, Helm, Compose, KubeRay, and of the page's commands."""
    version = headway.__version__
    images = {each["image"] for each in containers_of(*resources(BASE), *rendered_chart())}
    compose = documents(DEPLOY / "compose.yaml")[0]["services"]
    images |= {compose[name]["image"] for name in ("gateway", "headway")}
    assert images == {f"headway:{version}"}
    gpu = resources(BASE, [KUSTOMIZE / "components" / "gpu"])
    assert f"headway-cuda:{version}" in {each["image"] for each in containers_of(*gpu)}
    [chart] = documents(CHART / "Chart.yaml")
    assert chart["version"] == chart["appVersion"] == version
    files = [DEPLOY / "Dockerfile", DEPLOY / "kuberay" / "rayservice.yaml"]
    for path in [*files, DEPLOY.parent / "docs" / "deploy.md"]:
        tags = {
            word.partition(":")[2].rstrip("`.,;")
            for word in path.read_text().split()
            if word.rpartition("/")[2].startswith(("headway:", "headway-cuda:", "headway-ray:"))
        }
        assert tags == {version}, path.name


def test_every_recipe_lets_running_answers_end() -> None:
    """Each gives the server longer to end than the drain takes by default."""
    drain_s = ServerOptions().drain_timeout
    compose = documents(DEPLOY / "compose.yaml")[0]["services"]
    for each in [*resources(BASE), *rendered_chart(*ALL)]:
        if each["kind"] == "Deployment":
            pod = each["spec"]["template"]["spec"]
            assert pod["terminationGracePeriodSeconds"] > drain_s + 5
    for name in ("gateway", "headway"):
        assert int(compose[name]["stop_grace_period"].removesuffix("s")) > drain_s
    assert "StopTimeout: 60" in (DEPLOY / "ecs" / "template.yaml").read_text()


def test_compose_mounts_what_is_there() -> None:
    services = documents(DEPLOY / "compose.yaml")[0]["services"]
    paths = [
        volume.split(":")[0]
        for service in services.values()
        for volume in service["volumes"]
        if volume.startswith("./")
    ]
    assert len(paths) >= 6 and all((DEPLOY / path).exists() for path in paths)
    build = services["headway"]["build"]
    assert (DEPLOY / build["context"] / build["dockerfile"]).exists()
    source = documents(DEPLOY / "compose/grafana/provisioning/datasources/prometheus.yaml")[0]
    assert source["datasources"][0]["url"] == "http://prometheus:9090"
    # the gateway and Prometheus find each server by the name of its service
    [row] = documents(DEPLOY / "compose" / "gateway.yaml")[0]["upstreams"]
    assert row["url"] == "dns+http://headway:8000/v1"
    jobs = documents(DEPLOY / "compose" / "prometheus.yml")[0]["scrape_configs"]
    assert jobs[0]["dns_sd_configs"][0]["names"] == ["headway"]
    assert all(job["job_name"].startswith("headway-") for job in jobs)
    # Grafana lets in nobody without the password, which has no default
    assert services["grafana"]["environment"]["GF_SECURITY_ADMIN_PASSWORD"].startswith(
        "${GRAFANA_PASSWORD:?"
    )
    assert "GF_AUTH_ANONYMOUS_ENABLED" not in services["grafana"]["environment"]


def test_ray_is_probed_by_http() -> None:
    """The operator's own probes run wget in the container, and the image has none."""
    groups = documents(DEPLOY / "kuberay" / "rayservice.yaml")[0]["spec"]["rayClusterConfig"]
    for group in [groups["headGroupSpec"], *groups["workerGroupSpecs"]]:
        [container] = group["template"]["spec"]["containers"]
        for probe in ("readinessProbe", "livenessProbe"):
            assert container[probe]["httpGet"] == {"path": "/api/healthz", "port": 52365}
