"""Change settings of an engine that runs; from its next step on they are in force.

Sequences beyond fewer rows go on to their ends; nobody new starts until there is a row.
"""

from dataclasses import replace

from headway.core.live_settings import Changes, with_changes
from headway.engine.engine import Engine
from headway.engine.policy.slo import Slo
from headway.engine.speculation import Speculation


def change_settings(engine: Engine, changes: Changes) -> None:
    """Take `changes`; raises UsageError, and changes nothing, where they cannot be."""
    settings = with_changes(engine.settings, changes, engine.started_with)
    engine.settings = settings
    scheduler = engine.scheduler
    rows = settings.max_num_seqs
    scheduler.max_num_seqs = scheduler.reclaim.max_num_seqs = scheduler.gate.batch_size = rows
    scheduler.max_num_batched_tokens = settings.max_num_batched_tokens
    policy, speculator = scheduler.policy, scheduler.drafts.speculator
    if isinstance(policy, Slo):
        policy.max_num_seqs, policy.config = rows, settings.scheduler
        policy.sheds = settings.scheduler.late == "shed"
    if isinstance(speculator, Speculation):
        most = settings.speculation.max_drafts
        speculator.config = replace(speculator.config, max_drafts=most)
