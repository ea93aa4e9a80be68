"""Error budgets as Prometheus rules, evaluated over counters that we made."""

import math
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from headway.cli.main import main
from headway.cluster.scale import ScaleTarget, servers_needed
from headway.core.service import service_classes
from headway.telemetry.budget_rules import (
    HEALTH_ALERTS,
    budget_rules,
    health_rules,
    scale_rules,
)

DEPLOY = Path(__file__).resolve().parents[3] / "deploy"
SECONDS = {"m": 60, "h": 3600, "d": 86400}
STEP_S = 60


def fires(rules: dict, missed: list[float]) -> list[str]:
    """The alerts that hold at the end of a series: the share missed in each minute.

    An alert has to hold for as long as its `for` says, minute after minute.
    """

    def share(window_s: float, end: int) -> float:
        part = missed[max(0, end - int(window_s // STEP_S)) : end]
        return sum(part) / len(part)

    names = {
        each["record"]: span(re.search(r"\[(\w+)\]", each["expr"]).group(1))
        for each in rules["groups"][0]["rules"]
        if "record" in each
    }
    found = []
    for each in rules["groups"][0]["rules"]:
        if "alert" not in each:
            continue
        parts = re.findall(r'(\S+?)\{class=~"[^"]+"\} > (\S+)', each["expr"])
        assert len(parts) == 2
        minutes = int(span(each["for"]) // STEP_S)
        held = all(
            share(names[name], end) > float(limit)
            for end in range(len(missed) - minutes, len(missed) + 1)
            for name, limit in parts
        )
        if held:
            found.append(each["alert"])
    return found


def span(text: str) -> float:
    return float(text[:-1]) * SECONDS[text[-1]]


def of(target: float) -> dict:
    return budget_rules(service_classes().values(), target)


@pytest.mark.parametrize("target", [0.9, 0.99, 0.999])
def test_nothing_fires_within_the_budget_and_all_when_nothing_is_met(target):
    steady = [(1 - target) * 0.9] * (3 * 24 * 60)
    assert fires(of(target), steady) == []
    assert fires(of(target), [1.0] * len(steady)) == [
        "HeadwayBudgetBurnsFast",
        "HeadwayBudgetBurns",
        "HeadwayBudgetBurnsSlowly",
    ]


def test_a_fast_burn_pages_within_minutes_and_ends_soon_after_it():
    rules, calm = of(0.99), [0.0] * (3 * 24 * 60)
    assert fires(rules, calm + [1.0] * 5) == []
    assert "HeadwayBudgetBurnsFast" in fires(rules, calm + [1.0] * 12)
    assert fires(rules, calm + [1.0] * 12 + [0.0] * 6) == []


def test_a_slow_burn_is_a_ticket_alone():
    assert fires(of(0.99), [0.02] * (3 * 24 * 60)) == ["HeadwayBudgetBurnsSlowly"]


def test_a_large_budget_has_alerts_that_can_fire():
    """At a target of 0.9 nothing burns 14.4 times as fast as allowed: 10 times is all."""
    limits = re.findall(r"> (\S+)", yaml.safe_dump(of(0.9), width=1000))
    assert max(map(float, limits)) == 0.8


def test_classes_without_objectives_have_no_budget():
    rules = yaml.safe_dump(of(0.9))
    assert "interactive" in rules
    assert "batch" not in rules


def test_a_prefix_and_classes_reach_every_alert_of_health():
    rules = yaml.safe_dump(health_rules(service_classes().values(), "vllm"), width=1000)
    assert "headway:" not in rules and "vllm:engine_restarts_total" in rules
    assert 'class=~"default|interactive|standard"' in rules and "batch" not in rules


@pytest.mark.parametrize("target", [0.9, 0.95, 0.99])
def test_the_rule_of_scale_gives_the_servers_of_the_scaler(target):
    """PromQL evaluated as Python: its functions are two, its metrics two numbers."""
    [rule] = scale_rules(target)["rules"]
    formula = re.sub(r"sum by \(model_name\) \(headway:(\w+)\)", r"\1", rule["expr"])
    for asked in (0.3, 1.0, 2.4, 7.7, 30.0):
        for busy in (8, 48, 300, 2000):
            names = {"engines_asked": asked, "num_requests_admitted": busy}
            functions = {"sqrt": math.sqrt, "clamp_min": max, "__builtins__": {}}
            found = math.ceil(eval(formula, functions, names) - 1e-9)
            goal = ScaleTarget(attainment=target, most=200)
            few = 2 if busy < 10 else int(busy < 100)  # a normal for a Poisson of few
            assert abs(found - servers_needed(goal, asked, busy)[0]) <= few, (asked, busy)


BROKEN = """
rule_files: [{rules}]
evaluation_interval: 30s
tests:
- interval: 30s
  input_series:
  - {{series: 'headway:engines_asked{{model_name="m",kind="decode"}}', values: 2.0x40}}
  - {{series: 'headway:engines_asked{{model_name="m",kind="prefill"}}', values: 0.4x40}}
  - {{series: 'headway:num_requests_admitted{{model_name="m"}}', values: 48x40}}
  - {{series: 'up{{job="headway-server"}}', values: 1x4 0x40}}
  - {{series: 'headway:engines{{role="both"}}', values: 0x40}}
  - {{series: 'headway_gateway:upstream_up{{upstream="a"}}', values: 0x40}}
  - {{series: 'headway_gateway:upstream_up{{upstream="b"}}', values: {upstream}x40}}
  - {{series: 'headway:queue_age_seconds{{class="default"}}', values: 40x40}}
  - {{series: 'headway:queue_age_seconds{{class="batch"}}', values: 4000x40}}
  - {{series: 'headway:kv_cache_usage_perc', values: 0.97x40}}
  - {{series: 'headway:engine_restarts_total', values: 0x10 1x40}}
  - {{series: 'headway:kv_disk_failures_total{{kind="read"}}', values: 0x10 1x40}}
  - {{series: 'headway_gateway:ledger_lost_rows_total', values: 0x10 1x40}}
  - {{series: 'headway_gateway:task_failures_total{{task="t"}}', values: 0x10 1x40}}
  promql_expr_test:
  - expr: ceil(headway:servers_needed)
    eval_time: 10m
    exp_samples: [{{labels: '{{model_name="m"}}', value: 3}}]
  - expr: count by (alertname) (ALERTS{{alertstate="firing"}})
    eval_time: 15m
    exp_samples: [{alerts}]
"""


@pytest.mark.parametrize("upstream", [0, 1])
def test_each_alert_of_health_fires_on_its_fault(tmp_path, upstream):
    """In Prometheus itself, once per fault; an upstream that is left is no empty gateway."""
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (Debian: prometheus)")
    names = {each.name for each in HEALTH_ALERTS} - ({"HeadwayNoUpstream"} if upstream else set())
    twice = {} if upstream else {"HeadwayUpstreamDown": 2}
    samples = [f"{{labels: '{{alertname=\"{n}\"}}', value: {twice.get(n, 1)}}}" for n in names]
    rules, path = DEPLOY / "compose" / "rules.yml", tmp_path / "test.yml"
    path.write_text(BROKEN.format(rules=rules, upstream=upstream, alerts=", ".join(samples)))
    done = subprocess.run([promtool, "test", "rules", path], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_verb_prints_what_the_recipes_hold(capsys):
    classes = f"--classes={DEPLOY / 'classes.yaml'}"
    assert main(["doctor", "--rules", classes]) == 0
    printed = capsys.readouterr().out
    assert printed == (DEPLOY / "compose" / "rules.yml").read_text()
    component = DEPLOY / "kustomize" / "components" / "monitoring" / "rules.yaml"
    assert yaml.safe_load(component.read_text())["spec"] == yaml.safe_load(printed)
    assert (DEPLOY / "helm" / "headway" / "files" / "rules.yml").read_text() == printed
    assert main(["doctor", "--rules", "--slo-target=0.99", "--metrics-prefix=vllm"]) == 0
    assert "vllm:slo_missed:ratio_rate1h" in capsys.readouterr().out
