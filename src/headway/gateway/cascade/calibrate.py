"""`headway gateway calibrate`: ask both routes of a cascade, and write the evidence."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from headway.core.errors import HeadwayError, UsageError
from headway.gateway import probe
from headway.gateway.cascade.checks import fits
from headway.gateway.cascade.evidence import EvidenceFile, RoutePair, evaluate_task
from headway.gateway.cascade.rows import CascadeRow
from headway.gateway.cascade.scoring import Scoring
from headway.gateway.choose import RoutingQuery
from headway.gateway.config import GatewayModelRow
from headway.gateway.dialects import UpstreamUsage
from headway.gateway.money import dollars_of
from headway.gateway.state import GatewayState
from headway.gateway.upstream import Upstream

TIMEOUT_S = 300.0
MAX_TRIES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationQuestion:
    """Question of a task class; `accepts` returns whether a text is a right answer."""

    task: str
    messages: list[dict[str, Any]]
    max_tokens: int
    accepts: Callable[[str], bool]


class CascadeCalibration:
    """One calibration: asks its questions of both routes, `concurrency` at a time."""

    def __init__(self, state: GatewayState, row: GatewayModelRow, concurrency: int) -> None:
        if row.cascade is None:
            raise UsageError(
                f"models: {row.name} has no cascade.", "Say cascade: {cheap: …, evidence: …}."
            )
        self._state = state
        self._row = row
        self._cascade: CascadeRow = row.cascade
        self._places = asyncio.Semaphore(concurrency)
        self._fingerprints: dict[str, set[str]] = {"cheap": set(), "dear": set()}

    async def run(
        self,
        questions: Sequence[CalibrationQuestion],
        *,
        tolerance: float,
        alpha: float,
        advance: Callable[[], None] = lambda: None,
    ) -> EvidenceFile:
        """Return the evidence; raises HeadwayError if a route does not answer."""

        async def one(question: CalibrationQuestion) -> RoutePair:
            async with self._places:
                pair = await self._pair(question)
            advance()
            return pair

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(question)) for question in questions]
        except* HeadwayError as errors:
            raise errors.exceptions[0] from None
        by_task: dict[str, list[RoutePair]] = {}
        for task in tasks:
            by_task.setdefault(task.result().task, []).append(task.result())
        return EvidenceFile(
            model=self._row.name,
            cheap=self._cascade.cheap,
            made_at=self._state.clock.wall_s(),
            tolerance=tolerance,
            alpha=alpha,
            fingerprints={side: sorted(names) for side, names in self._fingerprints.items()},
            tasks=[evaluate_task(pairs, tolerance, alpha) for pairs in by_task.values()],
        )

    async def _pair(self, question: CalibrationQuestion) -> RoutePair:
        raw = {
            "messages": question.messages,
            "max_tokens": question.max_tokens,
            "temperature": 0,
        }
        asks_margin = "margin" in self._cascade.checks
        wants = {"logprobs": True, "top_logprobs": 2} if asks_margin else {}
        upstream, cheap = await self._ask("cheap", self._cascade.cheap, {**raw, **wants})
        dear_upstream, dear = await self._ask("dear", self._row.name, raw)
        scores: dict[str, float | None] = {}
        check_costs: dict[str, float] = {}
        for check in self._cascade.checks:
            costs: list[float] = []
            scoring = Scoring(
                state=self._state,
                row=self._cascade,
                task=question.task,
                raw=raw,
                model=self._cascade.cheap,
                upstream=upstream,
                answer=cheap.content,
                spent=lambda who, usage, costs=costs: costs.append(  # type: ignore[misc]
                    dollars_of(who.price, usage, who.speed)
                ),
            )
            scores[check] = await scoring.score(check)
            check_costs[check] = sum(costs)
        return RoutePair(
            task=question.task,
            cheap_right=question.accepts(cheap.content.text),
            dear_right=question.accepts(dear.content.text),
            fits=fits(raw, cheap.content),
            scores=scores,
            cheap_cost=cost_of(upstream, cheap),
            dear_cost=cost_of(dear_upstream, dear),
            check_costs=check_costs,
        )

    async def _ask(
        self, side: str, route: str, raw: dict[str, Any]
    ) -> tuple[Upstream, probe.Reply]:
        """Return one answer of a route; a failed upstream is replaced by another of the route."""
        without, why = set[Upstream](), "no upstream is up"
        for _ in range(MAX_TRIES):
            upstream = self._state.pools[route].choose(RoutingQuery(model=route), without)
            if upstream is None:
                break
            try:
                reply = await probe.ask(upstream, route, raw, TIMEOUT_S)
            except probe.PROBE_FAILURES as error:
                why = f"{upstream.name}: {error or type(error).__name__}"
                without.add(upstream)
                continue
            if reply.content.fingerprint:
                self._fingerprints[side].add(reply.content.fingerprint)
            return upstream, reply
        raise HeadwayError(f"The route {route} does not answer: {why}.", "Is it up?")


def cost_of(upstream: Upstream, reply: probe.Reply) -> float:
    """Return the dollars of a reply: by tokens, or by its time on a machine with hourly price."""
    price = upstream.price
    if price.hour is not None:
        return reply.seconds / 3600 * price.hour
    return dollars_of(price, UpstreamUsage(*reply.usage), upstream.speed)
