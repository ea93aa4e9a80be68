"""Slots and KV blocks that users above their share give back to users below it.

A user's share is its part of the engine, by weight among the users present. What it holds is its
dominant share: of slots or of KV blocks, whichever is the larger part (Ghodsi et al. 2011, Dominant
Resource Fairness). A waiting request of a user below its share may reclaim a slot once it has
waited for a quarter of the time that its objective leaves. Worked example, 64 slots, equal weights:

    A runs 64 streams of 1,900 tokens and holds 64 / 64; B holds nothing of its 32 / 64
    B's request waits for 0.25 x (1.5 s - 0.1 s of prefill) = 0.35 s
    then A's cheapest sequence is preempted, and B's starts in its place
    with 32 and 32 nobody gives anything back: A would hold less than B afterwards

Nothing goes back and forth: the giver still holds at least as much as the taker afterwards, by
weight, so no chain of reclaims returns to where it began. Who gave its slot most often is asked
last, and not before it has made a token since. The seconds spent to compute again what reclaimed
sequences had computed are at most `LOST_SHARE` of the time.
"""

from collections.abc import Collection, Iterable, Iterator
from collections.abc import Sequence as TypingSequence
from math import inf

from headway.admit.queue import PATIENCE, UNPROMISED_S
from headway.core.clock import Clock
from headway.engine.kv import KVCache
from headway.engine.policy.policy import Policy, needs_prefill
from headway.engine.policy.users import user_of
from headway.engine.preemption import Preemption
from headway.engine.sequence import RUNNING, WAITING, Sequence

PROMPT = 256
"""Tokens of the prompt that tells what one takes."""
LOST_SHARE, BURST_S = 0.1, 2.0
"""Share of the time that may go into computing again, and seconds of it that may be saved up."""
RECOUNT_S = 0.02
"""How old what users hold may be where it is told, beside a patience of some 300 ms."""


class Reclaim:
    """Who may reclaim, from whom, and what that has cost."""

    def __init__(
        self, kv: KVCache, policy: Policy, preemption: Preemption, clock: Clock, max_num_seqs: int
    ) -> None:
        self.kv = kv
        self.policy = policy
        self.preemption = preemption
        self.clock = clock
        self.max_num_seqs = max_num_seqs
        self._credit_s = BURST_S
        self._credited_s = clock.now_s()
        self._away: set[int] = set()
        self._user_slots: dict[str, tuple[float, float]] = {}
        self._counted_s = -inf

    # ── who may ─────────────────────────────────────────────────────────────────────────────

    @property
    def is_open(self) -> bool:
        """Whether this policy reclaims, and the last reclaims did not cost too much."""
        if not self.policy.reclaims:
            return False
        now_s = self.clock.now_s()
        earned_s = LOST_SHARE * (now_s - self._credited_s)
        self._credit_s = min(self._credit_s + earned_s, BURST_S)
        self._credited_s = now_s
        return self._credit_s > 0

    def claimants(
        self, running: list[Sequence], waiting: TypingSequence[Sequence]
    ) -> Iterator[Sequence]:
        """Who of `waiting` may reclaim a slot now, user by user in order of arrival.

        The caller lets each start, or not, before it asks for the next.
        """
        if self.policy.users.num_present < 2 or not self.is_open:
            return
        held = self.held(running)
        token_s = self.preemption.prefill_s(PROMPT) / PROMPT
        passed: set[str] = set()
        for sequence in list(waiting):
            user = user_of(sequence)
            if user in passed:
                continue
            if not self._is_below(user, held):
                passed.add(user)
            elif self._is_due(sequence, token_s) and self.policy.may_reclaim(sequence, waiting):
                yield sequence
                held = self.held(running)
                if sequence.state == WAITING:
                    passed.add(user)

    def _is_below(self, user: str, held: dict[str, "Held"]) -> bool:
        """Whether a user holds less than its share."""
        holds = held.get(user)
        return holds is None or self.level(holds) < self.policy.users.share(user)

    def _is_due(self, sequence: Sequence, token_s: float) -> bool:
        """Whether `sequence` has waited long enough; one that had a slot before has.

        A token of its prompt takes `token_s`.
        """
        if sequence.request.terms.idle_only or self.preemption.is_flying(sequence):
            return False
        if sequence.num_generated:
            return True
        matched = self.policy.num_matched_tokens(sequence)
        given_s = sequence.request.terms.first_token_s(sequence.num_prompt - matched)
        given_s = min(given_s, UNPROMISED_S)
        own_s = token_s * (len(sequence.tokens) - matched)
        waited_s = self.clock.now_s() - sequence.arrived_s
        return waited_s >= PATIENCE * max(given_s - own_s, 0.0)

    # ── from whom ───────────────────────────────────────────────────────────────────────────

    def victims(
        self, taker: Sequence, running: list[Sequence], promised: list[int]
    ) -> list[Sequence]:
        """Who gives its slot and blocks to `taker`, in order; [] where that is not to be.

        Of the free blocks so many by group are `promised` to the running.

        The user who holds most gives first: of its sequences an idle one, then the one that has
        given least often, then the cheapest to compute again, then the newest.
        """
        rows, blocks = self._lacking(taker, running, promised)
        held, users, user = self.held(running), self.policy.users, user_of(taker)
        after = self._with(held.get(user) or Held(0, [0] * len(blocks)), taker)
        enough = self.level(after) / users.weight(user)
        candidates = [s for s in running if self._may_give(s, taker)]
        chosen: list[Sequence] = []

        def rank(s: Sequence) -> tuple[float, bool, int, int, int]:
            level = self.level(held[user_of(s)]) / users.weight(user_of(s))
            idle = s.request.terms.idle_only
            return -level, not idle, s.num_given, s.computed, -s.sequence_id

        while rows > 0 or any(count > 0 for count in blocks):
            candidates = [s for s in candidates if self._can_spare(s, held, enough)]
            if not candidates:
                return []
            victim = min(candidates, key=rank)
            candidates.remove(victim)
            chosen.append(victim)
            held[user_of(victim)] = self._without(held[user_of(victim)], victim)
            rows -= 1
            blocks = [n - freed for n, freed in zip(blocks, self._frees(victim), strict=True)]
        return chosen

    def _lacking(
        self, taker: Sequence, running: list[Sequence], promised: list[int]
    ) -> tuple[int, list[int]]:
        """Rows, and blocks by group, that `taker` lacks to start.

        What the running take in this step, before it has its first chunk, counts too.
        """
        rows = len(running) + 1 - self.max_num_seqs
        growing = sum(s.computed % self.kv.block_size == 0 for s in running)
        hit = None if taker.host_tables else self.kv.match_prefix(taker, partly=False)
        leaving = self.preemption.leaving()
        return rows, [
            needed + promise + growing - coming - pool.num_free
            for needed, promise, coming, pool in zip(
                self.kv.still_needed(taker, hit), promised, leaving, self.kv.pools, strict=True
            )
        ]

    def _may_give(self, sequence: Sequence, taker: Sequence) -> bool:
        if sequence.state != RUNNING or user_of(sequence) == user_of(taker):
            return False
        has_gained = not sequence.num_given or not needs_prefill(sequence)
        return has_gained and self.policy.may_yield(sequence, taker)

    def _can_spare(self, sequence: Sequence, held: dict[str, "Held"], enough: float) -> bool:
        """Whether its user is above its share, and without it still holds `enough` by weight."""
        user, users = user_of(sequence), self.policy.users
        left = self.level(self._without(held[user], sequence))
        return self.level(held[user]) > users.share(user) and left / users.weight(user) >= enough

    def first(self, victims: list[Sequence], running: list[Sequence]) -> Sequence:
        """Who of `victims`, which the policy has put in order, gives up its blocks for a decode.

        The policy's first, but where that one's user is not above its share and another's is.
        """
        chosen, users = victims[0], self.policy.users
        if len(victims) == 1 or not self.policy.reclaims or users.num_present < 2:
            return chosen
        held = self.held(running)
        above = {user for user, holds in held.items() if self.level(holds) > users.share(user)}
        if user_of(chosen) in above:
            return chosen
        return next((s for s in victims if self._gives(s, chosen, above)), chosen)

    def _gives(self, sequence: Sequence, instead_of: Sequence, above: set[str]) -> bool:
        return user_of(sequence) in above and self.policy.may_yield(sequence, instead_of)

    # ── who holds what ──────────────────────────────────────────────────────────────────────

    def held(self, running: list[Sequence]) -> dict[str, "Held"]:
        """Slots and blocks of each user."""
        whose: dict[str, list[Sequence]] = {}
        for sequence in running:
            whose.setdefault(user_of(sequence), []).append(sequence)
        return {user: Held(len(own), self.kv.num_live(own)) for user, own in whose.items()}

    def level(self, holds: "Held") -> float:
        """The dominant share: the largest part of slots or of any group's blocks."""
        parts = [n / (p.num_blocks - 1) for n, p in zip(holds.blocks, self.kv.pools, strict=True)]
        return max(holds.rows / self.max_num_seqs, *parts)

    def user_slots(self, running: list[Sequence]) -> dict[str, tuple[float, float]]:
        """User → (what it holds, as so many slots, its weight), for who predicts from outside.

        Counted again every `RECOUNT_S`: a step of 256 sequences that does nothing else takes 1 ms.
        """
        if not self.is_open:
            return {}
        now_s = self.clock.now_s()
        if now_s >= self._counted_s + RECOUNT_S:
            weight = self.policy.users.weight
            self._counted_s = now_s
            self._user_slots = {
                user: (self.level(holds) * self.max_num_seqs, weight(user))
                for user, holds in self.held(running).items()
            }
        return self._user_slots

    def _without(self, holds: "Held", sequence: Sequence) -> "Held":
        live = self.kv.num_live([sequence])
        blocks = [n - b for n, b in zip(holds.blocks, live, strict=True)]
        return Held(holds.rows - 1, blocks)

    def _with(self, holds: "Held", taker: Sequence) -> "Held":
        needed = self.kv.still_needed(taker)
        return Held(holds.rows + 1, [a + b for a, b in zip(holds.blocks, needed, strict=True)])

    def _frees(self, victim: Sequence) -> list[int]:
        """Blocks by group that its leaving frees, those included that are promised to it."""
        alone = self.kv.num_alone(
            [self.kv.live(victim, group) for group in range(len(self.kv.pools))]
        )
        needed = self.kv.still_needed(victim)
        return [a + b for a, b in zip(alone, needed, strict=True)]

    # ── what it costs ───────────────────────────────────────────────────────────────────────

    def given(self, victim: Sequence) -> None:
        """`victim` is preempted for another user."""
        victim.num_given += 1
        self._away.add(victim.sequence_id)

    def came_back(self, sequence: Sequence, num_found: int) -> None:
        """It runs again: what has to be computed anew is paid for, or the copy."""
        if sequence.sequence_id in self._away:
            self._away.remove(sequence.sequence_id)
            if sequence.host_tables:
                self._credit_s -= self.preemption.copy_s(self.preemption.counts(sequence))
            else:
                lost = max(sequence.num_lost - num_found, 0)
                self._credit_s -= self.preemption.prefill_s(lost, num_found)

    def left(self, sequence: Sequence) -> None:
        """It is over."""
        self._away.discard(sequence.sequence_id)

    def check_integrity(self, waiting: TypingSequence[Sequence]) -> None:
        """Assert that who is away waits."""
        assert self._away <= {sequence.sequence_id for sequence in waiting}


class Held:
    """Slots and blocks by group that one user holds."""

    __slots__ = ("blocks", "rows")

    def __init__(self, rows: int, blocks: list[int]) -> None:
        self.rows = rows
        self.blocks = blocks


def lacks_room(waiting: Collection[Sequence], running: Iterable[Sequence]) -> bool:
    """Of a full house: whether somebody waits for a row or for blocks; idle work makes way."""
    return bool(waiting) and not any(s.request.terms.idle_only for s in running)
