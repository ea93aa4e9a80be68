"""Who answers a request that would be refused for load, or be late: another server or engine.

Given an `Incoming` it asks the upstream, or the second engine here; where that answers, its answer
goes to the client as it comes.
"""

import logging
from collections.abc import Callable

import msgspec
from starlette.types import ASGIApp, Message

from headway.core.errors import RequestError
from headway.server.generation import GenerationRow, Incoming
from headway.server.models import State

log = logging.getLogger(__name__)

FALLBACK_HEADER = b"x-headway-fallback"


class Fallback:
    """The fallback of one `endpoint`."""

    def __init__(self, state: State, row: GenerationRow, endpoint: ASGIApp) -> None:
        self._state = state
        self._row = row
        self._endpoint = endpoint

    async def answer(
        self, incoming: Incoming, reason: str, on_start: Callable[[], None] = lambda: None
    ) -> bool:
        """Let it answer; False, and nothing was sent, where there is none or it fails.

        `on_start` is called when its answer begins.
        """
        state = self._state
        if "fallback" in incoming.scope or not state.falls_back(incoming.body.model):
            return False
        if state.upstream is None:
            done = await self._second(incoming, reason, on_start)
        elif self._row.elsewhere and incoming.raw.get("context") is None:
            done = await state.upstream.answer(
                incoming.raw,
                reason,
                incoming.scope["path"],
                incoming.receive,
                incoming.send,
                on_start,
            )
        else:
            done = False
        if done:
            state.rows[0].telemetry.registry.add("fallback_requests", 1, reason)
        return done

    async def _second(self, incoming: Incoming, reason: str, on_start: Callable[[], None]) -> bool:
        """The same request to the second engine; False when that refuses it."""
        name = self._state.fallback_model
        value = f"{name}; reason={reason}".encode()
        whole = [msgspec.json.encode({**incoming.raw, "model": name})]

        async def receive_again() -> Message:
            if whole:
                return {"type": "http.request", "body": whole.pop(), "more_body": False}
            return await incoming.receive()

        async def send_begun(message: Message) -> None:
            if message["type"] == "http.response.start":
                on_start()
            await incoming.send(message)

        scope = {**incoming.scope, "fallback": value, "meters": []}
        try:
            await self._endpoint(scope, receive_again, send_begun)
        except RequestError as error:
            log.warning("the fallback %s refused a request: %s", name, error)
            return False
        return True
