"""Scheduling policies: the order of sequences and their tokens; one file each (`--policy`)."""

from headway.config.resolve import Settings
from headway.core.clock import Clock
from headway.engine.kv import KVCache
from headway.engine.policy.fair import Fair
from headway.engine.policy.fcfs import Fcfs
from headway.engine.policy.policy import Policy
from headway.engine.policy.priority import Priority
from headway.engine.policy.slo import SloPolicy
from headway.perf.model import StepModel

__all__ = ["Fair", "Fcfs", "Policy", "Priority", "SloPolicy", "make_policy"]


POLICIES: dict[str, type[Policy]] = {
    "fcfs": Fcfs,
    "priority": Priority,
    "fair": Fair,
    "slo": SloPolicy,
}


def make_policy(settings: Settings, cost: StepModel, clock: Clock, kv: KVCache) -> Policy:
    """Return the policy named by `--policy`."""
    return POLICIES[settings.scheduler.policy].make(settings, cost, clock, kv)
