"""Score of one answer by one check, with its cost at upstreams."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headway.gateway import probe
from headway.gateway.answers import AnswerContent
from headway.gateway.cascade.checks import judge_body, mark_of, similarity
from headway.gateway.cascade.rows import CascadeRow
from headway.gateway.choose import RoutingQuery
from headway.gateway.dialects import UpstreamUsage
from headway.gateway.upstream import Upstream

if TYPE_CHECKING:
    from headway.gateway.state import GatewayState

SECOND_ANSWER_PARAMS = {"temperature": 0.8, "seed": 1}
"""Sampling parameters of the second answer for the check `agree`."""
OnUsage = Callable[[Upstream, UpstreamUsage], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scoring:
    """Scoring of one answer of the cheap route; calls `spent` for each question to an upstream."""

    state: "GatewayState"
    row: CascadeRow
    task: str
    raw: dict[str, Any]
    model: str
    upstream: Upstream
    answer: AnswerContent
    spent: OnUsage

    async def score(self, check: str) -> float | None:
        """Return the score; None if there is none."""
        if check == "margin":
            return self.answer.margin
        try:
            if check == "scorer":
                body = {"task": self.task, "request": self.raw, "answer": self.answer.text}
                return await self.state.scorers.score(self.row.scorer, body, self.row.within_s)
            return await (self._agree() if check == "agree" else self._judge())
        except probe.PROBE_FAILURES:
            return None

    async def _agree(self) -> float | None:
        raw = {**self.raw, **SECOND_ANSWER_PARAMS, "stream": False}
        raw.pop("stream_options", None)
        reply = await probe.ask(self.upstream, self.model, raw, self.row.within_s)
        self.spent(self.upstream, reply.usage)
        return similarity(self.answer.text, reply.content.text)

    async def _judge(self) -> float | None:
        body = judge_body(self.raw, self.answer.text)
        query = RoutingQuery(model=self.row.judge, needs=frozenset({"schemas"}))
        judge = self.state.pools[self.row.judge].choose(query)
        if judge is None:
            return None
        reply = await probe.ask(judge, self.row.judge, body, self.row.within_s)
        self.spent(judge, reply.usage)
        return mark_of(reply.content.text)
