"""Who goes first and how much it may take: one file a policy, chosen by `--policy`."""

from collections.abc import Callable

from headway.core.clock import Clock
from headway.core.resolve import Settings
from headway.engine.cost import StepCost
from headway.engine.kv import KVCache
from headway.engine.policy.fair import Fair
from headway.engine.policy.fcfs import Fcfs
from headway.engine.policy.policy import Policy
from headway.engine.policy.priority import Priority
from headway.engine.policy.slo import Slo, SloRules

__all__ = ["Fair", "Fcfs", "Policy", "Priority", "Slo", "SloRules", "make_policy"]


def make_slo(settings: Settings, cost: StepCost, clock: Clock, kv: KVCache) -> Policy:
    """The policy of objectives with what the settings say of it."""
    rules = SloRules(
        lane_share=settings.lane_share,
        long_prefill_s=settings.long_prefill_s,
        aging_tokens=settings.aging_tokens,
        max_num_seqs=settings.max_num_seqs,
        shed=settings.late == "shed",
    )
    return Slo(cost, clock, rules, lambda sequence: kv.find(sequence).num_tokens)


POLICIES: dict[str, Callable[[Settings, StepCost, Clock, KVCache], Policy]] = {
    "fcfs": lambda settings, cost, clock, kv: Fcfs(),
    "priority": lambda settings, cost, clock, kv: Priority(),
    "fair": lambda settings, cost, clock, kv: Fair(),
    "slo": make_slo,
}


def make_policy(settings: Settings, cost: StepCost, clock: Clock, kv: KVCache) -> Policy:
    """The policy named by `--policy`."""
    return POLICIES[settings.policy](settings, cost, clock, kv)
