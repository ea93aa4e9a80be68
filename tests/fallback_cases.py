"""A server that is full, and the events of who answers for it."""

from typing import Any

import requests

from headway.admit.admission import Ticket
from headway.core.service import service_classes
from in_process import InProcess

BODY = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "hello"}],
    "max_tokens": 2,
    "service_class": "interactive",
    "slo": {"ttft_ms": 60_000},
    "top_k": 3,
}
CHAT = "/v1/chat/completions"
EVENTS = (b'data: {"choices":[]}\n\n', b"data: [DONE]\n\n")


class Full:
    """A server whose queue of one is taken until `close`, and the metric of it."""

    def __init__(self, server: InProcess) -> None:
        self.server = server
        self.model = server.state.rows[0]
        self.tickets: list[Ticket] = []

    def fill(self) -> None:
        caller = self.server.state.keyring.anonymous
        self.tickets.append(
            self.model.admission.arrive(caller, service_classes()["interactive"], 16)
        )

    def post(self, path: str = CHAT, **fields: Any) -> requests.Response:
        return requests.post(self.server.url + path, json={**BODY, **fields}, timeout=60)

    def count(self, name: str, reason: str) -> float:
        return self.model.telemetry.registry.values[name].get((reason,), 0.0)
