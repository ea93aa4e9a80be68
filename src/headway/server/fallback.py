"""The fallback of a request that would be refused for load, or be late: another server or engine.

Given an `IncomingRequest` it asks the upstream, or the second engine of this server, and passes the
answer on as it arrives.
"""

import logging
from collections.abc import Callable

import msgspec
from starlette.types import ASGIApp, Message

from headway.core.errors import RequestError
from headway.server.generation import GenerationRow, IncomingRequest
from headway.server.models import ServerState

log = logging.getLogger(__name__)

FALLBACK_HEADER = b"x-headway-fallback"


class Fallback:
    """The fallback of one endpoint."""

    def __init__(self, state: ServerState, row: GenerationRow, endpoint: ASGIApp) -> None:
        self._state = state
        self._row = row
        self._endpoint = endpoint

    async def answer(
        self, incoming: IncomingRequest, reason: str, on_start: Callable[[], None] = lambda: None
    ) -> bool:
        """Answer by the fallback; False, with nothing sent, where there is none or it fails.

        `on_start` is called when the answer begins.
        """
        state = self._state
        if "fallback" in incoming.scope or not state.falls_back(incoming.body.model):
            return False
        if state.upstream is None:
            is_answered = await self._second(incoming, reason, on_start)
        elif self._row.can_fall_back and incoming.raw.get("context") is None:
            is_answered = await state.upstream.answer(
                incoming.raw,
                reason,
                incoming.scope["path"],
                incoming.receive,
                incoming.send,
                on_start,
            )
        else:
            is_answered = False
        if is_answered:
            state.rows[0].telemetry.registry.add("fallback_requests", 1, reason)
        return is_answered

    async def _second(
        self, incoming: IncomingRequest, reason: str, on_start: Callable[[], None]
    ) -> bool:
        """Send the request to the second engine; False where that refuses it."""
        name = self._state.fallback_model
        value = f"{name}; reason={reason}".encode()
        whole = [msgspec.json.encode({**incoming.raw, "model": name})]

        async def receive_again() -> Message:
            if whole:
                return {"type": "http.request", "body": whole.pop(), "more_body": False}
            return await incoming.receive()

        async def send_and_note_start(message: Message) -> None:
            if message["type"] == "http.response.start":
                on_start()
            await incoming.send(message)

        scope = {**incoming.scope, "fallback": value, "meters": []}
        try:
            await self._endpoint(scope, receive_again, send_and_note_start)
        except RequestError as error:
            log.warning("the fallback %s refused a request: %s", name, error)
            return False
        return True
