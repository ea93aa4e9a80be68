"""`headway doctor --rules`: error budgets of a server's classes, and health, as alerts."""

import sys
from typing import TYPE_CHECKING

import yaml

from headway.config.options import ServerOptions
from headway.core.errors import UsageError
from headway.telemetry.budget_rules import budget_rules, health_rules, scale_rules

if TYPE_CHECKING:
    from headway.cli.main import VerbCall


def rules(call: "VerbCall") -> int:
    """Print a rule file for the classes, objectives and target of `serve`."""
    if call.positionals:
        raise UsageError(
            "--rules takes options alone.", "headway doctor --rules --classes classes.yaml"
        )
    from headway.cli.build_server import make_classes

    options: ServerOptions = call.options[ServerOptions]
    classes, prefix = make_classes(options).values(), options.metrics_prefix
    content = budget_rules(classes, options.slo_target, prefix)
    content["groups"] += [
        health_rules(classes, prefix),
        scale_rules(options.slo_target, prefix),
    ]
    yaml.safe_dump(content, sys.stdout, sort_keys=False, width=100)
    return 0
