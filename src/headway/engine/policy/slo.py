"""As many requests as possible within their objectives, and nobody starves.

Who is behind is sorted anew in each step:

    aged     overtaken by more than its bound in tokens that came later: by arrival
    ahead    short, and can still make it: by deadline (`policy.on_time`)
    lane     long by its predicted prefill, or too late to make it: those in time first
    idle     of a class that takes only what nobody else wants

A step lasts as long as the decodes beside it can bear, and no longer than `longest_step_s`, for a
newcomer waits for its end. Its time for prompts is divided by `lane_share`: with a quarter, the
aged and the lane get a quarter of it while somebody is ahead, and all that those leave. Ten long
prompts slow a chat by a third and never stop it; a prompt of P tokens that nobody before it
delays is overtaken by at most its bound and 3 P tokens more.

    decodes 40 ms │ aged, lane 25% │ ahead 75%           │ what is left: lane, then idle
    0            40               60                   120 ms

Users who have had more than others present by half the credit of `policy.users` come behind them.
"""

from collections.abc import Iterator, Sequence as TypingSequence
from dataclasses import dataclass
from math import inf

from headway.core.clock import Clock
from headway.engine.cost import StepCost, Work
from headway.engine.policy.fcfs import Fcfs
from headway.engine.policy.on_time import Due, on_time
from headway.engine.policy.policy import Turn, is_behind, lacking_one
from headway.engine.policy.users import Users
from headway.engine.sequence import Sequence

MARGIN = 0.9
"""How much of the time until a token is due a step may take: predictions err."""
CATCH_UP = 0.75
"""Steps this much shorter than the objective beside a decode that has fallen behind."""
MIN_CHUNK = 16
"""Tokens that the first in turn gets however little time is left: prompts never stand still."""
NOTHING = Work(0, 0, 0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class SloRules:
    """What can be set. Seconds, tokens, shares of the time for prompts."""

    lane_share: float = 0.25
    long_prefill_s: float = 1.5
    longest_step_s: float = 0.25
    aging_tokens: int = 16_384
    idle_patience: int = 16
    """How many times longer those of idle classes age."""
    credit: float = 8192.0
    shed: bool = False


class Slo(Fcfs):
    """Deadlines, predictions and counters; `shed` lists those given up, for the engine to end."""

    def __init__(self, cost: StepCost, clock: Clock, rules: SloRules) -> None:
        self.cost = cost
        self.clock = clock
        self.rules = rules
        self.users = Users(rules.credit)
        self.shed: list[Sequence] = []
        self._step_s = rules.longest_step_s
        self._beside = NOTHING
        self._behind: list[Sequence] = []

    def arrived(self, sequence: Sequence) -> None:
        """Its user is present; its clock runs from its arrival at the server."""
        sequence.arrived_s = sequence.arrived_s or self.clock.now_s()
        self.users.arrived(sequence)

    def left(self, sequence: Sequence) -> None:
        """Its user may be gone."""
        self.users.left(sequence)

    # ── decodes ─────────────────────────────────────────────────────────────────────────────

    def decodes(self, running: list[Sequence]) -> list[Sequence]:
        """All, but of idle classes only as many as the others' next tokens can bear."""
        self._behind = []
        now_s = self.clock.now_s()
        rows = lacking_one(running)
        first = [s for s in rows if not s.request.terms.idle_only]
        self._beside = work_of(first)
        decode_s = self.cost.seconds(self._beside)
        self._step_s = min([self.bears_s(s, now_s, decode_s) for s in first], default=inf)
        self._step_s = min(self._step_s, self.rules.longest_step_s)
        for sequence in rows:
            if sequence.request.terms.idle_only:
                more = plus(self._beside, 1, sequence.computed, sampled=True)
                if first and self.cost.seconds(more) > self._step_s:
                    break
                first.append(sequence)
                self._beside = more
        return first

    def bears_s(self, sequence: Sequence, now_s: float, decode_s: float) -> float:
        """How long a step may last for a decode to meet its TPOT; infinite when it cannot.

        Token k is due k objectives after the first: time that earlier ones saved may be spent.
        """
        terms = sequence.request.terms
        if terms.tpot_s is None or sequence.first_token_s is None or self.is_lost(sequence):
            return inf
        due_s = sequence.first_token_s + sequence.num_generated * terms.tpot_s - now_s
        left = sequence.max_len - len(sequence.tokens)
        if -due_s > left * max(terms.tpot_s - decode_s, 0.0):
            return inf
        return max(due_s * MARGIN, terms.tpot_s * CATCH_UP)

    def is_lost(self, sequence: Sequence) -> bool:
        """Whether it has missed its first token's objective for good."""
        given_s = sequence.request.terms.first_token_s(sequence.num_prompt - sequence.num_cached)
        first_s = sequence.first_token_s
        return first_s is not None and first_s - sequence.arrived_s > given_s

    # ── turns ───────────────────────────────────────────────────────────────────────────────

    def turns(
        self,
        running: list[Sequence],
        waiting: TypingSequence[Sequence],
        decodes: list[Sequence],
        budget: int,
    ) -> Iterator[Turn]:
        """The aged, those ahead, the lane, the idle, each with its share of the step's time."""
        self._behind = behind = [*(s for s in running if is_behind(s)), *waiting]
        if not behind:
            return
        groups = self.sort(behind, budget)
        decode_s = self.cost.seconds(self._beside)
        room_s = max(self._step_s - decode_s, 0.0)
        reserved_s = room_s * self.rules.lane_share if groups.aged or groups.lane else 0.0
        least = MIN_CHUNK
        for group, until_s, firm in (
            (groups.aged, decode_s + reserved_s, True),
            (groups.ahead, decode_s + room_s - reserved_s * (not groups.aged), False),
            (groups.aged + groups.lane, decode_s + room_s, False),
            (groups.idle, decode_s + room_s, False),
        ):
            for sequence in group:
                if not is_waiting_or_behind(sequence):
                    continue
                most = self.fits(sequence, until_s)
                most = max(most, min(least, budget))
                if most > 0:
                    before = self._beside
                    yield Turn(sequence, most, firm)
                    least = 0 if self._beside is not before else least

    def fits(self, sequence: Sequence, until_s: float) -> int:
        """Tokens of `sequence` that the step takes before it has lasted `until_s`."""
        missing = len(sequence.tokens) - sequence.computed
        return self.cost.chunk(until_s, self._beside, sequence.computed, missing)

    def took(self, sequence: Sequence, num_tokens: int) -> None:
        """Its user pays, the step grows, and those who came earlier and are behind age."""
        generated = sequence.computed >= sequence.num_prompt
        self.users.charge(sequence, num_tokens, generated=generated)
        if self._behind:
            ends = sequence.computed + num_tokens == len(sequence.tokens)
            self._beside = plus(self._beside, num_tokens, sequence.computed, sampled=ends)
            for other in self._behind:
                if other.sequence_id < sequence.sequence_id:
                    other.overtaken += num_tokens
