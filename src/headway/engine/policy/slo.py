"""As many requests as possible within their objectives, and every request is served in the end.

Sequences that lack more than a token are sorted anew in each step (`PrefillClass`):

    aged      overtaken by more tokens of later requests than its bound: by arrival
    on time   short, and can still meet its deadline (`policy.on_time`): by deadline
    late      short, and cannot: by arrival; first, where all on time can spare the time
    long      by its predicted prefill without load: those on time by deadline, then the shortest
    idle      of a class that takes what others leave

A step lasts as long as the decodes in it can bear, and no longer than `max_step_s`, since a new
request waits for its end. Its time for prompts is divided by `lane_share`: with a tenth, aged and
long prompts get a tenth of it while others wait, and all that those leave. Ten long prompts slow a
chat a little and never stop it; a prompt of P tokens is overtaken by its bound and 9 P tokens at
most, for then no later request goes before it.

    decodes 40 ms │ aged, long 10% │ on time, late 90%   │ the rest: long, then idle
    0            40               48                   120 ms

While slots or blocks are short a waiting prompt takes as long as it takes until one is free
(`perf.rates`), where that is longer than its prefill.

Users whose counter is above the lowest come later, in steps of half the credit of `policy.users`;
the aging bound of a user with more waiting requests than others is higher.
"""

from collections.abc import Iterator
from collections.abc import Sequence as TypingSequence
from enum import IntEnum
from itertools import chain
from typing import NamedTuple, Self

from headway.admit.queue import QueueOrder
from headway.config.resolve import Settings
from headway.config.scheduler_config import SchedulerConfig
from headway.core.clock import Clock
from headway.engine.kv import KVCache
from headway.engine.policy.fcfs import Fcfs
from headway.engine.policy.on_time import Due, choose_on_time
from headway.engine.policy.policy import PrefillTurn, decode_work, list_prefills
from headway.engine.policy.slo_classes import (
    Groups,
    Job,
    PrefillClass,
    Ranked,
    order_aged,
    order_long,
    order_short,
)
from headway.engine.policy.slo_state import (
    SloState,
    arrival_order,
    deadline_s,
    effective_tpot_s,
    halfway_step_s,
    misses_objectives,
    num_uncomputed,
    remaining_prefill_s,
    slo_state,
)
from headway.engine.policy.users import Users
from headway.engine.sequence import RUNNING, WAITING, Sequence
from headway.perf.model import MIN_CHUNK_TOKENS, NOTHING, StepModel, Work

TPOT_TARGET_SHARE = 0.8
"""Share of the TPOT objective that a step aims at: predictions err by a tenth (lab log)."""
TPOT_CATCH_UP_SHARE = 0.65
"""Share that a step aims at when one of its decodes is behind its objective."""
RECOMPUTE_CHUNK_TOKENS = 512
"""Assumed tokens of a step when the recomputation of a preempted sequence is predicted."""
UNLIMITED_STEP_S = 3600.0
"""Upper bound of a step (seconds) when no request has a TTFT objective."""
MAX_STEP_S = 0.25
"""Upper bound of a step (seconds) on a machine that is not slow."""
MIN_STEP_IN_TOKENS = 4
"""The upper bound of a step is at least this many single-token steps."""
PREFIX_LOOKUPS_PER_STEP = 8
"""Waiting sequences looked up in the prefix cache in a step; 100 blocks take 20 µs."""
IDLE_AGING_FACTOR = 16
"""How many times higher the aging bound of idle classes is."""
PROMPTS_WAIT_TOKENS = 64
"""Waiting prompt tokens from which draft tokens take time away from prompts."""
USER_CREDIT_TOKENS = 8192.0
"""Tokens that a user may be ahead of the least served before its requests come later."""


class PreemptionLoss(IntEnum):
    """What preempting a sequence costs of its objectives; the least goes first."""

    ALREADY_MISSED = 0
    """Nothing: it misses them anyway."""
    NONE = 1
    """Nothing: it meets them even after it is computed again."""
    OBJECTIVE = 2
    """An objective: it meets them now, and would miss one when computed again."""


class StepTime(NamedTuple):
    """How a step's seconds are divided: decodes, prompts, and of those the reserved share."""

    decode_s: float
    prompts_s: float
    reserved_s: float
    """For aged and long prompts, while others wait too."""


class SloPolicy(Fcfs):
    """The policy of deadlines, predicted step times and counters of users."""

    reclaims = True
    queue_order = QueueOrder.DEADLINE

    def __init__(
        self, cost: StepModel, clock: Clock, kv: KVCache, config: SchedulerConfig, max_num_seqs: int
    ) -> None:
        super().__init__(cost.windows)
        self.cost, self.kv, self.clock = cost, kv, clock
        self.config = config
        self.max_num_seqs = max_num_seqs
        self.credit = USER_CREDIT_TOKENS
        self.sheds = config.late == "shed"
        self.users = Users(USER_CREDIT_TOKENS)
        self.prefill_token_s = self.unloaded_token_s = 0.0
        self._idle_ids, self._ttft_ids = set[int](), set[int]()
        """Ids of sequences of idle classes, and of those with a TTFT objective."""
        self._step_s = self._long_step_s = MAX_STEP_S
        """Upper bounds of the step (seconds): for all prompts, and for long and idle ones."""
        self._long_waits = self._has_draft_tokens = False
        self._work, self._num_decodes = NOTHING, 0
        """The work of the step planned so far, and how many of its rows are decodes."""
        self._shed, self._prefills, self._running_prefills = [list[Sequence]() for _ in range(3)]
        self._startable: TypingSequence[Sequence] = ()
        """The waiting sequences, where a slot is free."""
        self._next_lookup = 0
        self._one_token = cost.add_chunk(NOTHING, 0, 1)

    @classmethod
    def make(cls, settings: Settings, cost: StepModel, clock: Clock, kv: KVCache) -> Self:
        """Return the policy of an engine with these settings."""
        return cls(cost, clock, kv, settings.scheduler, settings.max_num_seqs)

    def add(self, sequence: Sequence) -> None:
        """Register its user and objectives; its time runs from its arrival at the server."""
        sequence.arrived_s = sequence.arrived_s or self.clock.now_s()
        sequence.policy_state = SloState(self.kv.match_prefix(sequence).num_tokens)
        self.users.add(sequence)
        if sequence.request.terms.idle_only:
            self._idle_ids.add(sequence.sequence_id)
        if sequence.request.terms.ttft_s is not None:
            self._ttft_ids.add(sequence.sequence_id)

    def remove(self, sequence: Sequence) -> None:
        """Forget it, and unregister its user with its last sequence."""
        super().remove(sequence)
        self._idle_ids.discard(sequence.sequence_id)
        self._ttft_ids.discard(sequence.sequence_id)

    def num_matched_tokens(self, sequence: Sequence) -> int:
        """Return its tokens in the prefix cache at the last look-up."""
        return slo_state(sequence).num_matched

    def drain_shed(self) -> list[Sequence]:
        """Return the sequences shed since the last call: `--late shed`, and too late."""
        shed, self._shed = self._shed, []
        return shed

    # ── decodes, and the length of the step ─────────────────────────────────────────────────

    def select_decodes(
        self, rows: list[Sequence], running: list[Sequence], waiting: TypingSequence[Sequence]
    ) -> list[Sequence]:
        """Return all, but of idle classes only as many as the TPOT of others allows.

        For each waiting sequence of another class one idle decode pauses: it may be preempted.
        """
        self._prefills = []
        now_s = self.clock.now_s()
        self._running_prefills = list_prefills(running) if len(rows) < len(running) else []
        idle = self._list_idle(rows)
        decodes = [s for s in rows if not self.is_idle(s)] if idle else rows
        self._work = decode_work(decodes, self.cost.windows)
        max_s, decode_s = self._max_step_s(), self.cost.seconds(self._work)
        self._step_s, self._long_step_s = self.step_limits(decodes, max_s, now_s, decode_s)
        self._startable = waiting if len(running) < self.max_num_seqs else ()
        if not idle:
            return decodes
        num_candidates = sum(not self.is_idle(s) for s in waiting)
        return self._add_idle_decodes(decodes, idle[: max(len(idle) - num_candidates, 0)])

    def _add_idle_decodes(self, decodes: list[Sequence], idle: list[Sequence]) -> list[Sequence]:
        """Return `decodes` and those of `idle` that the step has time for; alone, all of them."""
        if not decodes:
            self._work = decode_work(idle, self.cost.windows)
            return idle
        for sequence in idle:
            work = self.cost.add_chunk(self._work, sequence.computed, sequence.num_missing)
            if self.cost.seconds(work) > self._long_step_s:
                break
            decodes.append(sequence)
            self._work = work
        return decodes

    def _max_step_s(self) -> float:
        """Upper bound of a step (seconds): a request arriving during the step must still be able
        to meet TTFT; at least four single-token steps."""
        if not self._ttft_ids:
            return UNLIMITED_STEP_S
        return max(MAX_STEP_S, MIN_STEP_IN_TOKENS * self.cost.seconds(self._one_token))

    def step_limits(
        self, rows: list[Sequence], max_s: float, now_s: float, decode_s: float
    ) -> tuple[float, float]:
        """Return how long a step may last for `rows` to meet TPOT: for prompts that can be on time,
        and for long and idle ones; both at most `max_s`.

        Token k is due k objectives after the first, so time that quick steps have saved may be
        spent. Where a step brings several tokens, the last of them counts. Where decodes take most
        of the objective, prompts get half of the rest (`halfway_step_s`). A sequence without an
        objective, or that misses it anyway, sets no limit.
        """
        step_s = long_step_s = max_s
        for sequence in [s for s in rows if s.policy_state.long_step_s < max_s]:
            state = slo_state(sequence)
            tpot_s = effective_tpot_s(sequence) if state.tpot_s is None else state.tpot_s
            if not tpot_s:
                continue
            objective_s = state.tokens_per_step * tpot_s
            num_generated = len(sequence.tokens) - sequence.num_prompt
            last_token = num_generated + state.tokens_per_step - 1
            due_s = state.first_token_s + last_token * tpot_s * TPOT_TARGET_SHARE - now_s
            if due_s < 0 and misses_objectives(sequence, now_s, decode_s):
                continue
            catch_up_s = objective_s * TPOT_CATCH_UP_SHARE
            if due_s < step_s and catch_up_s < step_s:
                first_s, num_steps = state.first_token_s - now_s, last_token / state.tokens_per_step
                half_s = halfway_step_s(first_s, num_steps, objective_s, decode_s)
                step_s = min(step_s, max(due_s, catch_up_s, half_s))
            long_step_s = min(long_step_s, state.long_step_s)
        return step_s, long_step_s

    def draft_limits(self, decodes: TypingSequence[Sequence]) -> tuple[Work, float, bool]:
        """Return the step's work, its upper bound in seconds, and whether prompts wait."""
        num_waiting = sum(map(num_uncomputed, chain(self._running_prefills, self._startable)))
        return self._work, self._step_s, num_waiting >= PROMPTS_WAIT_TOKENS

    def on_drafts_scheduled(self, sequence: Sequence, num_drafts: int) -> None:
        """Add draft tokens to the step's work."""
        self._work = self.cost.with_drafts(self._work, len(sequence.tokens), num_drafts)

    def reserve_drafting(self, seconds: float) -> None:
        """Take the time of drafting from that of prompts."""
        self._step_s -= seconds
        self._long_step_s -= seconds

    # ── prompts ─────────────────────────────────────────────────────────────────────────────

    def prefill_turns(
        self,
        running: list[Sequence],
        waiting: TypingSequence[Sequence],
        decodes: list[Sequence],
        budget: int,
    ) -> Iterator[PrefillTurn]:
        """Yield the turns of each class in order, each within its part of the step's time."""
        prefills = [s for s in self._running_prefills if s.state == RUNNING]  # not yet preempted
        self._prefills = [*prefills, *waiting]
        self.prefill_token_s = self.cost.token_s(self._step_s, self._work, budget)
        self.unloaded_token_s = self.cost.token_s(MAX_STEP_S, NOTHING, budget)
        is_full = len(running) >= self.max_num_seqs and not self._list_idle(running)
        if not is_full or self.sheds:  # else no waiting sequence can start: it need not be sorted
            prefills = self._prefills
        if not prefills:
            return
        if not is_full:
            self._look_up_prefixes(waiting)
        self._num_decodes = self._work.num_sampled
        min_tokens = min(MIN_CHUNK_TOKENS, budget)
        groups = self._classify(prefills)
        time = self._divide_step(groups)
        yield from self._aged_turns(groups, time, min_tokens)
        yield from self._short_turns(groups, time, min_tokens)
        yield from self._long_and_idle_turns(groups, time, 0 if decodes else min_tokens)

    def _divide_step(self, groups: Groups) -> StepTime:
        """Return how the step's time is divided between decodes and prompts."""
        decode_s = self.cost.seconds(self._work)
        prompts_s = max(self._step_s - decode_s, 0.0)
        reserved_s = prompts_s * self.config.lane_share if groups.aged or groups.long else 0.0
        return StepTime(decode_s, prompts_s, reserved_s)

    def _aged_turns(self, groups: Groups, time: StepTime, min_tokens: int) -> Iterator[PrefillTurn]:
        """Yield the aged within the reserved share, or within all time of prompts.

        They have all of it where one is beyond its hard bound, or no short one is behind them. The
        slots and blocks that they lack are reserved for them.
        """
        aged = groups.aged
        overdue = any(slo_state(s).num_overtaken >= self.hard_aging_bound(s) for s in aged)
        is_alone = not (groups.on_time or groups.late)
        share_s = time.prompts_s if overdue or is_alone else time.reserved_s
        min_tokens = min_tokens if overdue else 0
        yield from self._offer(aged, time.decode_s + share_s, min_tokens, is_blocking=True)

    def _short_turns(
        self, groups: Groups, time: StepTime, min_tokens: int
    ) -> Iterator[PrefillTurn]:
        """Yield those on time, then late ones, within what the reserved share leaves.

        Where aged ones came first their part of the step is in its work already.
        """
        share_s = time.prompts_s if groups.aged else time.prompts_s - time.reserved_s
        yield from self._offer(groups.on_time, time.decode_s + share_s, min_tokens)
        yield from self._offer(groups.late, time.decode_s + share_s, 0)

    def _long_and_idle_turns(
        self, groups: Groups, time: StepTime, min_tokens: int
    ) -> Iterator[PrefillTurn]:
        """Yield long ones, then idle classes: the reserved share, and what others left.

        They make the step no longer than `LONG_TPOT_SHARE` of TPOT, but for the reserved share.
        """
        long_s = max(self._long_step_s, self.cost.seconds(self._work) + time.reserved_s)
        until_s = min(time.decode_s + time.prompts_s, long_s)
        yield from self._offer(groups.long, until_s, min_tokens)
        yield from self._offer(groups.idle, until_s, min_tokens)

    def _offer(
        self, group: list[Sequence], until_s: float, min_tokens: int, *, is_blocking: bool = False
    ) -> Iterator[PrefillTurn]:
        """Yield turns of `group` while the step lasts less than `until_s`.

        The first prompt of a step gets at least `min_tokens`.
        """
        for sequence in group:
            is_first = self._work.num_sampled == self._num_decodes
            max_tokens = max(self._chunk_tokens(sequence, until_s), min_tokens * is_first)
            if max_tokens > 0:
                yield PrefillTurn(sequence, max_tokens, is_blocking)

    def _chunk_tokens(self, sequence: Sequence, until_s: float) -> int:
        """Return how many tokens of `sequence` fit into a step of `until_s`."""
        start = sequence.computed or slo_state(sequence).num_matched
        return self.cost.chunk(until_s, self._work, start, num_uncomputed(sequence))

    # ── classes ─────────────────────────────────────────────────────────────────────────────

    def _classify(self, prefills: list[Sequence]) -> Groups:
        """Return `prefills` by class, each class in its order; shed those that are too late."""
        now_s = self.clock.now_s()
        token_s = self.prefill_token_s / (1 - self.config.lane_share * self._long_waits)
        slot_s = self.slot_rate.slot_s(now_s)
        jobs: list[list[Job]] = [[] for _ in PrefillClass]
        for sequence in prefills:
            due = Due(deadline_s(sequence), remaining_prefill_s(sequence, token_s, slot_s))
            jobs[self._prefill_class(sequence)].append((due, sequence))
        short = self._rank_by_users(jobs[PrefillClass.SHORT], now_s)
        long = self._rank_by_users(jobs[PrefillClass.LONG], short.end_s)
        if self.sheds:
            for late in short.late + long.late:
                self._shed_late(late, now_s, token_s)
        aged = order_aged(jobs[PrefillClass.AGED])
        self._long_waits = bool(aged or long.on_time or any(long.late))
        on_time, late = order_short(short, token_s, slot_s)
        idle = [sequence for _, sequence in jobs[PrefillClass.IDLE]]
        return Groups(aged=aged, on_time=on_time, late=late, long=order_long(long), idle=idle)

    def _prefill_class(self, sequence: Sequence) -> PrefillClass:
        """Return the class of `sequence`; long is what takes long without load."""
        if self.is_aged(sequence):
            return PrefillClass.AGED
        if sequence.request.terms.idle_only:
            return PrefillClass.IDLE
        if self.unloaded_token_s * num_uncomputed(sequence) > self.config.long_prefill_s:
            return PrefillClass.LONG
        return PrefillClass.SHORT

    def is_idle(self, sequence: Sequence) -> bool:
        """Return whether it takes only what others leave; not so once it has aged."""
        return sequence.request.terms.idle_only and not self.is_aged(sequence)

    def _list_idle(self, rows: list[Sequence]) -> list[Sequence]:
        """Return those of `rows` that are idle."""
        return [s for s in rows if self.is_idle(s)] if self._idle_ids else []

    def is_aged(self, sequence: Sequence) -> bool:
        """Return whether it was overtaken beyond its bound."""
        return slo_state(sequence).num_overtaken >= self.aging_bound(sequence)

    def aging_bound(self, sequence: Sequence) -> int:
        """Return the soft aging bound: tokens of later requests that may overtake it.

        The bound of a user with more sequences than its share is higher: it is overtaken by what
        is the share of others.
        """
        factor = IDLE_AGING_FACTOR if sequence.request.terms.idle_only else 1
        return round(self.config.aging_tokens * factor * self.users.crowding_factor(sequence))

    def hard_aging_bound(self, sequence: Sequence) -> float:
        """Return the tokens of later requests after which it gets all time of prompts."""
        return self.aging_bound(sequence) + len(sequence.tokens) * (1 / self.config.lane_share - 1)

    def _rank_by_users(self, jobs: list[Job], now_s: float) -> Ranked:
        """Return which jobs are on time, users with fewer tokens first.

        The rank of a user is its counter above the lowest one, in steps of half the credit.
        """
        if not jobs:
            return Ranked(end_s=now_s)
        step, lowest = max(self.credit / 2, 1.0), self.users.min_counter
        by_rank: dict[int, list[Job]] = {}
        for job in jobs:
            rank = int((self.users.counter(job[1]) - lowest) / step)
            by_rank.setdefault(rank, []).append(job)
        ranked = Ranked(end_s=now_s)
        for rank in sorted(by_rank):
            chosen = choose_on_time(by_rank[rank], ranked.end_s)
            ranked.on_time += chosen.on_time
            ranked.late.append(chosen.late)
            ranked.end_s = chosen.end_s
            ranked.slack_s = min(ranked.slack_s, chosen.slack_s)
        return ranked

    def _shed_late(self, late: list[Sequence], now_s: float, token_s: float) -> None:
        """Take waiting sequences out of `late` that would be late even if served next."""
        for sequence in list(late):
            alone_s = now_s + token_s * num_uncomputed(sequence)
            is_new = sequence.state == WAITING and not sequence.num_generated
            if is_new and alone_s > deadline_s(sequence):
                late.remove(sequence)
                self._shed.append(sequence)

    def _look_up_prefixes(self, waiting: TypingSequence[Sequence]) -> None:
        """Look up the prefixes of a few waiting sequences, all of them in turn over the steps."""
        for _ in range(min(PREFIX_LOOKUPS_PER_STEP, len(waiting))):
            self._next_lookup = (self._next_lookup + 1) % len(waiting)
            sequence = waiting[self._next_lookup]
            slo_state(sequence).num_matched = self.kv.match_prefix(sequence).num_tokens

    # ── what is scheduled ───────────────────────────────────────────────────────────────────

    def on_scheduled(self, sequence: Sequence, num_tokens: int) -> None:
        """Charge its user, add to the step's work, and age earlier prompts that wait."""
        self.users.charge(sequence, num_tokens)
        if self._has_draft_tokens and num_tokens == 1 and sequence.computed >= sequence.num_prompt:
            slo_state(sequence).count_step()
        if self._prefills:
            self._work = self.cost.add_chunk(self._work, sequence.computed, num_tokens)
            for other in self._prefills:
                if other.sequence_id < sequence.sequence_id:
                    slo_state(other).num_overtaken += num_tokens

    def on_drafts_accepted(self, sequence: Sequence, num_drafts: int) -> None:
        """Charge its user for accepted draft tokens; rejected ones are free."""
        self.users.charge(sequence, num_drafts)
        slo_state(sequence).count_accepted(num_drafts)
        self._has_draft_tokens = True

    # ── preemption and slots ────────────────────────────────────────────────────────────────

    def victims(self, running: list[Sequence]) -> list[Sequence]:
        """Return `running`, those first whose preemption costs the least goodput.

        Idle classes, then by `PreemptionLoss`, then the fewest tokens to compute again; the aged
        come last.
        """
        return sorted(running, key=self._victim_rank)

    def _victim_rank(self, sequence: Sequence) -> tuple[bool, bool, PreemptionLoss, int]:
        """Return the sort key of `victims`."""
        is_aged, is_idle = self.is_aged(sequence), self.is_idle(sequence)
        return is_aged, not is_idle, self._preemption_loss(sequence), sequence.computed

    def _preemption_loss(self, sequence: Sequence) -> PreemptionLoss:
        """Return which objectives a preemption of `sequence` costs now."""
        now_s, decode_s = self.clock.now_s(), self.cost.seconds(self._work)
        if misses_objectives(sequence, now_s, decode_s):
            return PreemptionLoss.ALREADY_MISSED
        recompute_s = self.cost.predict_prefill_s(sequence.computed, 0, RECOMPUTE_CHUNK_TOKENS)
        if misses_objectives(sequence, now_s + recompute_s, decode_s):
            return PreemptionLoss.OBJECTIVE
        return PreemptionLoss.NONE

    def preemptible_for(self, candidate: Sequence, running: list[Sequence]) -> list[Sequence]:
        """Return sequences of idle classes for all others, youngest first."""
        if self.is_idle(candidate):
            return []
        return self._list_idle(running[::-1])

    def may_reclaim(self, claimant: Sequence, waiting: TypingSequence[Sequence]) -> bool:
        """Return whether no earlier waiting sequence has aged: the next slot is for those."""
        min_bound = self.config.aging_tokens
        aged = (s for s in waiting if slo_state(s).num_overtaken >= min_bound and self.is_aged(s))
        return all(arrival_order(s) >= arrival_order(claimant) for s in aged)

    def may_yield(self, sequence: Sequence, claimant: Sequence) -> bool:
        """Return whether `sequence` has not aged."""
        return not self.is_aged(sequence)
