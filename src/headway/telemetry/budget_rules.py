"""Prometheus rules for error budgets, made from the service classes and the promised share.

A share of 0.9 leaves a budget of one miss in ten. The burn rate is the share of missed requests
over the allowed share. An alert needs a long window, so that short peaks do not fire it, and a
short one, so that it ends soon (Google, The Site Reliability Workbook, chapter 5):

    page     14.4 over 1 h and 5 min: 2% of thirty days' budget in an hour
    page     6 over 6 h and 30 min: 5% in six hours
    ticket   1 over 3 d and 6 h: at this rate it is spent when they are over

A budget of 0.1 cannot burn 14.4 times as fast: with every request missed the rate is 10. Such a
rate is limited so that the alert fires at `MAX_MISSED_SHARE`: here at 8, where 80% miss.

A budget tells that users suffer; the alerts of `HEALTH_ALERTS` tell where to look, also before
they do. The names of their jobs begin with `headway`, as in the recipes of `deploy/`.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

from headway.core.service import ServiceClass
from headway.core.slo import Slo

MAX_MISSED_SHARE = 0.8
"""Upper bound of the share of misses at which an alert fires."""


@dataclass(frozen=True, slots=True)
class Alert:
    """Multi-window alert: fires where the burn rate exceeds `burn` in both windows."""

    name: str
    severity: str
    long: str
    short: str
    burn: float
    lasts: str
    """Duration that the condition must hold (`for` of the rule)."""


ALERTS = (
    Alert("HeadwayBudgetBurnsFast", "page", "1h", "5m", 14.4, "2m"),
    Alert("HeadwayBudgetBurns", "page", "6h", "30m", 6.0, "15m"),
    Alert("HeadwayBudgetBurnsSlowly", "ticket", "3d", "6h", 1.0, "1h"),
)


def budget_rules(
    classes: Iterable[ServiceClass], target: float, prefix: str = "headway"
) -> dict[str, Any]:
    """Return a rule file: the share of missed requests by class and window, and the alerts.

    A class without objectives has no budget. A target of 1 allows no miss: every miss pages.
    """
    names = sorted(each.name for each in classes if each.slo != Slo())
    windows = dict.fromkeys(window for alert in ALERTS for window in (alert.short, alert.long))
    rules = [recording_rule(prefix, window) for window in windows]
    if names:
        rules += [alert_rule(prefix, each, names, 1.0 - target) for each in ALERTS]
    return {"groups": [{"name": "headway-error-budget", "interval": "30s", "rules": rules}]}


def recorded_name(prefix: str, window: str) -> str:
    """Return the name of the recorded series: the share of missed requests in a window."""
    return f"{prefix}:slo_missed:ratio_rate{window}"


def recording_rule(prefix: str, window: str) -> dict[str, Any]:
    """Return the rule 1 - met / judged; it has no sample where no request was judged."""
    met, judged = (
        f"sum by (model_name, class) (rate({prefix}:{name}_total[{window}]))"
        for name in ("slo_met", "slo_requests")
    )
    return {"record": recorded_name(prefix, window), "expr": f"1 - {met} / {judged}"}


def alert_rule(prefix: str, alert: Alert, names: list[str], budget: float) -> dict[str, Any]:
    """Return the alert of one pair of windows, for every class with objectives."""
    share = min(alert.burn * budget, MAX_MISSED_SHARE)
    which = f'{{class=~"{"|".join(names)}"}}'
    series = (recorded_name(prefix, window) for window in (alert.long, alert.short))
    return {
        "alert": alert.name,
        "expr": " and ".join(f"{name}{which} > {share:.4g}" for name in series),
        "for": alert.lasts,
        "labels": {"severity": alert.severity},
        "annotations": {
            "summary": "{{ $labels.model_name }}, class {{ $labels.class }}: "
            f"more than {share:.1%} of its requests miss their objectives over {alert.long}.",
            "description": "Ask `headway doctor` with the server's URL what limits it.",
        },
    }


# ── health ──────────────────────────────────────────────────────────────────────────────────

GATEWAY = "headway_gateway"
"""Prefix of the gateway's metrics, whatever `--metrics-prefix` a server has."""


@dataclass(frozen=True, slots=True)
class HealthAlert:
    """One alert; `{prefix}`, `{gateway}` and `{classes}` are filled into `expr`."""

    name: str
    severity: str
    lasts: str
    expr: str
    summary: str
    description: str


HEALTH_ALERTS = (
    HealthAlert(
        "HeadwayDown",
        "page",
        "2m",
        'up{{job=~"headway.*"}} == 0',
        "{{ $labels.instance }} of {{ $labels.job }} does not answer.",
        "Look whether the process runs, and at the last lines of its log.",
    ),
    HealthAlert(
        "HeadwayNoEngine",
        "page",
        "2m",
        "sum by (job, instance, model_name) ({prefix}:engines) == 0",
        "{{ $labels.instance }} has no engine that is ready.",
        "Its log says why the engine ended: memory, weights, or a request that ends any engine.",
    ),
    HealthAlert(
        "HeadwayEngineRestarts",
        "ticket",
        "0m",
        "increase({prefix}:engine_restarts_total[15m]) > 0",
        "An engine of {{ $labels.instance }} was started again within 15 minutes.",
        "Its log says why: killed for memory, hung in a step, or a request that ends it.",
    ),
    HealthAlert(
        "HeadwayUpstreamDown",
        "ticket",
        "5m",
        "{gateway}:upstream_up == 0",
        "The gateway {{ $labels.instance }} sends nothing to {{ $labels.upstream }}.",
        "GET /stats of the gateway has its state: down, an open breaker, or not ready.",
    ),
    HealthAlert(
        "HeadwayNoUpstream",
        "page",
        "1m",
        "sum by (job, instance) ({gateway}:upstream_up) == 0",
        "The gateway {{ $labels.instance }} has no upstream left: it refuses all requests.",
        "Look at the servers behind it, and at the key that it asks them with.",
    ),
    HealthAlert(
        "HeadwayQueueIsOld",
        "ticket",
        "2m",
        '{prefix}:queue_age_seconds{{class=~"{classes}"}} > 30',
        "A request of class {{ $labels.class }} at {{ $labels.instance }} has waited over 30 s.",
        "Ask `headway doctor` with the server's URL what limits it; more servers may help.",
    ),
    HealthAlert(
        "HeadwayKvCacheFull",
        "ticket",
        "10m",
        "{prefix}:kv_cache_usage_perc > 0.95",
        "The KV cache of {{ $labels.instance }} has been over 95% full for 10 minutes.",
        "Requests are preempted or wait: give --kv-memory more, or add a server.",
    ),
    HealthAlert(
        "HeadwayKvDiskFails",
        "ticket",
        "0m",
        "increase({prefix}:kv_disk_failures_total[15m]) > 0",
        "Reads from the disk of KV blocks fail at {{ $labels.instance }}: {{ $labels.kind }}.",
        "Requests compute those tokens again. Check the disk of --kv-disk.",
    ),
    HealthAlert(
        "HeadwayLedgerLosesRows",
        "page",
        "0m",
        "increase({gateway}:ledger_lost_rows_total[15m]) > 0",
        "The gateway {{ $labels.instance }} cannot write its ledger: spend is not recorded.",
        "Make room on the volume of its --data-dir; budgets count on in memory.",
    ),
    HealthAlert(
        "HeadwayTaskFails",
        "ticket",
        "0m",
        "increase({prefix}:task_failures_total[15m]) > 0"
        " or increase({gateway}:task_failures_total[15m]) > 0",
        "The task {{ $labels.task }} of {{ $labels.instance }} fails and is started again.",
        "Its log has the traceback: please report it.",
    ),
)


def health_rules(classes: Iterable[ServiceClass], prefix: str = "headway") -> dict[str, Any]:
    """Return the rule group of `HEALTH_ALERTS`; a queue is watched in classes with objectives."""
    names = "|".join(sorted(each.name for each in classes if each.slo != Slo()))
    rules = [
        {
            "alert": each.name,
            "expr": each.expr.format(prefix=prefix, gateway=GATEWAY, classes=names),
            **({"for": each.lasts} if each.lasts != "0m" else {}),
            "labels": {"severity": each.severity},
            "annotations": {"summary": each.summary, "description": each.description},
        }
        for each in HEALTH_ALERTS
    ]
    return {"name": "headway-health", "interval": "30s", "rules": rules}


# ── scale ───────────────────────────────────────────────────────────────────────────────────

MAX_TARGET = 0.9999
"""Upper bound of the share of requests that are to find room, as no number of servers gives 1."""


def scale_rules(target: float, prefix: str = "headway") -> dict[str, Any]:
    """Return the rule group of `servers_needed`: engines with which `target` of requests find room.

    It is `cluster/scale.py` in PromQL. A demand of e engines serves n requests in progress, which
    are Poisson: s engines have room for s n / e, and by the normal approximation a share `target`
    finds it where that is n + z sqrt(n) + 0.5. So s = e (1 + (z sqrt(n) + 0.5) / n).
    """
    z = NormalDist().inv_cdf(min(target, MAX_TARGET))
    demand = f"sum by (model_name) ({prefix}:engines_asked)"
    in_progress = f"clamp_min(sum by (model_name) ({prefix}:num_requests_admitted), 1)"
    expression = f"{demand} * (1 + ({z:.3f} * sqrt({in_progress}) + 0.5) / {in_progress})"
    rule = {"record": f"{prefix}:servers_needed", "expr": expression}
    return {"name": "headway-scale", "interval": "15s", "rules": [rule]}
