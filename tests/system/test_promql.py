"""Every metric that a recipe asks Prometheus for is served by a real server or gateway."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from live_gateway import LiveGateway
from live_server import LiveServer
from prometheus_client.parser import text_string_to_metric_families

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
STRINGS, BRACES = re.compile(r'"(?:[^"\\]|\\.)*"'), re.compile(r"\{[^}]*\}|\[[^\]]*\]")
GROUPING = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\([^)]*\)")
WORD = re.compile(r"(?<![\w:.])([A-Za-z_][\w:]*)(?!\s*\()(?![\w:])")
OPERATORS = {"and", "or", "unless", "bool", "offset"}
OF_PROMETHEUS = {"up"}


def metrics_of(expression: str) -> set[str]:
    """Metrics of a PromQL expression: words that are no function, label or operator."""
    text = GROUPING.sub(" ", BRACES.sub(" ", STRINGS.sub('""', expression)))
    return set(WORD.findall(text)) - OPERATORS


def test_names_are_found_in_expressions() -> None:
    hard = (
        'sum by (le, job) (rate(a:x_bucket{class=~"b|c{",d!="e"}[$__rate_interval])) / on () '
        "group_left () sum(a:y_total) * 1e6 or histogram_quantile(0.9, z offset 5m) and up == 0"
    )
    assert metrics_of(hard) == {"a:x_bucket", "a:y_total", "z", "up"}


def documents(path: Path) -> Iterator[Any]:
    yield from (each for each in yaml.safe_load_all(path.read_text()) if each)


def values_of(content: Any, names: tuple[str, ...]) -> Iterator[str]:
    """The texts under these names, at any depth."""
    if isinstance(content, dict):
        for name, value in content.items():
            if name in names and isinstance(value, str):
                yield value
            else:
                yield from values_of(value, names)
    elif isinstance(content, list):
        for each in content:
            yield from values_of(each, names)


def expressions() -> Iterator[tuple[str, str]]:
    """(file, PromQL) of rules, dashboards and autoscalers, and the names of CloudWatch."""
    for path in (DEPLOY / "grafana").glob("*.json"):
        board = json.loads(path.read_text())
        yield from ((path.name, text) for text in values_of(board["panels"], ("expr",)))
        variables = [each for each in board["templating"]["list"] if each["type"] == "query"]
        for variable in variables:
            yield path.name, re.sub(r"label_values\((.*), \w+\)", r"\1", variable["query"])
    files = [*DEPLOY.glob("kustomize/**/*.yaml"), *DEPLOY.glob("compose/*.yml")]
    for path in [*files, DEPLOY / "helm" / "headway" / "files" / "rules.yml"]:
        for content in documents(path):
            for text in values_of(content, ("expr", "query")):
                yield str(path.relative_to(DEPLOY)), text
    [names] = re.findall(r"\^headway:\((.*)\)\$", (DEPLOY / "ecs" / "template.yaml").read_text())
    for name in re.sub(
        r"num_requests_\((\w+)\|(\w+)\)", r"num_requests_\1|num_requests_\2", names
    ).split("|"):
        yield "ecs", f"headway:{name}"


def recorded() -> set[str]:
    """Names that the recording rules make."""
    paths = [DEPLOY / "compose" / "rules.yml"]
    return {
        name for path in paths for each in documents(path) for name in values_of(each, ("record",))
    }


def served(live: LiveServer | LiveGateway) -> dict[str, str]:
    """Each sample name in a process's `/metrics`, with the kind of its metric."""
    status, text = live.get("/metrics")
    assert status == 200
    suffixes = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
    return {
        family.name + suffix: family.type
        for family in text_string_to_metric_families(
            text if isinstance(text, str) else text.decode()
        )
        for suffix in suffixes[family.type]
    }


def test_recipes_ask_for_metrics_that_are_served(server: LiveServer) -> None:
    gateway = LiveGateway(server.url)
    try:
        kinds = served(server) | served(gateway)
    finally:
        gateway.close()
    asked = list(expressions())
    known = kinds.keys() | recorded() | OF_PROMETHEUS
    unknown = {
        (file, name) for file, text in asked for name in metrics_of(text) if name not in known
    }
    assert unknown == set()
    assert {file.split("/")[0].split(".")[0] for file, _ in asked} >= {
        *("headway", "gateway", "kustomize", "compose", "helm", "ecs")
    }
    # a rate of a gauge, and the bare value of a counter's growth, are nonsense that evaluates
    rates = {name for _, text in asked for name in re.findall(r"(?:rate|increase)\(([\w:]+)", text)}
    assert {name for name in rates if kinds[name] == "gauge"} == set()
