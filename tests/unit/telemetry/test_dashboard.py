"""The server's dashboard draws each row of the registry, and the scrape config its path.

That every metric of a recipe is served, by real processes, is in `tests/system/test_promql.py`.
"""

import json
import re
from pathlib import Path

import yaml
from prometheus_client.parser import text_string_to_metric_families

from headway.core.clock import VirtualClock
from headway.gateway.metrics import FAMILIES
from headway.telemetry.registry import ROWS
from telemetry_cases import telemetry

DEPLOY = Path(__file__).resolve().parents[3] / "deploy"
NAME = re.compile(r"headway:([a-z0-9_]+)(\{[^}]*\})?")
SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}


def expressions():
    board = json.loads((DEPLOY / "grafana" / "headway.json").read_text())
    for variable in board["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["query"]
    for panel in board["panels"]:
        for target in panel["targets"]:
            yield target["expr"]


def test_the_dashboard_refers_to_names_that_exist():
    served = {row.name + suffix for row in ROWS for suffix in SUFFIXES[row.kind]}
    used = [match[1] for text in expressions() for match in NAME.finditer(text)]
    assert len(used) > 40 and set(used) <= served


def test_its_labels_exist_too():
    labels = {row.name: {"model_name", "engine", *row.labels} for row in ROWS}
    for text in expressions():
        for grouped in re.findall(r"by \(([^)]*)\) \(rate\(headway:([a-z0-9_]+)", text):
            names = {name.strip() for name in grouped[0].split(",")} - {"le"}
            row = re.sub(r"_(total|bucket|sum|count)$", "", grouped[1])
            row = row if row in labels else grouped[1]
            assert names <= labels[row], text


def test_every_row_of_the_registry_is_drawn():
    drawn = " ".join(expressions())
    missing = [row.name for row in ROWS if f"headway:{row.name}" not in drawn]
    assert missing == []


def test_every_metric_of_the_gateway_is_drawn():
    drawn = (DEPLOY / "grafana" / "gateway.json").read_text()
    assert [name for name in FAMILIES if f"headway_gateway:{name}" not in drawn] == []


def test_attainment_is_of_requests_judged():
    """Met over judged: a request that missed two objectives is one, and 0 of 0 is no series."""
    (attainment,) = [text for text in expressions() if "slo_met_total" in text]
    assert "/ sum by (class) (rate(headway:slo_requests_total{" in attainment
    assert "slo_missed" not in attainment


def test_the_served_names_are_the_rows():
    text = telemetry(VirtualClock()).render().decode()
    families = {family.name for family in text_string_to_metric_families(text)}
    old = {f"headway:{row.vllm}" for row in ROWS if row.vllm}
    assert families == {f"headway:{row.name}" for row in ROWS} | old


def test_prometheus_scrapes_the_metrics_path():
    config = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
    (job,) = config["scrape_configs"]
    assert job["metrics_path"] == "/metrics" and job["static_configs"][0]["targets"]
