"""Forecast of the time to first token of a request, computed in the server process.

The server knows the prompts it has sent and how far each has been computed
(`StepRecord.prefilling`). The time of a prompt token, next to the running decodes, is predicted by
the engine's `perf.StepModel` and comes with the newest record. No message goes to the engine, so an
answer comes at once, even during a step. Worked example, 1 ms a token:

    waiting   a 300 tokens, b 1,200 of which 1,000 are computed, c of an idle class
    new       100 tokens: (300 + 200 + 100) x 1 ms = 0.6 s where all are one user's and no step
              runs; idle requests are served after it. Of three users each other one counts at
              most as much as the new request: (100 + 100 + 100) x 1 ms = 0.3 s

While slots or blocks are short, the queue is also a number of slots long, and one slot comes free
every `StepRecord.slot_s`: (a + b + new) x 0.4 s = 1.2 s. Where the user of the new request has
others before it, and users that do not wait now had half of the recent slots, it takes twice as
long. The longer of the two waits counts.

A user with fewer slots than its share reclaims one (`engine.reclaim`), so the wait for a slot is at
most its patience: (1.5 s - 0.1 s) x 0.25 = 0.35 s. Of 64 slots that another user holds it may have
32; a request of 40 prompts gets the last 8 when its first answers have ended: of 50 tokens at 40 ms
after 0.35 s + 2 s.
"""

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import ceil, inf

from headway.admit.queue import DEFAULT_TTFT_S, RECLAIM_WAIT_SHARE, QueueOrder
from headway.core.clock import Clock
from headway.core.records import StepRecord

SHARE_HALF_LIFE_STARTS = 32
"""Half-life of the recent slot shares, in slots given out."""
TOKENS_PER_STEP_WEIGHT = 0.1
"""Weight of the newest step in the moving average of tokens per sequence and step."""
MIN_SLOT_SHARE = 0.05
"""Lower bound of a user's share of the slots in a forecast."""


@dataclass(slots=True, eq=False, kw_only=True)
class QueueEntry:
    """One request in the queue of `engine`: its prompts without a first token, by number.

    remaining   prompt number → tokens not yet computed
    untouched   numbers of the prompts that no step has begun
    n, answer   sequences of each prompt, and the most tokens of each
    long        whether its prompts take longer than `long_prefill_s`
    due_s       deadline of the first token; infinite without an objective
    late_s      when it counts as late for other requests: not before its class's objective
    best_effort it has no objective and may wait longer
    num_bytes   size of its body
    """

    engine: int = 0
    user: str = ""
    weight: float = 1.0
    n: int = 1
    answer: int = 0
    service_class: str = ""
    idle_only: bool = False
    best_effort: bool = False
    num_bytes: int = 0
    long: bool = False
    due_s: float = inf
    late_s: float = inf
    remaining: dict[int, int] = field(default_factory=dict)
    lengths: list[int] = field(default_factory=list)
    untouched: set[int] = field(default_factory=set)
    engine_ids: list[int] = field(default_factory=list)

    @property
    def num_waiting(self) -> int:
        """Number of waiting prompts; 1 while the prompts are not known yet."""
        return len(self.remaining) if self.lengths else 1

    @property
    def num_slots(self) -> int:
        """Number of waiting sequences, each of which takes a slot."""
        return self.num_waiting * self.n


class SlotShares:
    """Decayed share of the slots that each user was given while slots were short."""

    def __init__(self) -> None:
        self._num_starts = 0
        self._counts: dict[str, tuple[float, int]] = {}

    def on_start(self, user: str) -> None:
        """Count a slot given to `user`."""
        count = self._decayed(user)
        self._num_starts += 1
        self._counts[user] = count * 0.5 ** (1 / SHARE_HALF_LIFE_STARTS) + 1.0, self._num_starts
        if len(self._counts) > 16 * SHARE_HALF_LIFE_STARTS:
            self._counts = {
                u: count for u, count in self._counts.items() if self._decayed(u) > 0.01
            }

    def of(self, users: set[str]) -> float:
        """Return the joint share of `users`, from `MIN_SLOT_SHARE` to 1."""
        keep = 0.5 ** (1 / SHARE_HALF_LIFE_STARTS)
        total = (1 - keep**self._num_starts) / (1 - keep)
        count = sum(self._decayed(user) for user in users)
        return max(count / total, MIN_SLOT_SHARE) if total else 1.0

    def _decayed(self, user: str) -> float:
        count, since = self._counts.get(user, (0.0, self._num_starts))
        age: float = 0.5 ** ((self._num_starts - since) / SHARE_HALF_LIFE_STARTS)
        return count * age


class Forecast:
    """The queue before one engine, in the order in which its policy serves it, and its waits."""

    def __init__(self, clock: Clock, *, order: QueueOrder, lane_share: float) -> None:
        self.clock = clock
        self.in_order = order == QueueOrder.ARRIVAL
        self._by_deadline = order == QueueOrder.DEADLINE
        self.lane_share = lane_share
        self.entries: dict[QueueEntry, None] = {}
        self.step_s = 0.0
        self._tokens_per_step = 1.0
        """Tokens of a sequence in a step: more than 1 with accepted draft tokens."""
        self._by_engine: dict[int, tuple[QueueEntry, int]] = {}
        self._queried = self._cached = 0.0
        self.token_s = self.alone_s = self._slot_s = 0.0
        """Predicted seconds of a prompt token next to the running decodes, and without them; mean
        seconds between slot releases."""
        self._user_slots: dict[str, tuple[float, float]] = {}
        self._shares = SlotShares()

    # ── events ──────────────────────────────────────────────────────────────────────────────

    def enter(self, entry: QueueEntry) -> None:
        """Add a request; its prompts may not be known yet."""
        self.entries[entry] = None

    def set_prompts(
        self, entry: QueueEntry, lengths: list[int], cached: list[int] | None = None
    ) -> None:
        """Set the prompt lengths of a request, and how many tokens of each are cached.

        Without `cached` a prompt counts at the recent share of tokens that were not cached.
        """
        entry.lengths = lengths
        entry.remaining = dict(enumerate(lengths))
        entry.untouched = set(entry.remaining)
        if cached is not None:
            entry.remaining = {n: length - cached[n] for n, length in enumerate(lengths)}
            entry.untouched.clear()

    def on_sent(self, entry: QueueEntry, number: int, engine_id: int) -> None:
        """Note that a prompt was sent to the engine as request `engine_id`."""
        entry.engine_ids.append(engine_id)
        self._by_engine[engine_id] = entry, number

    def on_first_token(self, entry: QueueEntry, number: int) -> None:
        """Note the first token of a prompt; after its last prompt a request leaves the queue."""
        if self._slot_s:
            self._shares.on_start(entry.user)
        entry.remaining.pop(number, None)
        entry.untouched.discard(number)
        if not entry.remaining:
            self.entries.pop(entry, None)

    def entry_of(self, engine_id: int) -> QueueEntry | None:
        """Return the request that was sent to the engine as `engine_id`, until it has ended."""
        place = self._by_engine.get(engine_id)
        return place[0] if place else None

    def transfer(self, entry: QueueEntry, to: "Forecast") -> None:
        """Move a request to the queue of another engine."""
        if to is self:
            return
        if entry in self.entries:
            del self.entries[entry]
            to.entries[entry] = None
        for engine_id in entry.engine_ids:
            to._by_engine[engine_id] = self._by_engine.pop(engine_id)

    def leave(self, entry: QueueEntry) -> None:
        """Remove a request that has ended, at any stage; safe to call twice."""
        self.entries.pop(entry, None)
        for engine_id in entry.engine_ids:
            self._by_engine.pop(engine_id, None)

    def on_record(self, record: StepRecord) -> None:
        """Update the progress of prompts and the engine's predictions from a step's record."""
        for engine_id, _, computed in record.prefilling:
            entry, number = self._by_engine.get(engine_id, (None, 0))
            if entry is not None and number in entry.remaining:
                entry.remaining[number] = min(
                    entry.remaining[number], max(0, entry.lengths[number] - computed)
                )
                entry.untouched.discard(number)
        self.step_s = record.duration_s
        if record.num_decode_tokens and (record.has_more or self._tokens_per_step > 1):
            self._tokens_per_step += TOKENS_PER_STEP_WEIGHT * (
                record.tokens_per_decode - self._tokens_per_step
            )
        if record.num_queried_tokens:
            keep = 0.5 ** (record.num_queried_tokens / max(self._queried, 1.0))
            self._queried = self._queried * keep + record.num_queried_tokens
            self._cached = self._cached * keep + record.num_cached_tokens
        self.token_s, self.alone_s = record.prefill_s_per_token, record.alone_s_per_token
        self._slot_s, self._user_slots = record.slot_s, record.user_slots

    # ── queries ─────────────────────────────────────────────────────────────────────────────

    @property
    def uncached(self) -> float:
        """Recent share of prompt tokens that were not cached."""
        return 1.0 - self._cached / self._queried if self._queried else 1.0

    @property
    def num_waiting(self) -> int:
        """Number of prompts without a first token."""
        return sum(entry.num_waiting for entry in self.entries)

    @property
    def has_late(self) -> bool:
        """Whether a waiting request has missed its objective; long and idle ones do not count."""
        now_s = self.clock.now_s()
        return any(p.late_s < now_s and not (p.long or p.idle_only) for p in self.entries)

    def count(self, **like: object) -> int:
        """Count the waiting prompts of entries with these fields: count(user="alice")."""
        return sum(
            entry.num_waiting
            for entry in self.entries
            if all(getattr(entry, name) == value for name, value in like.items())
        )

    def tokens(self, entry: QueueEntry) -> float:
        """Return the expected number of prompt tokens of an entry that are still to be computed."""
        remaining = sum(entry.remaining.values())
        untouched = sum([entry.remaining[n] for n in entry.untouched])
        return remaining - untouched + untouched * self.uncached

    def requests_ahead(self, new: QueueEntry) -> Iterator[QueueEntry]:
        """Yield the requests that `new` has to wait for, itself not included."""
        now_s = self.clock.now_s()
        for entry in self.entries:
            if entry is new:
                continue
            if not self.in_order and not new.idle_only:
                late = entry.due_s < now_s
                if entry.idle_only or (self._by_deadline and (late or entry.due_s > new.due_s)):
                    continue
            yield entry

    def wait_s(self, new: QueueEntry) -> float:
        """Return the seconds until the first token of `new`, its own prompts included."""
        ahead, stretch = list(self.requests_ahead(new)), 1.0
        is_step_running, slots_s = bool(ahead), self._slots_s(new, ahead)
        if self._by_deadline and not (new.long or new.idle_only):
            ahead = [entry for entry in ahead if not entry.long]
            if self._is_lane_used(new):
                is_step_running, stretch = True, 1 / (1 - self.lane_share)
        tokens_s = self._served_before(new, ahead, self.tokens) * self.token_s * stretch
        return max(tokens_s, slots_s) + (self.step_s if is_step_running else 0.0)

    def _slots_s(self, new: QueueEntry, ahead: list[QueueEntry]) -> float:
        """Return the seconds until `new` has its slots, 0 while there are enough.

        Where its user has others waiting before it, slots come at the recent joint rate of that
        user and the users ahead. A user that may reclaim waits no longer than that takes. For one
        that may not, the result is 0 until a waiting request has got a slot: before that the rate
        of releases is not known.
        """
        reclaim_s = self._reclaim_s(new) if self._user_slots else inf
        if not self._slot_s:
            return reclaim_s if reclaim_s < inf else 0.0
        seconds = self._served_before(new, ahead, lambda entry: entry.num_slots) * self._slot_s
        if not self.in_order and any(entry.user == new.user for entry in ahead):
            seconds /= self._shares.of({new.user, *(entry.user for entry in ahead)})
        return min(seconds, reclaim_s)

    def _reclaim_s(self, new: QueueEntry) -> float:
        """Return the seconds until `new` has reclaimed its slots; infinite where it may not.

        It reclaims the slots beyond its share in further rounds, each after the answers of the one
        before have ended; the longest answer counts.
        """
        num_reclaimable = 0 if new.idle_only else self._num_reclaimable(new)
        if not num_reclaimable:
            return inf
        own = [p for p in self.entries if p.user == new.user and p is not new]
        num_slots_needed = sum(entry.num_slots for entry in own) + (new.num_waiting - 1) * new.n + 1
        given_s = min(new.due_s - self.clock.now_s(), DEFAULT_TTFT_S)
        patience_s = RECLAIM_WAIT_SHARE * max(given_s - self.tokens(new) * self.alone_s, 0.0)
        answer_s = max(entry.answer for entry in [*own, new]) * self.step_s / self._tokens_per_step
        return patience_s + (ceil(num_slots_needed / num_reclaimable) - 1) * answer_s

    def _num_reclaimable(self, new: QueueEntry) -> int:
        """Return how many slots the user of `new` may reclaim now.

        Each is taken from the user with the most slots by weight, as long as that one keeps at
        least as many as the user has then. Example: a user without a slot takes 4 of 8 and 3.
        """
        own, weight = self._user_slots.get(new.user, (0.0, 1.0))[0], new.weight
        others = [
            (-held / w, held, w) for user, (held, w) in self._user_slots.items() if user != new.user
        ]
        heapq.heapify(others)
        count = 0
        while others:
            _, held, w = others[0]
            if (held - 1) / w < (own + count + 1) / weight:
                break
            count += 1
            heapq.heapreplace(others, (-(held - 1) / w, held - 1, w))
        return count

    def _is_lane_used(self, new: QueueEntry) -> bool:
        """Whether long or late requests take their share of the time while `new` waits."""
        now_s = self.clock.now_s()
        return any(
            (entry.long or entry.due_s < now_s) and not entry.idle_only
            for entry in self.entries
            if entry is not new
        )

    def _served_before(
        self, new: QueueEntry, ahead: list[QueueEntry], size: Callable[[QueueEntry], float]
    ) -> float:
        """Return what is served until `new` is, in the unit of `size`: prompt tokens or slots.

        Each other user is served as much as the user of `new`, by weight, if it has that much
        waiting: 100 tokens of one user and 5,000 of another take 200.
        """
        if self.in_order:
            return sum(map(size, ahead)) + size(new)
        users: dict[str, float] = {new.user: size(new)}
        weights = {new.user: new.weight}
        for entry in ahead:
            users[entry.user] = users.get(entry.user, 0.0) + size(entry)
            weights.setdefault(entry.user, entry.weight)
        each = users[new.user] / new.weight
        return sum(min(amount, each * weights[user]) for user, amount in users.items())

    def backlog_s(self) -> float:
        """Return the seconds until all waiting requests have a first token, by prompt tokens."""
        return sum(map(self.tokens, self.entries)) * self.token_s

    def queue_s(self) -> float:
        """Return the same with the wait for slots, where those are short."""
        num_slots = sum(entry.num_slots for entry in self.entries)
        return max(self.backlog_s(), num_slots * self._slot_s)

    def check_integrity(self) -> None:
        """Assert that the counts agree, and that each waiting request has a waiting prompt."""
        for entry in self.entries:
            assert entry.remaining or not entry.lengths
            assert entry.untouched <= set(entry.remaining)
            assert all(
                0 <= remaining <= entry.lengths[n] for n, remaining in entry.remaining.items()
            )
        for engine_id, (entry, _) in self._by_engine.items():
            assert engine_id in entry.engine_ids
        assert self._cached <= self._queried + 1e-6
