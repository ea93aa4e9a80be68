"""Prometheus rules for error budgets, made from the service classes and the promised share.

A share of 0.9 leaves a budget of one miss in ten. The burn rate is the share of missed requests
over the allowed share. An alert needs a long window, so that short peaks do not fire it, and a
short one, so that it ends soon (Google, The Site Reliability Workbook, chapter 5):

    page     14.4 over 1 h and 5 min: 2% of thirty days' budget in an hour
    page     6 over 6 h and 30 min: 5% in six hours
    ticket   1 over 3 d and 6 h: at this rate it is spent when they are over

A budget of 0.1 cannot burn 14.4 times as fast: with every request missed the rate is 10. Such a
rate is limited so that the alert fires at `MAX_MISSED_SHARE`: here at 8, where 80% miss.
"""

from collections.abc import Iterable
from dataclasses import dataclass
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
