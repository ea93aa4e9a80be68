"""Who goes first and how much it may take: one file a policy, chosen by `--policy`."""

from headway.engine.policy.fcfs import Fcfs
from headway.engine.policy.policy import Policy
from headway.engine.policy.priority import Priority

__all__ = ["Fcfs", "Policy", "Priority"]
