"""How long a request would wait for its first token, as the server process can tell by itself.

It knows the prompts it has sent and how far each has been computed (`StepRecord.prefilling`). What
a prompt token takes, decodes beside it included, is the prediction of the engine's `perf.StepModel`
in the newest record. No message goes to the engine, so an answer comes at once, also while a step
is running. Worked example, 1 ms a token:

    waiting   a 300 tokens, b 1,200 of which 1,000 are computed, c of an idle class
    newcomer  100 tokens: (300 + 200 + 100) x 1 ms = 0.6 s; what is idle goes behind it

While rows or blocks are short the queue is also so many rows long, of which one comes free every
`StepRecord.row_s`: (a + b + newcomer) x 0.4 s = 1.2 s. Where a user has more of its own before it,
and others, who do not wait now, had half of the rows of late, it takes twice as long. The longer
of the two counts. A newcomer whose user is below its share reclaims a row (`engine.reclaim`), so
that the rows take it no longer than its patience: (1.5 s - 0.1 s) x 0.25 = 0.35 s. Of 64 rows that
somebody else holds it may have 32; a newcomer of 40 prompts has the other 8 when its first answers
have ended, at 50 tokens of 40 ms after 0.35 s + 2 s.
"""

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import ceil, inf

from headway.admit.queue import PATIENCE, UNPROMISED_S, QueueOrder
from headway.core.clock import Clock
from headway.core.records import StepRecord

STARTS = 32
"""How many starts back half of them count no more."""
GAINED_FOLLOWS = 0.1
"""How far what a step gained moves what steps are taken to gain."""
LEAST_SHARE = 0.05
"""Of the rows: what users of less are taken to get."""


@dataclass(slots=True, eq=False, kw_only=True)
class QueueEntry:
    """One request in the queue: its prompts without a first token, by number.

    `left` has the tokens not yet computed of each, `untouched` those that no step has begun; each
    asks for `n` sequences of at most `answer` tokens; it is
    `long` by what its prompts take; `due_s` is infinite without an objective, and `late_s` is when
    others may say that it is late: not before its class's objective. It is in the queue before
    `engine`. One that is `best_effort` has no objective and waits longer. `num_bytes` is the size
    of its body.
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
    left: dict[int, int] = field(default_factory=dict)
    lengths: list[int] = field(default_factory=list)
    untouched: set[int] = field(default_factory=set)
    engine_ids: list[int] = field(default_factory=list)

    @property
    def num_waiting(self) -> int:
        """Prompts that wait; a request whose prompts are not known yet counts as one."""
        return len(self.left) if self.lengths else 1

    @property
    def num_rows(self) -> int:
        """Sequences that wait."""
        return self.num_waiting * self.n


class Shares:
    """Which part of the rows each user had of late, while they were short."""

    def __init__(self) -> None:
        self._num_starts = 0
        self._had: dict[str, tuple[float, int]] = {}

    def began(self, user: str) -> None:
        """A row went to this user."""
        had = self._decayed(user)
        self._num_starts += 1
        self._had[user] = had * 0.5 ** (1 / STARTS) + 1.0, self._num_starts
        if len(self._had) > 16 * STARTS:
            self._had = {u: had for u, had in self._had.items() if self._decayed(u) > 0.01}

    def of(self, users: set[str]) -> float:
        """The share of these together, from `LEAST_SHARE` to 1."""
        keep = 0.5 ** (1 / STARTS)
        total = (1 - keep**self._num_starts) / (1 - keep)
        had = sum(self._decayed(user) for user in users)
        return max(had / total, LEAST_SHARE) if total else 1.0

    def _decayed(self, user: str) -> float:
        had, since = self._had.get(user, (0.0, self._num_starts))
        age: float = 0.5 ** ((self._num_starts - since) / STARTS)
        return had * age


class Forecast:
    """The queue before one engine, in the order in which its policy serves it."""

    def __init__(self, clock: Clock, *, order: QueueOrder, lane_share: float) -> None:
        self.clock = clock
        self.in_order = order == QueueOrder.ARRIVAL
        self._by_deadline = order == QueueOrder.DEADLINE
        self.lane_share = lane_share
        self.entries: dict[QueueEntry, None] = {}
        self.step_s = 0.0
        self._gained = 1.0
        """Tokens of a sequence in a step: more than 1 where guesses come."""
        self._by_engine: dict[int, tuple[QueueEntry, int]] = {}
        self._queried = self._cached = 0.0
        self.token_s = self.alone_s = self._row_s = 0.0
        """Predicted seconds of a prompt token, with what decodes beside it and alone; and the mean
        time between slot releases."""
        self._user_slots: dict[str, tuple[float, float]] = {}
        self._shares = Shares()

    # ── what happens ────────────────────────────────────────────────────────────────────────

    def enter(self, entry: QueueEntry) -> None:
        """A request is here; its prompts may not be known yet."""
        self.entries[entry] = None

    def measured(
        self, entry: QueueEntry, lengths: list[int], found: list[int] | None = None
    ) -> None:
        """Its prompts have so many tokens, of which `found` will be in memory.

        Where that is not known they count at the share that had to be computed of late.
        """
        entry.lengths = lengths
        entry.left = dict(enumerate(lengths))
        entry.untouched = set(entry.left)
        if found is not None:
            entry.left = {n: length - found[n] for n, length in enumerate(lengths)}
            entry.untouched.clear()

    def sent(self, entry: QueueEntry, number: int, engine_id: int) -> None:
        """One of its prompts went to the engine under this number."""
        entry.engine_ids.append(engine_id)
        self._by_engine[engine_id] = entry, number

    def began(self, entry: QueueEntry, number: int) -> None:
        """The first token of one of its prompts is here."""
        if self._row_s:
            self._shares.began(entry.user)
        entry.left.pop(number, None)
        entry.untouched.discard(number)
        if not entry.left:
            self.entries.pop(entry, None)

    def entry_of(self, engine_id: int) -> QueueEntry | None:
        """Whose prompt went to the engine under this number, while it is not over."""
        found = self._by_engine.get(engine_id)
        return found[0] if found else None

    def hand_over(self, entry: QueueEntry, to: "Forecast") -> None:
        """The engine behind `to` answers it from now on."""
        if to is self:
            return
        if entry in self.entries:
            del self.entries[entry]
            to.entries[entry] = None
        for engine_id in entry.engine_ids:
            to._by_engine[engine_id] = self._by_engine.pop(engine_id)

    def leave(self, entry: QueueEntry) -> None:
        """The request is over, however far it came; safe to call twice."""
        self.entries.pop(entry, None)
        for engine_id in entry.engine_ids:
            self._by_engine.pop(engine_id, None)

    def on_record(self, record: StepRecord) -> None:
        """Take a step's record: how far each prompt is, and what the engine predicts."""
        for engine_id, _, computed in record.prefilling:
            entry, number = self._by_engine.get(engine_id, (None, 0))
            if entry is not None and number in entry.left:
                entry.left[number] = min(
                    entry.left[number], max(0, entry.lengths[number] - computed)
                )
                entry.untouched.discard(number)
        self.step_s = record.duration_s
        if record.num_decode_tokens and (record.has_more or self._gained > 1):
            self._gained += GAINED_FOLLOWS * (record.tokens_per_decode - self._gained)
        if record.num_queried_tokens:
            keep = 0.5 ** (record.num_queried_tokens / max(self._queried, 1.0))
            self._queried = self._queried * keep + record.num_queried_tokens
            self._cached = self._cached * keep + record.num_cached_tokens
        self.token_s, self.alone_s = record.prefill_s_per_token, record.alone_s_per_token
        self._row_s, self._user_slots = record.row_s, record.user_slots

    # ── what is asked ───────────────────────────────────────────────────────────────────────

    @property
    def uncached(self) -> float:
        """The share of prompts that has to be computed, as it was of late."""
        return 1.0 - self._cached / self._queried if self._queried else 1.0

    @property
    def num_waiting(self) -> int:
        """Prompts without a first token."""
        return sum(entry.num_waiting for entry in self.entries)

    @property
    def has_late(self) -> bool:
        """Whether one that waits has missed its objective already; long and idle ones aside."""
        now_s = self.clock.now_s()
        return any(p.late_s < now_s and not (p.long or p.idle_only) for p in self.entries)

    def count(self, **like: object) -> int:
        """Prompts that wait of entries with these fields: count(user="alice")."""
        return sum(
            entry.num_waiting
            for entry in self.entries
            if all(getattr(entry, name) == value for name, value in like.items())
        )

    def tokens(self, entry: QueueEntry) -> float:
        """Prompt tokens of an entry that are still to be computed."""
        left = sum(entry.left.values())
        untouched = sum([entry.left[n] for n in entry.untouched])
        return left - untouched + untouched * self.uncached

    def before(self, newcomer: QueueEntry) -> Iterator[QueueEntry]:
        """Whom the newcomer has to wait for, itself not included."""
        now_s = self.clock.now_s()
        for entry in self.entries:
            if entry is newcomer:
                continue
            if not self.in_order and not newcomer.idle_only:
                late = entry.due_s < now_s
                if entry.idle_only or (
                    self._by_deadline and (late or entry.due_s > newcomer.due_s)
                ):
                    continue
            yield entry

    def wait_s(self, newcomer: QueueEntry) -> float:
        """Seconds until the newcomer's first token, its own prompts included."""
        ahead, stretch = list(self.before(newcomer)), 1.0
        beside, rows_s = bool(ahead), self._rows_s(newcomer, ahead)
        if self._by_deadline and not (newcomer.long or newcomer.idle_only):
            ahead = [entry for entry in ahead if not entry.long]
            if self._lane_is_used(newcomer):
                beside, stretch = True, 1 / (1 - self.lane_share)
        tokens_s = self._shared(newcomer, ahead, self.tokens) * self.token_s * stretch
        return max(tokens_s, rows_s) + (self.step_s if beside else 0.0)

    def _rows_s(self, newcomer: QueueEntry, ahead: list[QueueEntry]) -> float:
        """Seconds until the newcomer has its rows, 0 while there are enough.

        Where its user has more waiting before it they come at the rate at which it and the users
        ahead had them of late; who asks seldom had few. Whoever may reclaim waits no longer than
        it takes to do so. For who may not, 0 counts until one who waited has got a row: before
        that nobody knows when one comes free.
        """
        reclaim_s = self._reclaim_s(newcomer) if self._user_slots else inf
        if not self._row_s:
            return reclaim_s if reclaim_s < inf else 0.0
        seconds = self._shared(newcomer, ahead, lambda entry: entry.num_rows) * self._row_s
        if not self.in_order and any(entry.user == newcomer.user for entry in ahead):
            seconds /= self._shares.of({newcomer.user, *(entry.user for entry in ahead)})
        return min(seconds, reclaim_s)

    def _reclaim_s(self, newcomer: QueueEntry) -> float:
        """Seconds until the newcomer has reclaimed its rows; infinite where its user may not.

        What it may not have at once it takes when its first answers have ended, as many again; the
        longest of them counts.
        """
        most = 0 if newcomer.idle_only else self._may_reclaim(newcomer)
        if not most:
            return inf
        own = [p for p in self.entries if p.user == newcomer.user and p is not newcomer]
        rows = sum(entry.num_rows for entry in own) + (newcomer.num_waiting - 1) * newcomer.n + 1
        given_s = min(newcomer.due_s - self.clock.now_s(), UNPROMISED_S)
        patience_s = PATIENCE * max(given_s - self.tokens(newcomer) * self.alone_s, 0.0)
        answer_s = max(entry.answer for entry in [*own, newcomer]) * self.step_s / self._gained
        return patience_s + (ceil(rows / most) - 1) * answer_s

    def _may_reclaim(self, newcomer: QueueEntry) -> int:
        """Rows that its user may reclaim now, one after another from who holds most, by weight.

        Who gives still holds as much as the user then: of 8 and 3 rows one who has none takes 4.
        """
        had, weight = self._user_slots.get(newcomer.user, (0.0, 1.0))[0], newcomer.weight
        others = [
            (-held / w, held, w)
            for user, (held, w) in self._user_slots.items()
            if user != newcomer.user
        ]
        heapq.heapify(others)
        count = 0
        while others:
            _, held, w = others[0]
            if (held - 1) / w < (had + count + 1) / weight:
                break
            count += 1
            heapq.heapreplace(others, (-(held - 1) / w, held - 1, w))
        return count

    def _lane_is_used(self, newcomer: QueueEntry) -> bool:
        """Whether long or late ones take their share beside the newcomer."""
        now_s = self.clock.now_s()
        return any(
            (entry.long or entry.due_s < now_s) and not entry.idle_only
            for entry in self.entries
            if entry is not newcomer
        )

    def _shared(
        self, newcomer: QueueEntry, ahead: list[QueueEntry], size: Callable[[QueueEntry], float]
    ) -> float:
        """What is served until the newcomer is, in prompt tokens or in rows.

        While a user's are computed each other user gets as many, by weight, as far as it has any:
        100 tokens of one who waits beside 5,000 of another take 200.
        """
        if self.in_order:
            return sum(map(size, ahead)) + size(newcomer)
        users: dict[str, float] = {newcomer.user: size(newcomer)}
        weights = {newcomer.user: newcomer.weight}
        for entry in ahead:
            users[entry.user] = users.get(entry.user, 0.0) + size(entry)
            weights.setdefault(entry.user, entry.weight)
        each = users[newcomer.user] / newcomer.weight
        return sum(min(amount, each * weights[user]) for user, amount in users.items())

    def backlog_s(self) -> float:
        """Seconds until all that waits has its first token."""
        return sum(map(self.tokens, self.entries)) * self.token_s

    def queue_s(self) -> float:
        """Seconds until all that waits has its first token, rows counted where they are short."""
        num_rows = sum(entry.num_rows for entry in self.entries)
        return max(self.backlog_s(), num_rows * self._row_s)

    def check_integrity(self) -> None:
        """Counts fit each other; nobody waits without a prompt to wait for."""
        for entry in self.entries:
            assert entry.left or not entry.lengths
            assert entry.untouched <= set(entry.left)
            assert all(0 <= left <= entry.lengths[n] for n, left in entry.left.items())
        for engine_id, (entry, _) in self._by_engine.items():
            assert engine_id in entry.engine_ids
        assert self._cached <= self._queried + 1e-6
