"""A server of known seconds, as claims ask it: a prefix cache of blocks, and steps by formula."""

from collections.abc import Callable, Sequence
from typing import Any

from literature.asking import Asking, Body, TimedAnswer, words
from literature.subject import Subject, started

BLOCK = 16


class ScriptedAsking(Asking):
    """A request takes `fixed_s`, `token_s` a token of its prompt that is not known, and `step_s` a
    token of its answer, `row_s` more for each other request at once. `tells`: cached tokens."""

    def __init__(
        self,
        *,
        fixed_s: float = 0.01,
        token_s: float = 1e-3,
        step_s: float = 0.1,
        row_s: float = 0.0,
        context: int = 4096,
        tells: bool = True,
        replies: Callable[[dict[str, Any]], str] = lambda body: "",
    ) -> None:
        super().__init__(
            url="http://scripted", api_key="", model="m", context=context, tokens_per_word=1.0
        )
        self._costs = fixed_s, token_s, step_s, row_s
        self._tells, self._replies = tells, replies
        self._known: set[tuple[str, ...]] = set()
        self.asked: list[Body] = []

    def text(self, tokens: int, seed: int) -> str:
        return " ".join(words(tokens, seed))

    def one(self, body: Body, at_s: float, at_once: int) -> TimedAnswer:
        """One answer."""
        self.asked.append(body)
        prompt = body.prompt.split()
        starts = range(BLOCK, len(prompt) + 1, BLOCK)
        found = [end for end in starts if tuple(prompt[:end]) in self._known]
        cached = min(max(found, default=0), len(prompt) - 1)
        self._known |= {tuple(prompt[:end]) for end in starts}
        fixed_s, token_s, step_s, row_s = self._costs
        ttft_s = fixed_s + token_s * (len(prompt) - cached)
        tpot_s = step_s + row_s * (at_once - 1)
        return TimedAnswer(
            ttft_s=ttft_s,
            tpot_s=tpot_s if body.tokens > 1 else None,
            e2e_s=ttft_s + tpot_s * (body.tokens - 1),
            sent_s=at_s,
            prompt=len(prompt),
            cached=cached if self._tells else None,
            output=body.tokens,
            text=" answer",
        )

    def all(self, bodies: Sequence[Body], at_once: int = 1) -> list[TimedAnswer]:
        """So many lanes, each with the next body when it is free."""
        free = [0.0] * at_once
        found = []
        for body in bodies:
            lane = free.index(min(free))
            asked = self.one(body, free[lane], at_once)
            free[lane] += asked.e2e_s
            found.append(asked)
        return found

    def at_times(self, bodies: Sequence[Body]) -> list[TimedAnswer | None]:
        """One lane: who comes while it is taken waits."""
        free_s, found = 0.0, list[TimedAnswer | None]()
        for body in bodies:
            alone = self.one(body, body.at_s, 1)
            wait_s = max(0.0, free_s - body.at_s)
            free_s = body.at_s + wait_s + alone.e2e_s
            found.append(
                TimedAnswer(
                    ttft_s=alone.ttft_s + wait_s,
                    tpot_s=alone.tpot_s,
                    e2e_s=alone.e2e_s + wait_s,
                    sent_s=body.at_s,
                    prompt=alone.prompt,
                    cached=alone.cached,
                    output=alone.output,
                    text=alone.text,
                )
            )
        return found

    def chat(self, content: dict[str, Any]) -> dict[str, Any]:
        message = {"content": self._replies(content)}
        return {"choices": [{"message": message}], "usage": {"completion_tokens": 20}}


def asked_of(asking: Asking, repeats: int = 3) -> Subject:
    """A subject whose server is this one."""
    subject = Subject(url="http://scripted", repeats=repeats)
    subject._made[started] = asking
    return subject
