"""A model behind an OpenAI-compatible URL: chat for answers, completions for log-probabilities.

A request is repeated while the server is busy; if the server refuses it, a HeadwayError carries the
server's own message.
"""

import asyncio
import re
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import aiohttp
import msgspec

from headway.core.errors import HeadwayError, UsageError
from headway.core.scoring import STOP, Score, transcript
from headway.measure.client import MESSAGE_LENGTH, model_name, open_session

BUSY = frozenset({429, 502, 503, 504})
PAUSES_S = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
TOO_LONG = re.compile(r"context.?(length|size|window)|too long|maximum.{0,20}length", re.IGNORECASE)
NO_TEMPLATE = re.compile(r"chat.?template", re.IGNORECASE)
FIXES = {401: "Check --api-key.", 403: "Check --api-key.", 404: "Check the URL and --model."}
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"

Result = TypeVar("Result")
Body = dict[str, Any]


class RefusedError(HeadwayError):
    """Raised when the server answers with an error that a retry does not fix."""

    def __init__(self, url: str, status: int, message: str) -> None:
        super().__init__(
            f"{url} answered {status}: {message}", FIXES.get(status, "Look at the server's log.")
        )
        self.status = status
        self.message = message


class UrlModel:
    """A `core.scoring.Model` behind a URL, with at most `concurrency` requests at a time."""

    def __init__(
        self,
        runner: asyncio.Runner,
        session: aiohttp.ClientSession,
        url: str,
        *,
        name: str,
        concurrency: int,
        timeout_s: float,
    ) -> None:
        self.name = name
        self.url = url
        self.chats = True
        self._runner = runner
        self._session = session
        self._slots = asyncio.Semaphore(concurrency)
        self._timeout_s = timeout_s
        self._scoring_method = ""

    def generate(
        self, chats: Sequence[list[dict[str, str]]], *, max_tokens: int
    ) -> Sequence[str | None]:
        """Return greedy answers; None where the server says that a chat exceeds its context."""
        return self._runner.run(self._gather([self._answer(chat, max_tokens) for chat in chats]))

    def score(self, texts: Sequence[str], *, top: int = 0) -> list[Score]:
        """Return log-probabilities of the texts' tokens, and up to 20 alternatives per position."""
        if not self._scoring_method:
            self._scoring_method = self._runner.run(self._find_scoring_method())
        score = SCORING_METHODS[self._scoring_method]
        return self._runner.run(self._gather([score(self, text, top) for text in texts]))

    def whole_answers(self, bodies: Sequence[Body]) -> list[Body]:
        """Return the full JSON of greedy answers to these chat bodies."""
        return self._runner.run(self._gather([self._post(CHAT, body) for body in bodies]))

    def stats(self) -> Body | None:
        """Return `/stats` of a Headway server; None for any other server."""
        return self._runner.run(self._stats())

    async def _stats(self) -> Body | None:
        try:
            async with asyncio.timeout(self._timeout_s):
                async with self._session.get(f"{self.url}/stats") as response:
                    content = msgspec.json.decode(await response.read())
                    known = response.status == 200 and isinstance(content, dict)
                    return content if known else None
        except (TimeoutError, aiohttp.ClientError, msgspec.DecodeError):
            return None

    def check_connection(self) -> None:
        """Send one request, so that a wrong URL, key or name fails before the suite begins."""
        try:
            self._runner.run(self._chat([{"role": "user", "content": "Hi"}], 1))
        except RefusedError as error:
            if not NO_TEMPLATE.search(error.message):
                raise
            self.chats = False

    async def _gather(self, jobs: Sequence[Coroutine[Any, Any, Result]]) -> list[Result]:
        """Run all jobs concurrently; the first error cancels the others."""
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(job) for job in jobs]
        except* HeadwayError as errors:
            first = next(iter(errors.exceptions))
            raise first from None
        return [task.result() for task in tasks]

    async def _answer(self, chat: list[dict[str, str]], max_tokens: int) -> str | None:
        try:
            return await (self._chat if self.chats else self._continue)(chat, max_tokens)
        except RefusedError as error:
            if error.status in (400, 413, 422) and TOO_LONG.search(error.message):
                return None
            raise

    async def _chat(self, chat: list[dict[str, str]], max_tokens: int) -> str:
        body = {"messages": chat, "max_tokens": max_tokens}
        answer = await self._post(CHAT, body)
        return str(first_choice(answer, self.url)["message"].get("content") or "")

    async def _continue(self, chat: list[dict[str, str]], max_tokens: int) -> str:
        body = {"prompt": transcript(chat), "max_tokens": max_tokens, "stop": [STOP]}
        answer = await self._post(COMPLETIONS, body)
        return str(first_choice(answer, self.url)["text"]).partition(STOP)[0]

    async def _find_scoring_method(self) -> str:
        """Return the first scoring method that gives log-probabilities of a prompt on this
        server."""
        message = ""
        for name, score in SCORING_METHODS.items():
            try:
                probe = await score(self, "One two three.", 0)
            except RefusedError as error:
                message = error.message
                if error.status not in (400, 404, 422):
                    raise
            else:
                if len(probe.logprobs) > 1 and None not in probe.logprobs[1:]:
                    return name
        raise UsageError(
            f"{self.url} does not tell the log-probabilities of a prompt"
            f"{f': {message}' if message else '.'}",
            "The suite text needs prompt_logprobs or echo with logprobs; take --suite skills.",
        )

    async def _score_prompt(self, text: str, top: int) -> Score:
        """Score with vLLM's `prompt_logprobs`; alternatives by token id."""
        body = {"prompt": text, "max_tokens": 1, "prompt_logprobs": top, "return_token_ids": True}
        choice = first_choice(await self._post(COMPLETIONS, body), self.url)
        ids, entries = choice.get("prompt_token_ids") or [], choice.get("prompt_logprobs") or []
        if len(ids) != len(entries):
            return Score(token_ids=[], logprobs=[], top=[])
        return Score(
            token_ids=ids,
            logprobs=[e and e[str(i)]["logprob"] for i, e in zip(ids, entries, strict=True)],
            top=[
                {int(i): entry["logprob"] for i, entry in (e or {}).items() if entry["rank"] <= top}
                for e in entries
            ],
        )

    async def _score_echo(self, text: str, top: int) -> Score:
        """Score with OpenAI's `echo` and `logprobs`; alternatives by text."""
        body = {"prompt": text, "max_tokens": 0, "echo": True, "logprobs": max(top, 1)}
        answer = await self._post(COMPLETIONS, body)
        fields = first_choice(answer, self.url).get("logprobs") or {}
        count = (answer.get("usage") or {}).get("prompt_tokens")
        logprobs = fields.get("token_logprobs") or []
        tops = fields.get("top_logprobs") or [None] * len(logprobs)
        return Score(
            token_ids=[],
            logprobs=logprobs[:count],
            top=[dict((entry or {}) if top else {}) for entry in tops[:count]],
        )

    async def _post(self, path: str, body: Body) -> Body:
        """Send one greedy request; retry with PAUSES_S between attempts while the server is
        busy."""
        data = msgspec.json.encode({"model": self.name, "temperature": 0, **body})
        async with self._slots:
            for pause_s in (*PAUSES_S, None):
                status, content = await self._send(path, data)
                if status == 200 and isinstance(content, dict):
                    return content
                if status not in BUSY or pause_s is None:
                    raise RefusedError(f"{self.url}{path}", status, message_of(content))
                await asyncio.sleep(pause_s)
        raise AssertionError("the last pause is None")

    async def _send(self, path: str, data: bytes) -> tuple[int, Any]:
        try:
            async with asyncio.timeout(self._timeout_s):
                async with self._session.post(self.url + path, data=data) as response:
                    content = await response.read()
        except TimeoutError:
            raise HeadwayError(
                f"{self.url} did not answer within {self._timeout_s:g} s.",
                "Raise --timeout or lower --concurrency.",
            ) from None
        except aiohttp.ClientError as error:
            raise HeadwayError(f"{self.url} cannot be asked: {error}.", "Is it up?") from error
        try:
            return response.status, msgspec.json.decode(content)
        except msgspec.DecodeError:
            return response.status, content.decode("utf-8", "replace")


SCORING_METHODS = {"prompt_logprobs": UrlModel._score_prompt, "echo": UrlModel._score_echo}
"""Ways to get the log-probabilities of a prompt, best first: prompt_logprobs returns token ids."""


def first_choice(answer: Body, url: str) -> Body:
    """Return the first choice of an answer; raises HeadwayError if there is none."""
    try:
        choice: Body = answer["choices"][0]
    except (KeyError, IndexError, TypeError):
        raise HeadwayError(f"{url} gave an answer without choices.", "Is it the API?") from None
    return choice


def message_of(content: Any) -> str:
    """Return message and code of an error body: {"error": {"message", "code"}}, or any text."""
    error = content.get("error", content) if isinstance(content, dict) else content
    if isinstance(error, dict):
        parts = (error.get("message") or error.get("detail") or error, error.get("code"))
        error = " ".join(f"({part})" if i else str(part) for i, part in enumerate(parts) if part)
    return str(error)[:MESSAGE_LENGTH]


def is_url(text: str) -> bool:
    """Whether the text begins with http:// or https://."""
    return text.startswith(("http://", "https://"))


@contextmanager
def open_url(
    url: str, *, model: str = "", api_key: str = "", concurrency: int = 8, timeout_s: float = 600.0
) -> Iterator[UrlModel]:
    """Open the model at `url` (with or without /v1) and check it; default name: the first model
    served."""
    base = url.rstrip("/").removesuffix("/v1")
    with asyncio.Runner() as runner:
        session = runner.run(create_session(api_key))
        try:
            name = model or runner.run(model_name(session, base))
            opened = UrlModel(
                runner, session, base, name=name, concurrency=concurrency, timeout_s=timeout_s
            )
            opened.check_connection()
            yield opened
        finally:
            runner.run(session.close())


async def create_session(api_key: str) -> aiohttp.ClientSession:
    """Open a session inside the event loop that it belongs to."""
    return open_session(api_key, accept="application/json")
