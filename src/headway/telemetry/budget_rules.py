"""Error budgets as Prometheus rules, from the classes and the share that a server promises to meet.

A share of 0.9 leaves a budget of one miss in ten. The burn rate is how many times faster than
allowed requests miss; alerts look at a long window, so that they matter, and at a short one, so
that they end soon (Google, The Site Reliability Workbook, chapter 5):

    page     14.4 over 1 h and 5 min: 2% of thirty days' budget in an hour
    page     6 over 6 h and 30 min: 5% in six hours
    ticket   1 over 3 d and 6 h: at this rate it is spent when they are over

A budget as large as 0.1 cannot burn 14.4 times as fast: with everything missed it burns 10 times.
Such a rate is taken as far as `REACHABLE`: here 8, where 80% of the requests miss.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from headway.core.service import ServiceClass
from headway.core.slo import Slo

REACHABLE = 0.8
"""No alert waits for more than this share of misses."""


@dataclass(frozen=True, slots=True)
class Alert:
    """One pair of windows: it fires where both burn faster than `burn`."""

    name: str
    severity: str
    long: str
    short: str
    burn: float
    lasts: str
    """For how long before anybody is told."""


ALERTS = (
    Alert("HeadwayBudgetBurnsFast", "page", "1h", "5m", 14.4, "2m"),
    Alert("HeadwayBudgetBurns", "page", "6h", "30m", 6.0, "15m"),
    Alert("HeadwayBudgetBurnsSlowly", "ticket", "3d", "6h", 1.0, "1h"),
)


def budget_rules(
    classes: Iterable[ServiceClass], target: float, prefix: str = "headway"
) -> dict[str, Any]:
    """A rule file: the share of requests missed by class and window, and the alerts.

    Classes that promise nothing have no budget. A target of 1 has none to spend: every miss pages.
    """
    names = sorted(each.name for each in classes if each.slo != Slo())
    windows = dict.fromkeys(window for alert in ALERTS for window in (alert.short, alert.long))
    rules = [record(prefix, window) for window in windows]
    if names:
        rules += [alert_rule(prefix, each, names, 1.0 - target) for each in ALERTS]
    return {"groups": [{"name": "headway-error-budget", "interval": "30s", "rules": rules}]}


def missed(prefix: str, window: str) -> str:
    """The name under which the share missed in a window is recorded."""
    return f"{prefix}:slo_missed:ratio_rate{window}"


def record(prefix: str, window: str) -> dict[str, Any]:
    """1 - met / judged; nothing where nothing was judged."""
    met, judged = (
        f"sum by (model_name, class) (rate({prefix}:{name}_total[{window}]))"
        for name in ("slo_met", "slo_requests")
    )
    return {"record": missed(prefix, window), "expr": f"1 - {met} / {judged}"}


def alert_rule(prefix: str, alert: Alert, names: list[str], budget: float) -> dict[str, Any]:
    """The alert of one pair of windows, for every class that promises something."""
    share = min(alert.burn * budget, REACHABLE)
    which = f'{{class=~"{"|".join(names)}"}}'
    both = (
        f"{missed(prefix, window)}{which} > {share:.4g}" for window in (alert.long, alert.short)
    )
    return {
        "alert": alert.name,
        "expr": " and ".join(both),
        "for": alert.lasts,
        "labels": {"severity": alert.severity},
        "annotations": {
            "summary": "{{ $labels.model_name }}, class {{ $labels.class }}: "
            f"more than {share:.1%} of its requests miss their objectives over {alert.long}.",
            "description": "Ask `headway doctor` with the server's URL what limits it.",
        },
    }
