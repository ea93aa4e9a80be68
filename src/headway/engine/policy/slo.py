"""As many requests as possible within their objectives, and nobody starves.

Who is behind is sorted anew in each step:

    aged     overtaken by more than its bound in tokens that came later: by arrival
    ahead    short, and can still make it: by deadline (`policy.on_time`)
    late     short, and too late to make it: by arrival; ahead, where all there can spare the time
             and no user has had less
    lane     long by its predicted prefill, were it alone: those in time by deadline, then the
             shortest
    idle     of a class that takes only what nobody else wants

A step lasts as long as the decodes beside it can bear, and no longer than `longest_step_s`, for a
newcomer waits for its end. Its time for prompts is divided by `lane_share`: with a tenth, the aged
and the lane get a tenth of it while somebody is ahead, and all that those leave. Ten long prompts
slow a chat a little and never stop it; a prompt of P tokens is overtaken by its bound and 9 P
tokens at most, for then nothing that came later goes before it.

    decodes 40 ms │ aged, lane 10% │ ahead, late 90%     │ what is left: lane, then idle
    0            40               48                   120 ms

While rows or blocks are short a prompt that waits takes as long as it takes until one is free
(`engine.slot_rate`), where that is longer than its prefill.

Users who have had more than the least served come behind, by steps of half the credit of
`policy.users`; who has more waiting than others waits longer before it is aged.
"""

from collections.abc import Iterator
from collections.abc import Sequence as TypingSequence
from itertools import chain
from typing import Self

from headway.admit.queue import QueueOrder
from headway.core.clock import Clock
from headway.core.resolve import Settings
from headway.core.scheduler_config import SchedulerConfig
from headway.engine.cost import LEAST_CHUNK, NOTHING, StepCost, Work
from headway.engine.kv import KVCache
from headway.engine.policy.fcfs import Fcfs
from headway.engine.policy.on_time import Due, choose_on_time
from headway.engine.policy.policy import Turn, decode_work, list_prefills
from headway.engine.policy.slo_state import (
    Groups,
    Ranked,
    SloState,
    arrival_order,
    deadline_s,
    effective_tpot_s,
    halfway_step_s,
    missed_ttft,
    num_uncomputed,
    prefill_s,
    slo_state,
)
from headway.engine.policy.users import Users
from headway.engine.sequence import RUNNING, WAITING, Sequence

TPOT_TARGET_SHARE = 0.8
"""Share of the TPOT objective that a step aims at: predictions err by a tenth (lab log)."""
TPOT_CATCH_UP_SHARE = 0.65
"""The same when a decode of the step is behind its objective: it must catch up."""
LATE_SHARE_OF_SLACK = 0.5
"""Of the time that requests in time can spare, this share is given to late requests."""
RECOMPUTE_CHUNK_TOKENS = 512
"""Assumed tokens a step when we estimate how long a preempted sequence takes to recompute."""
UNLIMITED_STEP_S = 3600.0
PREFIX_LOOKUPS_PER_STEP = 8
"""Sequences whose prefix is looked up in a step; 100 blocks take 20 µs."""
MAX_STEP_S = 0.25
"""What a step takes at most, while decodes can bear it."""
IDLE_AGING_FACTOR = 16
"""How many times longer those of idle classes age."""
PROMPTS_WAIT_TOKENS = 64
"""So many tokens of prompts, and a guess takes from them what it takes."""
USER_CREDIT_TOKENS = 8192.0
"""Tokens that a user may have had more than the least served before it comes behind."""


class Slo(Fcfs):
    """Deadlines, predictions and counters of users."""

    reclaims = True
    queue_order = QueueOrder.DEADLINE

    def __init__(
        self, cost: StepCost, clock: Clock, kv: KVCache, config: SchedulerConfig, max_num_seqs: int
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
        """Of those present the ones of idle classes, and with an objective for the first token."""
        self._step_s = self._lane_step_s = MAX_STEP_S
        self._lane_waits = self._has_draft_tokens = False
        self._work = NOTHING
        self._shed, self._prefills, self._running_prefills = [list[Sequence]() for _ in range(3)]
        self._startable: TypingSequence[Sequence] = ()
        self._next_lookup = self._num_decodes = 0
        self._one_token = cost.beside(NOTHING, 0, 1)

    @classmethod
    def make(cls, settings: Settings, cost: StepCost, clock: Clock, kv: KVCache) -> Self:
        """The policy of objectives with what the settings say of it."""
        return cls(cost, clock, kv, settings.scheduler, settings.max_num_seqs)

    def add(self, sequence: Sequence) -> None:
        """Its user is present; its clock runs from its arrival at the server."""
        sequence.arrived_s = sequence.arrived_s or self.clock.now_s()
        sequence.policy_state = SloState(self.kv.match_prefix(sequence).num_tokens)
        self.users.add(sequence)
        if sequence.request.terms.idle_only:
            self._idle_ids.add(sequence.sequence_id)
        if sequence.request.terms.ttft_s is not None:
            self._ttft_ids.add(sequence.sequence_id)

    def remove(self, sequence: Sequence) -> None:
        """Its user may be gone."""
        super().remove(sequence)
        self._idle_ids.discard(sequence.sequence_id)
        self._ttft_ids.discard(sequence.sequence_id)

    def num_matched_tokens(self, sequence: Sequence) -> int:
        """As they were when it came, or when it was last looked up."""
        return slo_state(sequence).num_matched

    def drain_shed(self) -> list[Sequence]:
        """Those that can no longer meet their objectives, where the options say to shed."""
        shed, self._shed = self._shed, []
        return shed

    # ── decodes ─────────────────────────────────────────────────────────────────────────────

    def select_decodes(
        self, rows: list[Sequence], running: list[Sequence], waiting: TypingSequence[Sequence]
    ) -> list[Sequence]:
        """All, but of idle classes only as many as the others' next tokens can bear.

        For each of other classes that waits one of them stands still: it may need the place.
        """
        self._prefills = []
        now_s = self.clock.now_s()
        self._running_prefills = list_prefills(running) if len(rows) < len(running) else []
        idle = self.idle_of(rows)
        first = [s for s in rows if not self.is_idle(s)] if idle else rows
        self._work = self.work_of(first)
        longest_s, decode_s = self.max_step_s(), self.cost.seconds(self._work)
        self._step_s, self._lane_step_s = self.step_limits(first, longest_s, now_s, decode_s)
        self._startable = waiting if len(running) < self.max_num_seqs else ()
        wanting = sum(not self.is_idle(s) for s in waiting) if idle else 0
        left = idle[: max(len(idle) - wanting, 0)]
        if not first:
            self._work = self.work_of(left)
            return left
        for sequence in left:
            more = self.cost.beside(self._work, sequence.computed, sequence.num_missing)
            if self.cost.seconds(more) > self._lane_step_s:
                break
            first.append(sequence)
            self._work = more
        return first

    def max_step_s(self) -> float:
        """How long a step may last for whoever comes meanwhile, on a slow machine four of a token.

        Where nobody has an objective for the first token, offline, it may last as it will.
        """
        return (
            max(MAX_STEP_S, 4 * self.cost.seconds(self._one_token))
            if self._ttft_ids
            else UNLIMITED_STEP_S
        )

    def is_idle(self, sequence: Sequence) -> bool:
        """Whether it takes only what nobody else wants; not so once it has aged."""
        return sequence.request.terms.idle_only and not self.is_aged(sequence)

    def idle_of(self, rows: list[Sequence]) -> list[Sequence]:
        """Those of `rows` that are idle."""
        if not self._idle_ids:
            return []
        return [s for s in rows if s.request.terms.idle_only and not self.is_aged(s)]

    def step_limits(
        self, rows: list[Sequence], longest_s: float, now_s: float, decode_s: float
    ) -> tuple[float, float]:
        """How long a step may last for the decodes `rows` to meet their TPOT, and how long for less
        reason; no longer than `longest_s`.

        Token k is due k objectives after the first: time that earlier ones saved may be spent.
        Where steps bring several of its tokens, the last of them is due so much later. Where
        decodes take most of that, half of what they leave is for prompts (`halfway_s`). One that
        has no objective, or cannot meet it any more, bears any step.
        """
        step_s = calm_s = longest_s
        for sequence in [s for s in rows if s.policy_state.lane_step_s < longest_s]:
            kept: SloState = sequence.policy_state
            pace_s = effective_tpot_s(sequence) if kept.tpot_s is None else kept.tpot_s
            if not pace_s:
                continue
            burst_s = kept.tokens_per_step * pace_s
            last = len(sequence.tokens) - sequence.num_prompt + kept.tokens_per_step - 1
            due_s = kept.first_token_s + last * pace_s * TPOT_TARGET_SHARE - now_s
            if due_s < 0 and self.misses(sequence, now_s, decode_s):
                continue
            if due_s < step_s and burst_s * TPOT_CATCH_UP_SHARE < step_s:
                half_s = halfway_step_s(
                    kept.first_token_s - now_s, last / kept.tokens_per_step, burst_s, decode_s
                )
                step_s = min(step_s, max(due_s, burst_s * TPOT_CATCH_UP_SHARE, half_s))
            calm_s = min(calm_s, kept.lane_step_s)
        return step_s, calm_s

    def misses(self, sequence: Sequence, from_s: float, decode_s: float) -> bool:
        """Whether it misses an objective for good where it goes on at `from_s`, undisturbed."""
        tpot_s = sequence.request.terms.tpot_s
        if sequence.first_token_s is None:
            return from_s > deadline_s(sequence)
        if tpot_s is None or missed_ttft(sequence):
            return missed_ttft(sequence)
        late_s = from_s - sequence.first_token_s - sequence.num_generated * tpot_s
        left = sequence.max_len - len(sequence.tokens)
        return late_s > left * max(tpot_s - decode_s / slo_state(sequence).tokens_per_step, 0.0)

    def work_of(self, rows: list[Sequence]) -> Work:
        """What `rows` do as decodes."""
        return decode_work(rows, self.cost.windows)

    def draft_limits(self, decodes: TypingSequence[Sequence]) -> tuple[Work, float, bool]:
        """Their work, what they can bear to meet their objectives, and whether prompts wait."""
        waits = (
            sum(map(num_uncomputed, chain(self._running_prefills, self._startable)))
            >= PROMPTS_WAIT_TOKENS
        )
        return self._work, self._step_s, waits

    def on_drafts_scheduled(self, sequence: Sequence, num_drafts: int) -> None:
        """The step grows."""
        self._work = self.cost.with_drafts(self._work, len(sequence.tokens), num_drafts)

    def reserve_drafting(self, seconds: float) -> None:
        """So much less of it is for prompts."""
        self._step_s -= seconds
        self._lane_step_s -= seconds

    # ── turns ───────────────────────────────────────────────────────────────────────────────

    def prefill_turns(
        self,
        running: list[Sequence],
        waiting: TypingSequence[Sequence],
        decodes: list[Sequence],
        budget: int,
    ) -> Iterator[Turn]:
        """The aged, those ahead, the lane, the idle, each with its share of the step's time."""
        lacking = [
            s for s in self._running_prefills if s.state == RUNNING
        ]  # some made way for decodes
        self._prefills = behind = [*lacking, *waiting]
        self.prefill_token_s = self.cost.token_s(self._step_s, self._work, budget)
        self.unloaded_token_s = self.cost.token_s(MAX_STEP_S, NOTHING, budget)
        is_full = len(running) >= self.max_num_seqs and not self.idle_of(running)
        if is_full and not self.sheds:  # nobody who waits can start: why sort them
            behind = lacking
        if not behind:
            return
        if not is_full:
            self.look_up_prefixes(waiting)
        self._num_decodes = self._work.num_sampled
        decode_s = self.cost.seconds(self._work)
        room_s = max(self._step_s - decode_s, 0.0)
        groups = self.sort(behind)
        reserved_s = room_s * self.config.lane_share if groups.aged or groups.lane else 0.0
        overdue = any(slo_state(s).num_overtaken >= self.hard_aging_bound(s) for s in groups.aged)
        others = groups.on_time or groups.late
        aged_s = room_s if overdue or not others else reserved_s
        ahead_s = room_s if groups.aged else room_s - reserved_s
        least = min(LEAST_CHUNK, budget)
        yield from self.offer(groups.aged, decode_s + aged_s, least * overdue, firm=True)
        yield from self.offer(groups.on_time, decode_s + ahead_s, least)
        yield from self.offer(groups.late, decode_s + ahead_s, 0)
        calm_s = max(self._lane_step_s, self.cost.seconds(self._work) + reserved_s)
        until_s = min(decode_s + room_s, calm_s)
        yield from self.offer(groups.lane + groups.idle, until_s, least * (not decodes))

    def offer(
        self, group: list[Sequence], until_s: float, least: int, *, firm: bool = False
    ) -> Iterator[Turn]:
        """Turns of `group` while the step lasts less than `until_s`; its first chunk is `least`."""
        for sequence in group:
            first = self._work.num_sampled == self._num_decodes
            most = max(self.chunk_tokens(sequence, until_s), least * first)
            if most > 0:
                yield Turn(sequence, most, firm)

    def sort(self, behind: list[Sequence]) -> Groups:
        """Who is aged, ahead, in the lane or idle, each in order."""
        now_s = self.clock.now_s()
        token_s = self.prefill_token_s / (1 - self.config.lane_share * self._lane_waits)
        row_s = self.slot_rate.row_s(now_s)
        aged: list[Sequence] = []
        lane: list[tuple[Due, Sequence]] = []
        idle: list[Sequence] = []
        short: list[tuple[Due, Sequence]] = []
        for sequence in behind:
            due = Due(deadline_s(sequence), prefill_s(sequence, token_s, row_s))
            if self.is_aged(sequence):
                aged.append(sequence)
            elif self.is_idle(sequence):
                idle.append(sequence)
            elif self.unloaded_token_s * num_uncomputed(sequence) > self.config.long_prefill_s:
                lane.append((due, sequence))
            else:
                short.append((due, sequence))
        soon = self.rank_by_users(short, now_s)
        later = self.rank_by_users(lane, soon.end_s)
        if self.sheds:
            for late in soon.late + later.late:
                self.shed_late(late, now_s, token_s)
        self._lane_waits = bool(aged or later.on_time or any(later.late))
        for late in soon.late:
            late.sort(key=arrival_order)
        for late in later.late:
            late.sort(key=num_uncomputed)
        late = list(chain.from_iterable(soon.late))
        num_fitting, slack_s = 0, soon.slack_s
        for sequence in soon.late[0] if soon.on_time else ():
            slack_s -= prefill_s(sequence, token_s, row_s) / LATE_SHARE_OF_SLACK
            if slack_s < 0:
                break
            num_fitting += 1
        return Groups(
            aged=sorted(aged, key=arrival_order),
            on_time=late[:num_fitting] + soon.on_time,
            late=late[num_fitting:],
            lane=later.on_time + list(chain.from_iterable(later.late)),
            idle=idle,
        )

    def look_up_prefixes(self, waiting: TypingSequence[Sequence]) -> None:
        """See anew how much of some who wait is in memory: all in turn, a few in each step."""
        for _ in range(min(PREFIX_LOOKUPS_PER_STEP, len(waiting))):
            self._next_lookup = (self._next_lookup + 1) % len(waiting)
            sequence = waiting[self._next_lookup]
            slo_state(sequence).num_matched = self.kv.match_prefix(sequence).num_tokens

    def rank_by_users(self, jobs: list[tuple[Due, Sequence]], now_s: float) -> Ranked:
        """Who is in time where users who have had more come behind, by steps of half the credit."""
        if not jobs:
            return Ranked(end_s=now_s)
        step, least = max(self.credit / 2, 1.0), self.users.min_counter
        ranks: dict[int, list[tuple[Due, Sequence]]] = {}
        for job in jobs:
            rank = int((self.users.counter(job[1]) - least) / step)
            ranks.setdefault(rank, []).append(job)
        ranked = Ranked(end_s=now_s)
        for rank in sorted(ranks):
            on_time, late, ranked.end_s, slack_s = choose_on_time(ranks[rank], ranked.end_s)
            ranked.on_time += on_time
            ranked.late.append(late)
            ranked.slack_s = min(ranked.slack_s, slack_s)
        return ranked

    def is_aged(self, sequence: Sequence) -> bool:
        """Whether it was overtaken beyond its bound."""
        return slo_state(sequence).num_overtaken >= self.aging_bound(sequence)

    def aging_bound(self, sequence: Sequence) -> int:
        """Soft aging bound: tokens that arrived later and may overtake it; then its order is fixed.

        A user with more sequences here than its share has a larger bound: the others' share goes
        first.
        """
        patience = IDLE_AGING_FACTOR if sequence.request.terms.idle_only else 1
        return round(self.config.aging_tokens * patience * self.users.crowding_factor(sequence))

    def hard_aging_bound(self, sequence: Sequence) -> float:
        """Hard aging bound, in tokens; after it the sequence gets the whole step."""
        return self.aging_bound(sequence) + len(sequence.tokens) * (1 / self.config.lane_share - 1)

    def shed_late(self, late: list[Sequence], now_s: float, token_s: float) -> None:
        """Shed those who wait and could not make it even alone; the engine ends them."""
        for sequence in list(late):
            alone_s = now_s + token_s * num_uncomputed(sequence)
            fresh = sequence.state == WAITING and not sequence.num_generated
            if fresh and alone_s > deadline_s(sequence):
                late.remove(sequence)
                self._shed.append(sequence)

    def chunk_tokens(self, sequence: Sequence, until_s: float) -> int:
        """Tokens of `sequence` that the step takes before it has lasted `until_s`."""
        start = sequence.computed or slo_state(sequence).num_matched
        return self.cost.chunk(until_s, self._work, start, num_uncomputed(sequence))

    def on_scheduled(self, sequence: Sequence, num_tokens: int) -> None:
        """Its user pays, the step grows, and those who came earlier and are behind age."""
        self.users.charge(sequence, num_tokens)
        if self._has_draft_tokens and num_tokens == 1 and sequence.computed >= sequence.num_prompt:
            slo_state(sequence).count_step()
        if self._prefills:
            self._work = self.cost.beside(self._work, sequence.computed, num_tokens)
            for other in self._prefills:
                if other.sequence_id < sequence.sequence_id:
                    slo_state(other).num_overtaken += num_tokens

    def on_drafts_accepted(self, sequence: Sequence, num_drafts: int) -> None:
        """Its user pays for the tokens that came, not for guesses."""
        self.users.charge(sequence, num_drafts)
        slo_state(sequence).count_accepted(num_drafts)
        self._has_draft_tokens = True

    # ── who makes way ───────────────────────────────────────────────────────────────────────

    def victims(self, running: list[Sequence]) -> list[Sequence]:
        """Who loses least goodput first: idle classes, those lost, those that can bear it; of
        equals who has least to redo."""
        return sorted(running, key=self.preemption_rank)

    def preemption_rank(self, sequence: Sequence) -> tuple[bool, bool, int, int]:
        """What a preemption of `sequence` would lose; small is little."""
        return (
            self.is_aged(sequence),
            not self.is_idle(sequence),
            self.preemption_loss(sequence),
            sequence.computed,
        )

    def preemption_loss(self, sequence: Sequence) -> int:
        """0: it misses its objectives anyway; 1: not even if it computes all again; 2: then."""
        now_s, decode_s = self.clock.now_s(), self.cost.seconds(self._work)
        if self.misses(sequence, now_s, decode_s):
            return 0
        again_s = self.cost.prefill_s(sequence.computed, 0, RECOMPUTE_CHUNK_TOKENS)
        return 1 + self.misses(sequence, now_s + again_s, decode_s)

    def preemptible_for(self, newcomer: Sequence, running: list[Sequence]) -> list[Sequence]:
        """Those of idle classes make way for all others, youngest first."""
        if self.is_idle(newcomer):
            return []
        return self.idle_of(running[::-1])

    def may_reclaim(self, claimant: Sequence, waiting: TypingSequence[Sequence]) -> bool:
        """While nobody who came before it has aged: the next slot is kept for those."""
        most = self.config.aging_tokens
        aged = (s for s in waiting if slo_state(s).num_overtaken >= most and self.is_aged(s))
        return all(arrival_order(s) >= arrival_order(claimant) for s in aged)

    def may_yield(self, sequence: Sequence, claimant: Sequence) -> bool:
        """Whoever has not been overtaken beyond its bound."""
        return not self.is_aged(sequence)
