"""Record of a step: facts of the scheduler, the plan and the result in one place."""

from collections.abc import Callable
from math import inf

from headway.core.plan import ScheduledSequence, StepPlan, StepResult
from headway.core.records import RowCounts, StepRecord, count_rows
from headway.engine.grammar.grammars import Grammars
from headway.engine.overlap import StepInFlight
from headway.engine.scheduler import Scheduler
from headway.perf.model import NOTHING, StepModel, work_of

SNAPSHOT_STEPS = 20
"""Interval in steps of records with a snapshot of the cost model."""


class StepRecorder:
    """Creates the records of an engine's steps, in their order."""

    def __init__(self, scheduler: Scheduler, cost: StepModel) -> None:
        self.scheduler, self.cost = scheduler, cost
        self.count: Callable[[list[ScheduledSequence], tuple[int, ...]], RowCounts] = count_rows
        """Counts what the rows of a step do; a simulation may replace it."""
        self._ended_s: float | None = None
        self._was_idle = False

    def record(
        self,
        step: StepInFlight,
        result: StepResult,
        collected_s: float,
        grammars: Grammars | None,
        *,
        is_idle: bool,
    ) -> StepRecord:
        """Return the record of `step`, whose result was taken; the engine `is_idle` after it.

        A step that was planned while another ran began when that one ended.
        """
        started_s, planned_s = step.started_s, step.planned_s
        if step.is_ahead and self._ended_s is not None:
            started_s = planned_s = max(self._ended_s, planned_s)
        record = self._work(step.plan, result, started_s)
        if step.plan.new:
            record.num_queried_tokens, record.num_cached_tokens = step.first[:2]
            record.restored_tokens = step.first[2]
        if step.masks is not None:
            record.mask_s, record.mask_wait_s = step.masks.mask_s, step.masks.wait_s
        if grammars is not None:
            record.num_deferred = grammars.num_waiting
            record.num_waiting += record.num_deferred
            record.compiles_s = tuple(grammars.builder.take_durations())
        if self._ended_s is not None:
            since_s = started_s - self._ended_s
            record.gap_s, record.idle_s = (0.0, since_s) if self._was_idle else (since_s, 0.0)
        record.schedule_s = planned_s - started_s
        record.execute_s = collected_s - planned_s
        self._ended_s, self._was_idle = self.scheduler.clock.now_s(), is_idle
        record.update_s = self._ended_s - collected_s
        return record

    def learn(self, record: StepRecord) -> None:
        """Teach the cost model and the speculator the times of the step."""
        self.cost.observe(record)
        if record.step % SNAPSHOT_STEPS == 0:
            record.model = self.cost.snapshot()
        self.scheduler.drafts.learn(record)

    def _prefill_pace(self, plan: StepPlan) -> tuple[float, float]:
        """Return predicted seconds per prompt token, with the step's decodes and without.

        They are the policy's; for a policy without predictions, those of steps of the whole budget.
        """
        policy, cost = self.scheduler.policy, self.cost
        if policy.prefill_token_s:
            return policy.prefill_token_s, policy.unloaded_token_s
        budget = self.scheduler.max_num_batched_tokens
        decodes = [
            row.start
            for row in plan.scheduled
            if len(row.token_ids) == 1 + row.num_drafts + row.num_forced
        ]
        chunk = max(budget - len(decodes), 1)
        decode_work = work_of(decodes, cost.windows)
        return cost.token_s(inf, decode_work, chunk), cost.token_s(inf, NOTHING, budget)

    def _work(self, plan: StepPlan, result: StepResult, started_s: float) -> StepRecord:
        """Return the record without its durations."""
        scheduler, cost, timings = self.scheduler, self.cost, result.timings
        kv, policy = scheduler.kv, scheduler.policy
        used = [pool.num_used for pool in kv.pools]
        usage = max([n / (pool.num_blocks - 1) for n, pool in zip(used, kv.pools)])
        used = [sum(used)] if kv.split is not None else used
        work = self.count(plan.scheduled, cost.windows)
        token_s, alone_s = self._prefill_pace(plan)
        record = StepRecord(
            step=plan.step,
            started_s=started_s,
            num_running=len(scheduler.running),
            num_waiting=scheduler.num_waiting,
            num_tokens=work.num_tokens,
            num_sampled=work.num_sampled,
            kv_blocks_used=sum(used),
            kv_usage=usage,
            num_preemptions=scheduler.num_preemptions,
            num_decode_tokens=work.num_decode_tokens,
            attended_tokens=work.attended_tokens,
            kv_tokens_read=tuple(work.kv_tokens_read),
            group_blocks_used=tuple(used),
            prepare_s=timings.prepare_s,
            forward_s=timings.forward_s,
            sample_s=timings.sample_s,
            draft_s=timings.draft_s,
            experts_read=result.experts_read,
            prefill_s_per_token=token_s,
            alone_s_per_token=alone_s,
            slot_s=policy.slot_rate.slot_s(scheduler.clock.now_s()),
            transfer_s=result.transfer_s,
            num_drafts=work.num_drafts,
            num_forced_rows=work.num_forced_rows,
        )
        scheduler.drafts.fill(record, plan, result, cost)
        if scheduler.is_full:
            record.user_slots = scheduler.reclaim.user_slots(scheduler.running)
        if record.num_prefill_tokens:
            record.prefilling = tuple(prefilling(scheduler, plan))
        scheduler.transfers.tell(record)
        if kv.tiers is not None:
            kv.tiers.tell(record)
        return record


def prefilling(scheduler: Scheduler, plan: StepPlan) -> list[tuple[int, int, int]]:
    """Return (request id, index, tokens computed) of the rows that compute prompts."""
    prompts = []
    for row in [row for row in plan.scheduled if len(row.token_ids) > 1]:
        if len(row.token_ids) > row.num_drafts + row.num_forced + 1:
            sequence = scheduler.by_id(row.sequence_id)
            if sequence is not None:
                end = row.start + len(row.token_ids)
                prompts.append((sequence.request.request_id, sequence.index, end))
    return prompts


def count_first_scheduled(
    plan: StepPlan, scheduler: Scheduler, now_s: float
) -> tuple[int, int, dict[str, int]]:
    """Return (prompt tokens scheduled for the first time, cached ones of these, and of the cached
    ones those restored from each lower tier).

    A fork's prompt is its parent's and counts once; a resumed sequence is not new.
    """
    computed = {row.sequence_id: row.start for row in plan.scheduled}
    queried = cached = 0
    restored: dict[str, int] = {}
    for new in plan.new:
        sequence = scheduler.by_id(new.sequence_id)
        if sequence is None or sequence.first_scheduled_s is not None:
            continue
        sequence.first_scheduled_s = now_s
        if sequence.index == 0:
            sequence.num_cached = remaining = min(computed[new.sequence_id], sequence.num_prompt)
            queried += sequence.num_prompt
            cached += sequence.num_cached
            for name, count in sequence.restored.items():
                restored[name] = restored.get(name, 0) + min(count, remaining)
                remaining -= min(count, remaining)
    return queried, cached, restored
