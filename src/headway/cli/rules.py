"""`headway doctor --rules`: the error budgets of a server's classes as Prometheus rules."""

import sys
from typing import TYPE_CHECKING

import yaml

from headway.config.options import ServerOptions
from headway.core.errors import UsageError
from headway.telemetry.budget_rules import budget_rules

if TYPE_CHECKING:
    from headway.cli.main import VerbCall


def rules(call: "VerbCall") -> int:
    """Print a rule file for the classes, objectives and target of `serve`."""
    if call.positionals:
        raise UsageError(
            "--rules takes options alone.", "headway doctor --rules --classes classes.yaml"
        )
    from headway.cli.serve import make_classes

    options: ServerOptions = call.options[ServerOptions]
    groups = budget_rules(
        make_classes(options).values(), options.slo_target, options.metrics_prefix
    )
    yaml.safe_dump(groups, sys.stdout, sort_keys=False, width=100)
    return 0
