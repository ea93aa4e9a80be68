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
from headway.engine.policy.on_time import Due, on_time
from headway.engine.policy.policy import Turn, behind, decode_work
from headway.engine.policy.slo_state import (
    Groups,
    Ranked,
    SloState,
    arrival,
    deadline_s,
    find_pace_s,
    halfway_s,
    is_lost,
    missing,
    state,
    takes_s,
)
from headway.engine.policy.users import Users
from headway.engine.sequence import RUNNING, WAITING, Sequence

TARGET = 0.8
"""Share of the TPOT objective that a step aims at: predictions err by a tenth (lab log)."""
CATCH_UP = 0.65
"""The same when a decode of the step is behind its objective: it must catch up."""
SPARED = 0.5
"""Of the time that requests in time can spare, this share is given to late requests."""
AGAIN = 512
"""Assumed tokens a step when we estimate how long a preempted sequence takes to recompute."""
UNLIMITED_S = 3600.0
LOOKED_UP = 8
"""Sequences whose prefix is looked up in a step; 100 blocks take 20 µs."""
LONGEST_STEP_S = 0.25
"""What a step takes at most, while decodes can bear it."""
IDLE_PATIENCE = 16
"""How many times longer those of idle classes age."""
FEW = 64
"""So many tokens of prompts, and a guess takes from them what it takes."""
CREDIT = 8192.0
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
        self.credit = CREDIT
        self.sheds = config.late == "shed"
        self.users = Users(CREDIT)
        self.token_s = self.alone_s = 0.0
        self._idle, self._hurried = set[int](), set[int]()
        """Of those present the ones of idle classes, and with an objective for the first token."""
        self._step_s = self._calm_s = LONGEST_STEP_S
        self._lane_waits = self._gains = False
        self._beside = NOTHING
        self._shed, self._behind, self._lacking = [list[Sequence]() for _ in range(3)]
        self._startable: TypingSequence[Sequence] = ()
        self._looked_up = self._num_decodes = 0
        self._one = cost.beside(NOTHING, 0, 1)

    @classmethod
    def make(cls, settings: Settings, cost: StepCost, clock: Clock, kv: KVCache) -> Self:
        """The policy of objectives with what the settings say of it."""
        return cls(cost, clock, kv, settings.scheduler, settings.max_num_seqs)

    def arrived(self, sequence: Sequence) -> None:
        """Its user is present; its clock runs from its arrival at the server."""
        sequence.arrived_s = sequence.arrived_s or self.clock.now_s()
        sequence.policy_state = SloState(self.kv.match_prefix(sequence).num_tokens)
        self.users.arrived(sequence)
        if sequence.request.terms.idle_only:
            self._idle.add(sequence.sequence_id)
        if sequence.request.terms.ttft_s is not None:
            self._hurried.add(sequence.sequence_id)

    def left(self, sequence: Sequence) -> None:
        """Its user may be gone."""
        super().left(sequence)
        self._idle.discard(sequence.sequence_id)
        self._hurried.discard(sequence.sequence_id)

    def matched_tokens(self, sequence: Sequence) -> int:
        """As they were when it came, or when it was last looked up."""
        return state(sequence).matched

    def take_shed(self) -> list[Sequence]:
        """Those that can no longer meet their objectives, where the options say to shed."""
        shed, self._shed = self._shed, []
        return shed

    # ── decodes ─────────────────────────────────────────────────────────────────────────────

    def decodes(
        self, rows: list[Sequence], running: list[Sequence], waiting: TypingSequence[Sequence]
    ) -> list[Sequence]:
        """All, but of idle classes only as many as the others' next tokens can bear.

        For each of other classes that waits one of them stands still: it may need the place.
        """
        self._behind = []
        now_s = self.clock.now_s()
        self._lacking = behind(running) if len(rows) < len(running) else []
        idle = self.idle_of(rows)
        first = [s for s in rows if not self.is_idle(s)] if idle else rows
        self._beside = self.work_of(first)
        longest_s, decode_s = self.longest_s(), self.cost.seconds(self._beside)
        self._step_s, self._calm_s = self.bears_s(first, longest_s, now_s, decode_s)
        self._startable = waiting if len(running) < self.max_num_seqs else ()
        wanting = sum(not self.is_idle(s) for s in waiting) if idle else 0
        left = idle[: max(len(idle) - wanting, 0)]
        if not first:
            self._beside = self.work_of(left)
            return left
        for sequence in left:
            more = self.cost.beside(self._beside, sequence.computed, sequence.num_missing)
            if self.cost.seconds(more) > self._calm_s:
                break
            first.append(sequence)
            self._beside = more
        return first

    def longest_s(self) -> float:
        """How long a step may last for whoever comes meanwhile, on a slow machine four of a token.

        Where nobody has an objective for the first token, offline, it may last as it will.
        """
        return (
            max(LONGEST_STEP_S, 4 * self.cost.seconds(self._one)) if self._hurried else UNLIMITED_S
        )

    def is_idle(self, sequence: Sequence) -> bool:
        """Whether it takes only what nobody else wants; not so once it has aged."""
        return sequence.request.terms.idle_only and not self.has_aged(sequence)

    def idle_of(self, rows: list[Sequence]) -> list[Sequence]:
        """Those of `rows` that are idle."""
        if not self._idle:
            return []
        return [s for s in rows if s.request.terms.idle_only and not self.has_aged(s)]

    def bears_s(
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
        for sequence in [s for s in rows if s.policy_state.unhurried_s < longest_s]:
            kept: SloState = sequence.policy_state
            pace_s = find_pace_s(sequence) if kept.pace_s is None else kept.pace_s
            if not pace_s:
                continue
            burst_s = kept.gained * pace_s
            last = len(sequence.tokens) - sequence.num_prompt + kept.gained - 1
            due_s = kept.first_s + last * pace_s * TARGET - now_s
            if due_s < 0 and self.misses(sequence, now_s, decode_s):
                continue
            if due_s < step_s and burst_s * CATCH_UP < step_s:
                half_s = halfway_s(kept.first_s - now_s, last / kept.gained, burst_s, decode_s)
                step_s = min(step_s, max(due_s, burst_s * CATCH_UP, half_s))
            calm_s = min(calm_s, kept.unhurried_s)
        return step_s, calm_s

    def misses(self, sequence: Sequence, from_s: float, decode_s: float) -> bool:
        """Whether it misses an objective for good where it goes on at `from_s`, undisturbed."""
        tpot_s = sequence.request.terms.tpot_s
        if sequence.first_token_s is None:
            return from_s > deadline_s(sequence)
        if tpot_s is None or is_lost(sequence):
            return is_lost(sequence)
        late_s = from_s - sequence.first_token_s - sequence.num_generated * tpot_s
        left = sequence.max_len - len(sequence.tokens)
        return late_s > left * max(tpot_s - decode_s / state(sequence).gained, 0.0)

    def work_of(self, rows: list[Sequence]) -> Work:
        """What `rows` do as decodes."""
        return decode_work(rows, self.cost.windows)

    def beside_drafts(self, decodes: TypingSequence[Sequence]) -> tuple[Work, float, bool]:
        """Their work, what they can bear to meet their objectives, and whether prompts wait."""
        waits = sum(map(missing, chain(self._lacking, self._startable))) >= FEW
        return self._beside, self._step_s, waits

    def drafted(self, sequence: Sequence, num_drafts: int) -> None:
        """The step grows."""
        self._beside = self.cost.with_drafts(self._beside, len(sequence.tokens), num_drafts)

    def drafts_for(self, seconds: float) -> None:
        """So much less of it is for prompts."""
        self._step_s -= seconds
        self._calm_s -= seconds

    # ── turns ───────────────────────────────────────────────────────────────────────────────

    def turns(
        self,
        running: list[Sequence],
        waiting: TypingSequence[Sequence],
        decodes: list[Sequence],
        budget: int,
    ) -> Iterator[Turn]:
        """The aged, those ahead, the lane, the idle, each with its share of the step's time."""
        lacking = [s for s in self._lacking if s.state == RUNNING]  # some made way for decodes
        self._behind = behind = [*lacking, *waiting]
        self.token_s = self.cost.token_s(self._step_s, self._beside, budget)
        self.alone_s = self.cost.token_s(LONGEST_STEP_S, NOTHING, budget)
        is_full = len(running) >= self.max_num_seqs and not self.idle_of(running)
        if is_full and not self.sheds:  # nobody who waits can start: why sort them
            behind = lacking
        if not behind:
            return
        if not is_full:
            self.look_up(waiting)
        self._num_decodes = self._beside.num_sampled
        decode_s = self.cost.seconds(self._beside)
        room_s = max(self._step_s - decode_s, 0.0)
        groups = self.sort(behind)
        reserved_s = room_s * self.config.lane_share if groups.aged or groups.lane else 0.0
        overdue = any(state(s).overtaken >= self.limit(s) for s in groups.aged)
        others = groups.ahead or groups.late
        aged_s = room_s if overdue or not others else reserved_s
        ahead_s = room_s if groups.aged else room_s - reserved_s
        least = min(LEAST_CHUNK, budget)
        yield from self.offer(groups.aged, decode_s + aged_s, least * overdue, firm=True)
        yield from self.offer(groups.ahead, decode_s + ahead_s, least)
        yield from self.offer(groups.late, decode_s + ahead_s, 0)
        calm_s = max(self._calm_s, self.cost.seconds(self._beside) + reserved_s)
        until_s = min(decode_s + room_s, calm_s)
        yield from self.offer(groups.lane + groups.idle, until_s, least * (not decodes))

    def offer(
        self, group: list[Sequence], until_s: float, least: int, *, firm: bool = False
    ) -> Iterator[Turn]:
        """Turns of `group` while the step lasts less than `until_s`; its first chunk is `least`."""
        for sequence in group:
            first = self._beside.num_sampled == self._num_decodes
            most = max(self.fits(sequence, until_s), least * first)
            if most > 0:
                yield Turn(sequence, most, firm)

    def sort(self, behind: list[Sequence]) -> Groups:
        """Who is aged, ahead, in the lane or idle, each in order."""
        now_s = self.clock.now_s()
        token_s = self.token_s / (1 - self.config.lane_share * self._lane_waits)
        row_s = self.slot_rate.row_s(now_s)
        aged: list[Sequence] = []
        lane: list[tuple[Due, Sequence]] = []
        idle: list[Sequence] = []
        short: list[tuple[Due, Sequence]] = []
        for sequence in behind:
            due = Due(deadline_s(sequence), takes_s(sequence, token_s, row_s))
            if self.has_aged(sequence):
                aged.append(sequence)
            elif self.is_idle(sequence):
                idle.append(sequence)
            elif self.alone_s * missing(sequence) > self.config.long_prefill_s:
                lane.append((due, sequence))
            else:
                short.append((due, sequence))
        soon = self.by_users(short, now_s)
        later = self.by_users(lane, soon.end_s)
        if self.sheds:
            for late in soon.late + later.late:
                self.give_up(late, now_s, token_s)
        self._lane_waits = bool(aged or later.in_time or any(later.late))
        for late in soon.late:
            late.sort(key=arrival)
        for late in later.late:
            late.sort(key=missing)
        late = list(chain.from_iterable(soon.late))
        num_spared, spare_s = 0, soon.spare_s
        for sequence in soon.late[0] if soon.in_time else ():
            spare_s -= takes_s(sequence, token_s, row_s) / SPARED
            if spare_s < 0:
                break
            num_spared += 1
        return Groups(
            aged=sorted(aged, key=arrival),
            ahead=late[:num_spared] + soon.in_time,
            late=late[num_spared:],
            lane=later.in_time + list(chain.from_iterable(later.late)),
            idle=idle,
        )

    def look_up(self, waiting: TypingSequence[Sequence]) -> None:
        """See anew how much of some who wait is in memory: all in turn, a few in each step."""
        for _ in range(min(LOOKED_UP, len(waiting))):
            self._looked_up = (self._looked_up + 1) % len(waiting)
            sequence = waiting[self._looked_up]
            state(sequence).matched = self.kv.match_prefix(sequence).num_tokens

    def by_users(self, jobs: list[tuple[Due, Sequence]], now_s: float) -> Ranked:
        """Who is in time where users who have had more come behind, by steps of half the credit."""
        if not jobs:
            return Ranked(end_s=now_s)
        step, least = max(self.credit / 2, 1.0), self.users.least
        ranks: dict[int, list[tuple[Due, Sequence]]] = {}
        for job in jobs:
            rank = int((self.users.had(job[1]) - least) / step)
            ranks.setdefault(rank, []).append(job)
        ranked = Ranked(end_s=now_s)
        for rank in sorted(ranks):
            in_time, late, ranked.end_s, spare_s = on_time(ranks[rank], ranked.end_s)
            ranked.in_time += in_time
            ranked.late.append(late)
            ranked.spare_s = min(ranked.spare_s, spare_s)
        return ranked

    def has_aged(self, sequence: Sequence) -> bool:
        """Whether it was overtaken beyond its bound."""
        return state(sequence).overtaken >= self.bound(sequence)

    def bound(self, sequence: Sequence) -> int:
        """Soft aging bound: tokens that arrived later and may overtake it; then its order is fixed.

        A user with more sequences here than its share has a larger bound: the others' share goes
        first.
        """
        patience = IDLE_PATIENCE if sequence.request.terms.idle_only else 1
        return round(self.config.aging_tokens * patience * self.users.crowding(sequence))

    def limit(self, sequence: Sequence) -> float:
        """Hard aging bound, in tokens; after it the sequence gets the whole step."""
        return self.bound(sequence) + len(sequence.tokens) * (1 / self.config.lane_share - 1)

    def give_up(self, late: list[Sequence], now_s: float, token_s: float) -> None:
        """Shed those who wait and could not make it even alone; the engine ends them."""
        for sequence in list(late):
            alone_s = now_s + token_s * missing(sequence)
            fresh = sequence.state == WAITING and not sequence.num_generated
            if fresh and alone_s > deadline_s(sequence):
                late.remove(sequence)
                self._shed.append(sequence)

    def fits(self, sequence: Sequence, until_s: float) -> int:
        """Tokens of `sequence` that the step takes before it has lasted `until_s`."""
        start = sequence.computed or state(sequence).matched
        return self.cost.chunk(until_s, self._beside, start, missing(sequence))

    def took(self, sequence: Sequence, num_tokens: int) -> None:
        """Its user pays, the step grows, and those who came earlier and are behind age."""
        self.users.charge(sequence, num_tokens)
        if self._gains and num_tokens == 1 and sequence.computed >= sequence.num_prompt:
            state(sequence).decoded()
        if self._behind:
            self._beside = self.cost.beside(self._beside, sequence.computed, num_tokens)
            for other in self._behind:
                if other.sequence_id < sequence.sequence_id:
                    state(other).overtaken += num_tokens

    def kept(self, sequence: Sequence, num_drafts: int) -> None:
        """Its user pays for the tokens that came, not for guesses."""
        self.users.charge(sequence, num_drafts)
        state(sequence).kept(num_drafts)
        self._gains = True

    # ── who makes way ───────────────────────────────────────────────────────────────────────

    def victims(self, running: list[Sequence]) -> list[Sequence]:
        """Who loses least goodput first: idle classes, those lost, those that can bear it; of
        equals who has least to redo."""
        return sorted(running, key=self.loss)

    def loss(self, sequence: Sequence) -> tuple[bool, bool, int, int]:
        """What a preemption of `sequence` would lose; small is little."""
        return (
            self.has_aged(sequence),
            not self.is_idle(sequence),
            self.at_stake(sequence),
            sequence.computed,
        )

    def at_stake(self, sequence: Sequence) -> int:
        """0: it misses its objectives anyway; 1: not even if it computes all again; 2: then."""
        now_s, decode_s = self.clock.now_s(), self.cost.seconds(self._beside)
        if self.misses(sequence, now_s, decode_s):
            return 0
        again_s = self.cost.prefill_s(sequence.computed, 0, AGAIN)
        return 1 + self.misses(sequence, now_s + again_s, decode_s)

    def weaker(self, newcomer: Sequence, running: list[Sequence]) -> list[Sequence]:
        """Those of idle classes make way for all others, youngest first."""
        if self.is_idle(newcomer):
            return []
        return self.idle_of(running[::-1])

    def may_take(self, taker: Sequence, waiting: TypingSequence[Sequence]) -> bool:
        """While nobody who came before it has aged: the next slot is kept for those."""
        most = self.config.aging_tokens
        aged = (s for s in waiting if state(s).overtaken >= most and self.has_aged(s))
        return all(arrival(s) >= arrival(taker) for s in aged)

    def may_give(self, sequence: Sequence, taker: Sequence) -> bool:
        """Whoever has not been overtaken beyond its bound."""
        return not self.has_aged(sequence)
