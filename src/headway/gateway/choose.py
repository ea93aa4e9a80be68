"""Choice of the next upstream: those that fit the request, by a policy.

    fits       context, tools, schemas, images, embeddings, the model's name
    healthy    its breaker allows it and the last health checks succeeded
    available  it did not report that it serves nothing now, unless all did
    policy     time: smallest expected time to first token; least, round_robin, weighted, pinned

Breakers never exclude more than half of a pool: if they allow less than half, all upstreams that
are up are tried (panic). If they allow none, fallbacks that are allowed come first.
"""

import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import count
from statistics import fmean

from headway.gateway.upstream import Upstream

PANIC_SHARE = 0.5
EQUAL_WAIT_RATIO, EQUAL_WAIT_S = 1.25, 0.001
"""Expected times within this factor, plus these seconds, count as equal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingQuery:
    """Input of a choice: the model's name, the prompt's page keys and bytes, required features."""

    model: str
    keys: Sequence[int] = ()
    num_bytes: int = 0
    answer: int | None = None
    """Maximum answer tokens; None if the client did not state it."""
    needs: frozenset[str] = frozenset()
    pinned: str = ""
    """The one upstream that keeps the response that this request continues."""


@dataclass(slots=True)
class Pool:
    """The upstreams of one model row."""

    upstreams: list[Upstream]
    policy: str = "time"
    any_name: bool = False
    """Whether only upstreams that serve the requested name may answer."""
    _turns: "count[int]" = field(default_factory=count)

    def choose(
        self, query: RoutingQuery, without: Collection[Upstream] = (), *, last: bool = True
    ) -> Upstream | None:
        """Return the next upstream; None if no healthy one fits.

        A pool that is not the `last` one returns None if its breakers allow none, or if all of its
        upstreams serve nothing now.
        """
        fitting = [each for each in self.fitting(query) if not each.is_down]
        fitting = [each for each in fitting if not each.is_unavailable] or (fitting if last else [])
        allowed = [each for each in fitting if each.breaker.allows]
        if len(allowed) < PANIC_SHARE * len(fitting) and (allowed or last):
            allowed = fitting
        free = [each for each in allowed if each not in without and not each.is_full]
        if not free:
            return None
        turn = 0 if without else next(self._turns)  # a retry does not advance the round robin
        return POLICIES[self.policy](free, query, turn)

    def fitting(self, query: RoutingQuery) -> list[Upstream]:
        """Return the upstreams that can answer this request.

        If the prompt seems too long for all, the one with the largest context refuses it.
        """
        able = [
            each
            for each in self.upstreams
            if query.needs <= each.can
            and (not query.pinned or each.name == query.pinned)
            and (not self.any_name or each.serves(query.model) or not each.was_reached)
        ]
        fitting = [each for each in able if has_room(each, query)]
        if fitting or not able:
            return fitting
        largest = max(each.context for each in able)
        return [each for each in able if each.context == largest]


def has_room(upstream: Upstream, query: RoutingQuery) -> bool:
    """Return whether prompt and answer fit in the context, as estimated from bytes."""
    if not upstream.context:
        return True
    prompt = upstream.speed.tokens_of(query.num_bytes)
    return prompt + (query.answer or 1) <= upstream.context


def uncached_tokens(upstream: Upstream, query: RoutingQuery) -> float:
    """Return the prompt tokens that are not in the upstream's prefix cache."""
    uncached_bytes = query.num_bytes - upstream.pages.prefix_bytes(list(query.keys))
    return upstream.speed.tokens_of(max(0, uncached_bytes))


def wait_s(upstream: Upstream, query: RoutingQuery, bytes_per_token: float) -> float:
    """Return the expected seconds to the first token."""
    speed = upstream.speed
    uncached_bytes = max(0, query.num_bytes - upstream.pages.prefix_bytes(list(query.keys)))
    return speed.queue_s + uncached_bytes / bytes_per_token * speed.token_s


# ── policies ────────────────────────────────────────────────────────────────────────────────

PolicyFunction = Callable[[list[Upstream], RoutingQuery, int], Upstream]


def by_time(free: list[Upstream], query: RoutingQuery, turn: int) -> Upstream:
    """Return the upstream with the smallest expected time to first token.

    Among equal ones it takes the one with the fewest requests in flight, then the one with the
    fewest cached pages: this spreads prefixes over caches even when requests arrive one by one.
    """
    ratio = fmean(each.speed.bytes_per_token for each in free)  # of one model, for all alike
    waits = [(wait_s(each, query, ratio), each) for each in free]
    bound_s = min(wait for wait, _ in waits) * EQUAL_WAIT_RATIO + EQUAL_WAIT_S
    equal = [each for wait, each in waits if wait <= bound_s]
    idlest = min((len(each.speed.flights), len(each.pages)) for each in equal)
    best = [each for each in equal if (len(each.speed.flights), len(each.pages)) == idlest]
    return best[turn % len(best)]


def by_least(free: list[Upstream], query: RoutingQuery, turn: int) -> Upstream:
    """Return the upstream with the fewest requests in flight."""
    least = min(len(each.speed.flights) for each in free)
    equal = [each for each in free if len(each.speed.flights) == least]
    return equal[turn % len(equal)]


def by_round_robin(free: list[Upstream], query: RoutingQuery, turn: int) -> Upstream:
    return free[turn % len(free)]


def by_weight(free: list[Upstream], query: RoutingQuery, turn: int) -> Upstream:
    return random.choices(free, [each.row.weight for each in free])[0]


def pinned(free: list[Upstream], query: RoutingQuery, turn: int) -> Upstream:
    """Return the same upstream for the same prompt prefix, as long as it is available."""
    key = query.keys[0] if query.keys else 0
    return max(free, key=lambda each: hash((key, each.name)))


POLICIES: dict[str, PolicyFunction] = {
    "time": by_time,
    "least": by_least,
    "round_robin": by_round_robin,
    "weighted": by_weight,
    "pinned": pinned,
}
