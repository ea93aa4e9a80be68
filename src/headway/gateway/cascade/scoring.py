"""The score of one answer by one check, and what that took of upstreams."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headway.gateway import probe
from headway.gateway.answers import AnswerContent
from headway.gateway.cascade.checks import alike, judge_body, mark_of
from headway.gateway.cascade.rows import CascadeRow
from headway.gateway.choose import RoutingQuery
from headway.gateway.dialects import Usage
from headway.gateway.upstream import Upstream

if TYPE_CHECKING:
    from headway.gateway.state import State

SAMPLED = {"temperature": 0.8, "seed": 1}
"""How a second answer is asked for that may differ."""
Spent = Callable[[Upstream, Usage], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scoring:
    """One answer of the cheap route to a chat, to be scored; `spent` hears of each question."""

    state: "State"
    row: CascadeRow
    task: str
    raw: dict[str, Any]
    model: str
    upstream: Upstream
    answer: AnswerContent
    spent: Spent

    async def score(self, check: str) -> float | None:
        """The score, None where none is to be had."""
        if check == "margin":
            return self.answer.margin
        try:
            if check == "scorer":
                body = {"task": self.task, "request": self.raw, "answer": self.answer.text}
                return await self.state.scorers.score(self.row.scorer, body, self.row.within_s)
            return await (self._agree() if check == "agree" else self._judge())
        except probe.FAILED:
            return None

    async def _agree(self) -> float | None:
        raw = {**self.raw, **SAMPLED, "stream": False}
        raw.pop("stream_options", None)
        reply = await probe.ask(self.upstream, self.model, raw, self.row.within_s)
        self.spent(self.upstream, reply.usage)
        return alike(self.answer.text, reply.content.text)

    async def _judge(self) -> float | None:
        body = judge_body(self.raw, self.answer.text)
        query = RoutingQuery(model=self.row.judge, needs=frozenset({"schemas"}))
        judge = self.state.pools[self.row.judge].choose(query)
        if judge is None:
            return None
        reply = await probe.ask(judge, self.row.judge, body, self.row.within_s)
        self.spent(judge, reply.usage)
        return mark_of(reply.content.text)
