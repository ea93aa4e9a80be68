"""Recovery of a step that raised: its rows run again in halves, to find the row at fault.

    step 41 raises     [a b c d e f]
    [a b c]            runs: a, b and c have their tokens
    [d e f]            raises: [d e] runs, [f] raises alone, and fails

How much of a failed plan the runtime has applied is unknown, so each row is introduced again with
its whole block table. The KV before `start` is in place from earlier steps, the rest is written
again. A token depends only on its own sequence, so rows that are not at fault get the same tokens
as without the failure. Recurrent states are updated in place: a model with states computes the rows
from their first token.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import msgspec

from headway.core.errors import ExecutorLostError
from headway.core.plan import Executor, ScheduledSequence, StepPlan, StepResult, TierNews, run
from headway.core.request import Request, SamplingParams
from headway.engine.overlap import StepInFlight
from headway.engine.scheduler import Scheduler
from headway.engine.sequence import Sequence

OWN_REQUEST_ID = 0
"""Request id of the engine's own requests."""


@dataclass(slots=True, kw_only=True)
class Bisection:
    """Search for the rows at fault; `result` has the samples of the others, and the failures."""

    run: Callable[[StepPlan], StepResult]
    next_step: Callable[[], int]
    find: Callable[[int], Sequence | None]
    from_start: bool = False
    """Whether rows are computed from their first token, because their states were overwritten."""
    result: StepResult
    stale: list[int] = field(default_factory=list)
    """Sequences that the runtime may know; the next attempt tells it to forget them."""

    def search(self, rows: list[ScheduledSequence]) -> None:
        """Run `rows`, which raised together, in halves.

        A row that raises alone is tried once more, because the cause may be temporary, for example
        a lack of memory.
        """
        middle = (len(rows) + 1) // 2
        for half in (rows[:middle], rows[middle:]):
            if not half or self._attempt(half) is None:
                continue
            if len(half) > 1:
                self.search(half)
                continue
            error = self._attempt(half)
            if error is not None:
                self.result.failed[half[0].sequence_id] = f"{type(error).__name__}: {error}"

    def _attempt(self, rows: list[ScheduledSequence]) -> Exception | None:
        """Run `rows` as a step of their own; returns the exception, or None after taking the
        result."""
        plan = StepPlan(self.next_step(), [], [], self.stale)
        for row in rows:
            sequence = self.find(row.sequence_id)
            assert sequence is not None
            tables = [list(table) for table in sequence.block_tables]
            plan.new.append(sequence.introduction())
            row = row.without_drafts()
            if self.from_start:
                row.token_ids = sequence.tokens[: row.start] + row.token_ids
                row.start = 0
            plan.scheduled.append(msgspec.structs.replace(row, new_blocks=tables))
        self.stale = [*self.stale, *(row.sequence_id for row in rows)]
        try:
            part = self.run(plan)
        except ExecutorLostError:
            raise
        except Exception as error:
            return error
        self.stale = []
        self.result.samples += part.samples
        self.result.prompt_logprobs += part.prompt_logprobs
        self.result.failed |= part.failed
        self.result.transfers_done += part.transfers_done
        self.result.transfer_s += part.transfer_s
        self.result.transfers_failed += part.transfers_failed
        self.result.moved += part.moved
        self.result.tier = join_tier_news(self.result.tier, part.tier)
        return None


def join_tier_news(first: TierNews | None, then: TierNews | None) -> TierNews | None:
    """Concatenate the news of two attempts."""
    if first is None or then is None:
        return first or then
    lost = [*first.lost, *then.lost]
    num_bad = first.num_bad + then.num_bad
    return TierNews([*first.stored, *then.stored], lost, num_bad)


def bisect_step(
    plan: StepPlan, scheduler: Scheduler, run: Callable[[StepPlan], StepResult]
) -> StepResult:
    """Return the result of a step that raised; rows that raise alone are in its `failed`.

    A row that copies a block, or whose table shrinks, is preempted instead and computed from the
    start, because the source block may belong to another sequence now.
    """
    copying = {copy.sequence_id for copy in plan.copies}
    copying |= {shrink.sequence_id for shrink in plan.shrinks}
    for sequence in [s for s in scheduler.running if s.sequence_id in copying]:
        sequence.takes_hits = False
        scheduler.preempt(sequence, may_copy=False)
    scheduler.drafts.forget_step()
    scheduler.transfers.resend(plan.transfers)
    rows = [row for row in plan.scheduled if row.sequence_id not in copying]
    stale = [*plan.finished, *scheduler.drain_released_ids()]
    bisection = Bisection(
        run=run,
        next_step=scheduler.next_step,
        find=scheduler.by_id,
        from_start=scheduler.kv.states is not None,
        result=StepResult(plan.step, []),
        stale=[*stale, *(row.sequence_id for row in rows)],
    )
    bisection.search(rows)
    scheduler.release_ids(bisection.stale)
    order = {row.sequence_id: number for number, row in enumerate(rows)}
    bisection.result.samples.sort(key=lambda sample: order[sample.sequence_id])
    return bisection.result


def abandon(scheduler: Scheduler, steps: list[StepInFlight]) -> None:
    """Abandon steps in flight of which one raised.

    What they have done is unknown. Their sequences are preempted and computed again, one step at a
    time.
    """
    rows, now = [], scheduler.drafts.now
    for step in steps:
        scheduler.drafts.now = step.drafts
        scheduler.drafts.forget_step()
        scheduler.release_ids(step.plan.finished)
        scheduler.transfers.resend(step.plan.transfers)
        rows += list(step.rows)
    scheduler.drafts.now = now
    scheduler.overlap.steps.clear()
    scheduler.overlap.compute_again(rows)
    lost = {sequence.sequence_id for _, sequence in rows}
    for sequence in [s for s in scheduler.running[::-1] if s.sequence_id in lost]:
        scheduler.preempt(sequence, may_copy=False)


def check_runtime(executor: Executor, scheduler: Scheduler, sequence_id: int) -> None:
    """Run a one-token health check after a step without success: is the runtime broken?

    Raises RuntimeError if the check fails twice; the engine's process then ends.
    """
    request = Request(OWN_REQUEST_ID, [0], SamplingParams(temperature=0, max_tokens=1))
    probe = Sequence(
        sequence_id,
        request,
        0,
        num_groups=len(scheduler.kv.pools),
        stop_ids=frozenset(),
        max_len=2,
        seed=0,
    )
    room = scheduler.kv.extend(probe, 1)
    if room is None:
        return
    trial = Bisection(
        run=partial(run, executor),
        next_step=scheduler.next_step,
        find=lambda _: probe,
        result=StepResult(0, []),
        stale=scheduler.drain_released_ids(),
    )
    trial.search([ScheduledSequence(sequence_id, 0, [0], room[0], True)])
    scheduler.kv.release(probe)
    scheduler.release_ids([sequence_id])
    for unserved in scheduler.transfers.take(trial.result):
        scheduler.starts.recompute(unserved)
    if trial.result.failed:
        raise RuntimeError(f"The runtime fails every request: {trial.result.failed}.")
