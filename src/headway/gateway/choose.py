"""Which upstream is asked next: those that fit the request, by a policy.

    fits      context, tools, schemas, images, embeddings, the model's name
    healthy   its breaker allows it and the last looks found it
    there     it did not say that it serves nothing now, unless all did
    policy    time: the least expected seconds to the first token; least, round_robin, weighted,
              pinned

Breakers never take the better half away: where less than half of a pool is allowed by them, all
that are up are tried (panic). Where none is, fallbacks that are allowed go first.
"""

import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import count
from statistics import fmean

from headway.gateway.upstream import Upstream

PANIC_SHARE = 0.5
ALIKE, ALIKE_S = 1.25, 0.001
"""Forecasts so close are alike: what prompts take differs by as much from one to the next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingQuery:
    """What a choice goes by: the model's name, the prompt's pages and bytes, what it needs."""

    model: str
    keys: Sequence[int] = ()
    num_bytes: int = 0
    answer: int | None = None
    """The most tokens of its answer, None where the client did not say."""
    needs: frozenset[str] = frozenset()
    pinned: str = ""
    """The one upstream that knows what it goes on from."""


@dataclass(slots=True)
class Pool:
    """The upstreams of one model row."""

    upstreams: list[Upstream]
    policy: str = "time"
    any_name: bool = False
    """Whether only those may answer that serve the name which was asked for."""
    _turns: "count[int]" = field(default_factory=count)

    def choose(
        self, query: RoutingQuery, without: Collection[Upstream] = (), *, last: bool = True
    ) -> Upstream | None:
        """The next upstream to ask; None where no healthy one fits.

        A pool that is not the `last` to be asked gives nobody where breakers allow none of it, or
        where all of it serve nothing now.
        """
        fitting = [each for each in self.fitting(query) if not each.is_down]
        fitting = [each for each in fitting if not each.is_away] or (fitting if last else [])
        allowed = [each for each in fitting if each.breaker.allows]
        if len(allowed) < PANIC_SHARE * len(fitting) and (allowed or last):
            allowed = fitting
        free = [each for each in allowed if each not in without and not each.is_full]
        if not free:
            return None
        turn = 0 if without else next(self._turns)  # a second attempt takes nobody's turn
        return POLICIES[self.policy](free, query, turn)

    def fitting(self, query: RoutingQuery) -> list[Upstream]:
        """Those that can answer at all.

        Where the prompt seems to be too long for all of them the largest context may say so.
        """
        able = [
            each
            for each in self.upstreams
            if query.needs <= each.can
            and (not query.pinned or each.name == query.pinned)
            and (not self.any_name or each.serves(query.model) or not each.looked)
        ]
        fitting = [each for each in able if has_room(each, query)]
        if fitting or not able:
            return fitting
        largest = max(each.context for each in able)
        return [each for each in able if each.context == largest]


def has_room(upstream: Upstream, query: RoutingQuery) -> bool:
    """Whether prompt and answer fit in its context, as far as bytes tell."""
    if not upstream.context:
        return True
    prompt = upstream.speed.tokens_of(query.num_bytes)
    return prompt + (query.answer or 1) <= upstream.context


def uncached(upstream: Upstream, query: RoutingQuery) -> float:
    """Prompt tokens that it has yet to compute."""
    uncached_bytes = query.num_bytes - upstream.pages.prefix_bytes(list(query.keys))
    return upstream.speed.tokens_of(max(0, uncached_bytes))


def wait_s(upstream: Upstream, query: RoutingQuery, bytes_per_token: float) -> float:
    """Expected seconds to the first token there."""
    speed = upstream.speed
    uncached_bytes = max(0, query.num_bytes - upstream.pages.prefix_bytes(list(query.keys)))
    return speed.queue_s + uncached_bytes / bytes_per_token * speed.token_s


# ── policies ────────────────────────────────────────────────────────────────────────────────

Choice = Callable[[list[Upstream], RoutingQuery, int], Upstream]


def by_time(free: list[Upstream], query: RoutingQuery, turn: int) -> Upstream:
    """The least expected time to the first token.

    Of those that no forecast can tell apart the one with the least to do, then with the most room
    in its cache: beginnings spread, also where requests come one after the other.
    """
    ratio = fmean(each.speed.bytes_per_token for each in free)  # of one model, for all alike
    waits = [(wait_s(each, query, ratio), each) for each in free]
    bound_s = min(wait for wait, _ in waits) * ALIKE + ALIKE_S
    equal = [each for wait, each in waits if wait <= bound_s]
    idlest = min((len(each.speed.flights), len(each.pages)) for each in equal)
    best = [each for each in equal if (len(each.speed.flights), len(each.pages)) == idlest]
    return best[turn % len(best)]


def by_least(free: list[Upstream], query: RoutingQuery, turn: int) -> Upstream:
    """The fewest requests in flight."""
    least = min(len(each.speed.flights) for each in free)
    equal = [each for each in free if len(each.speed.flights) == least]
    return equal[turn % len(equal)]


def by_turn(free: list[Upstream], query: RoutingQuery, turn: int) -> Upstream:
    return free[turn % len(free)]


def by_weight(free: list[Upstream], query: RoutingQuery, turn: int) -> Upstream:
    return random.choices(free, [each.row.weight for each in free])[0]


def pinned(free: list[Upstream], query: RoutingQuery, turn: int) -> Upstream:
    """The same upstream for the same beginning of a prompt, as long as it is there."""
    key = query.keys[0] if query.keys else 0
    return max(free, key=lambda each: hash((key, each.name)))


POLICIES: dict[str, Choice] = {
    "time": by_time,
    "least": by_least,
    "round_robin": by_turn,
    "weighted": by_weight,
    "pinned": pinned,
}
