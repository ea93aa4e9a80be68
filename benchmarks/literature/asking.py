"""Requests to a server over HTTP, and what each took: the claims' side of `measure.client`.

Prompts are made of words that are drawn anew for each, so that nothing is found by accident; how
many tokens a word takes is asked first.
"""

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec

from headway.bench.latency import latency
from headway.core.errors import UsageError
from headway.measure.client import Client, ReceivedAnswer, model_name, open_session
from headway.measure.record import Exchange

TIMEOUT_S = 600.0
CONTEXT = 4096
"""Tokens, where a server does not tell its context."""
WORDS = tuple(
    "stone river lamp garden window paper table bridge apple winter horse silver market letter "
    "door candle forest music bottle ladder carpet island pencil summer basket engine mirror "
    "number orange planet copper ticket".split()
)
PROBE_WORDS = 200
SPARE, WORDS_VARY = 48, 0.03
"""Tokens of the context that are left free, and the share by which other words take more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedAnswer:
    """One answer: seconds to its first token, per token after it, and to its end; tokens."""

    ttft_s: float
    tpot_s: float | None
    e2e_s: float
    sent_s: float
    prompt: int
    cached: int | None
    output: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Body:
    """A completion of so many tokens; `at_s` is when it is sent, where requests have times."""

    prompt: str
    tokens: int
    at_s: float = 0.0


@dataclass(slots=True, kw_only=True)
class Asking:
    """A server, its model, its context, and how many tokens one of `WORDS` takes there."""

    url: str
    api_key: str
    model: str
    context: int
    tokens_per_word: float

    @classmethod
    def of(cls, url: str, api_key: str = "") -> "Asking":
        """The server at `url`; UsageError where it cannot be asked."""
        model, context = asyncio.run(who(url, api_key))
        made = cls(url=url, api_key=api_key, model=model, context=context, tokens_per_word=1.0)
        asked = made.all([Body(prompt=" ".join(words(PROBE_WORDS, 0)), tokens=1)])
        made.tokens_per_word = max(asked[0].prompt / PROBE_WORDS, 0.5)
        return made

    def text(self, tokens: int, seed: int) -> str:
        """Words that make about so many tokens, others for each seed."""
        return " ".join(words(max(1, round(tokens / self.tokens_per_word)), seed))

    def room(self, answer: int) -> int:
        """The longest prompt beside an answer of so many tokens."""
        return round(self.context * (1 - WORDS_VARY)) - answer - SPARE

    def all(self, bodies: Sequence[Body], at_once: int = 1) -> list[TimedAnswer]:
        """Every body, so many at a time; raises UsageError where one fails."""
        return [whole(x, text) for x, text in asyncio.run(self._closed(bodies, at_once))]

    def at_times(self, bodies: Sequence[Body]) -> list[TimedAnswer | None]:
        """Every body at its own time, whatever became of the others; None where it failed."""
        found = asyncio.run(self._opened(bodies))
        return [whole(x, text) if x.ok else None for x, text in found]

    def chat(self, content: dict[str, Any]) -> dict[str, Any]:
        """One chat that is not streamed: the server's whole answer."""
        return asyncio.run(self._chat(content))

    async def _closed(self, bodies: Sequence[Body], at_once: int) -> list[tuple[Exchange, str]]:
        places = asyncio.Semaphore(at_once)

        async def one(client: Client, number: int, body: Body) -> tuple[Exchange, str]:
            async with places:
                return await self._one(client, number, body)

        async with open_session(self.api_key) as session:
            client = self._client(session)
            return list(await asyncio.gather(*(one(client, *each) for each in enumerate(bodies))))

    async def _opened(self, bodies: Sequence[Body]) -> list[tuple[Exchange, str]]:
        async def one(client: Client, number: int, body: Body) -> tuple[Exchange, str]:
            await asyncio.sleep(max(0.0, body.at_s - client.now_s()))
            return await self._one(client, number, body)

        async with open_session(self.api_key) as session:
            client = self._client(session)
            return list(await asyncio.gather(*(one(client, *each) for each in enumerate(bodies))))

    def _client(self, session: aiohttp.ClientSession) -> Client:
        began_s = time.monotonic()
        url = f"{self.url}/v1/completions"
        return Client(session, url, lambda: time.monotonic() - began_s, TIMEOUT_S)

    async def _one(self, client: Client, number: int, body: Body) -> tuple[Exchange, str]:
        content = {
            "model": self.model,
            "prompt": body.prompt,
            "max_tokens": body.tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        x = Exchange(
            id=number,
            scheduled_s=body.at_s or client.now_s(),
            asked_prompt_tokens=0,
            asked_output_tokens=body.tokens,
        )
        answer = ReceivedAnswer()
        await client.exchange(x, msgspec.json.encode(content), answer)
        return x, answer.text

    async def _chat(self, content: dict[str, Any]) -> dict[str, Any]:
        async with (
            open_session(self.api_key, "application/json") as session,
            session.post(
                f"{self.url}/v1/chat/completions",
                data=msgspec.json.encode({"model": self.model, **content}),
                timeout=aiohttp.ClientTimeout(total=TIMEOUT_S),
            ) as response,
        ):
            found: dict[str, Any] = msgspec.json.decode(await response.read())
            if response.status != 200:
                raise UsageError(f"{self.url} answers a chat with {response.status}: {found}.")
            return found


def words(count: int, seed: int) -> list[str]:
    """So many words; two seeds differ from the first few words on."""
    draw = random.Random(seed)
    return [draw.choice(WORDS) for _ in range(count)]


async def who(url: str, api_key: str) -> tuple[str, int]:
    """(the model's name, its context)."""
    async with open_session(api_key, "application/json") as session:
        model = await model_name(session, url)
        async with session.get(f"{url}/v1/models") as response:
            listed = msgspec.json.decode(await response.read())["data"]
    return model, int(listed[0].get("max_model_len") or CONTEXT)


def whole(x: Exchange, text: str) -> TimedAnswer:
    """What an exchange came to; UsageError where it failed."""
    timed = latency(x)
    if timed is None:
        raise UsageError(f"A request of a claim failed: {x.error} {x.message}".strip() + ".")
    return TimedAnswer(
        ttft_s=timed.ttft_s,
        tpot_s=timed.tpot_s,
        e2e_s=timed.e2e_s,
        sent_s=x.sent_s or 0.0,
        prompt=x.num_prompt,
        cached=x.cached_tokens,
        output=x.num_output,
        text=text,
    )
