"""Examples in prompts: what `core.examples` finds, the same before many questions.

A conversation sends its own pairs again, too, but each of its turns has more of them: what stands
unchanged before different last questions is an example. Whether it helps no count can say;
`headway eval --suite examples` asks with fewer of them and compares. Numbers, never text.
"""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from headway.core.examples import examples_of

FEW_QUESTIONS = 5
"""Different questions behind the same pairs until these are called examples."""
MOST_KEPT = 512


class ExampleUse(msgspec.Struct, kw_only=True):
    """Of `chats` prompts those with examples: how many, and in the mean their number a prompt
    (`pairs`), and tokens of these. `share` of all chats' tokens, `seconds` of the prefill."""

    chats: int
    requests: int
    pairs: float
    tokens: float
    share: float
    seconds: float = 0.0


@dataclass(slots=True)
class Kept:
    """One sequence of examples: requests that had it, and its tokens."""

    pairs: int
    tokens: int
    requests: int = 0
    questions: set[int] = field(default_factory=set)

    @property
    def are_examples(self) -> bool:
        """Whether different questions came behind it."""
        return len(self.questions) >= FEW_QUESTIONS


class ExampleTally:
    """The examples of the last chats, the oldest forgotten first. Any thread may call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[int, Kept] = OrderedDict()
        self._chats = self._tokens = 0

    def asked(self, messages: Sequence[dict[str, Any]], num_tokens: int) -> None:
        """A chat whose prompt has so many tokens."""
        found = examples_of(messages)
        texts = found.texts if found is not None else []
        whole = sum(len(m["content"]) for m in messages if isinstance(m.get("content"), str))
        key = hash(tuple(texts))
        tokens = round(num_tokens * sum(map(len, texts)) / max(whole, 1))
        with self._lock:
            self._chats += 1
            self._tokens += num_tokens
            if found is None:
                return
            kept = self._kept.setdefault(key, Kept(len(texts), tokens))
            kept.requests += 1
            if not kept.are_examples:
                kept.questions.add(hash(found.question))
            self._kept.move_to_end(key)
            while len(self._kept) > MOST_KEPT:
                self._kept.popitem(last=False)

    def use(self, token_s: float) -> ExampleUse | None:
        """What they had; computing a prompt token takes `token_s`. None without examples."""
        with self._lock:
            found = [replace(kept) for kept in self._kept.values() if kept.are_examples]
        if not found:
            return None
        requests = sum(kept.requests for kept in found)
        tokens = sum(kept.requests * kept.tokens for kept in found)
        return ExampleUse(
            chats=self._chats,
            requests=requests,
            pairs=sum(kept.requests * kept.pairs for kept in found) / requests,
            tokens=tokens / requests,
            share=min(tokens / max(self._tokens, 1), 1.0),
            seconds=tokens / requests * token_s,
        )
