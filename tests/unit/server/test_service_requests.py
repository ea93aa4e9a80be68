"""What a request says of its class, over HTTP: it reaches the engine as its terms."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import requests

from headway.core.request import Request
from headway.core.service import service_classes
from headway.core.terms import Terms
from in_process import InProcess

KEYS = ("first", "second")
MESSAGES = [{"role": "user", "content": "hello"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 2},
    "/v1/completions": {"prompt": "hello", "max_tokens": 2},
    "/v1/responses": {"input": "hello", "max_output_tokens": 2},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 2},
}


class Told:
    """A server, and the requests that reached its engine."""

    def __init__(self, data: Path) -> None:
        self.server = InProcess(data, api_key=list(KEYS))
        self.requests: list[Request] = []
        engine = self.server.state.rows[0].client.engine
        add = engine.add

        def told(request: Request, *rest: Any) -> None:
            self.requests.append(request)
            add(request, *rest)

        engine.add = told

    def terms(self, path: str, key: str = "first", **fields: Any) -> Terms:
        """The terms of a request with these fields."""
        body = {"model": "tiny", **BODIES[path], **fields}
        answer = requests.post(
            self.server.url + path, json=body, headers={"x-api-key": key}, timeout=60
        )
        assert answer.status_code == 200, answer.text
        return self.requests[-1].terms


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Told]:
    opened = Told(tmp_path_factory.mktemp("service"))
    try:
        yield opened
    finally:
        opened.server.close()


@pytest.mark.parametrize("path", BODIES)
def test_class_objectives_and_priority_reach_the_engine(told: Told, path: str) -> None:
    classes = service_classes()
    assert told.terms(path) == classes["default"].terms()
    assert told.terms(path, service_class="interactive") == classes["interactive"].terms()
    assert told.terms(path, service_tier="flex") == classes["batch"].terms()
    assert told.terms(path, priority=-3).priority == -3
    bound = told.terms(path, service_class="interactive", slo={"ttft_ms": 300, "e2e": "9s"})
    assert (bound.ttft_s, bound.tpot_s, bound.e2e_s, bound.ttft_per_token_s) == (0.3, None, 9, 0)
    assert bound.service_class == "interactive"


def test_the_official_client_can_say_it(told: Told) -> None:
    client = openai.OpenAI(base_url=told.server.url + "/v1", api_key="second", max_retries=0)
    with client:
        client.chat.completions.create(
            model="tiny",
            messages=MESSAGES,
            max_tokens=2,
            service_tier="priority",
            extra_body={"priority": 7},
        )
    terms = told.requests[-1].terms
    assert (terms.service_class, terms.priority) == ("interactive", 7)
    assert told.requests[-1].principal.name == "api-key-2"


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"service_class": "golden"}, "invalid_value"),
        ({"priority": 2**40}, "integer_above_max_value"),
        ({"priority": "high"}, "invalid_type"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(
    told: Told, fields: dict[str, Any], code: str
) -> None:
    body = {"model": "tiny", **BODIES["/v1/chat/completions"], **fields}
    answer = requests.post(
        told.server.url + "/v1/chat/completions",
        json=body,
        headers={"x-api-key": "first"},
        timeout=60,
    )
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, next(iter(fields)), code)


def test_the_weight_and_class_of_a_key_hold_for_its_requests(told: Told) -> None:
    (caller, _) = told.server.state.keyring.callers
    heavier = [type(caller)(
        principal=caller.principal, meter=caller.meter, service_class="interactive", weight=3,
        digest=caller.digest,
    )]  # fmt: skip
    kept, told.server.state.keyring.callers = told.server.state.keyring.callers, heavier
    try:
        terms = told.terms("/v1/chat/completions")
        other = told.terms("/v1/chat/completions", service_tier="default")
    finally:
        told.server.state.keyring.callers = kept
    assert (terms.service_class, terms.weight) == ("interactive", 3)
    assert (other.service_class, other.weight) == ("default", 3)


def test_lines_of_batches_are_idle_work(told: Told) -> None:
    client = openai.OpenAI(base_url=told.server.url + "/v1", api_key="first", max_retries=0)
    line = (
        b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", '
        b'"body": {"model": "tiny", "prompt": "hello", "max_tokens": 2}}\n'
    )
    with client:
        file = client.files.create(file=("lines.jsonl", line), purpose="batch")
        batch = client.batches.create(
            input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
        )
        while batch.status not in ("completed", "failed"):
            batch = client.batches.retrieve(batch.id)
    assert batch.status == "completed"
    assert told.requests[-1].terms == service_classes()["batch"].terms()
    price = {"service_class": "batch", "share": 0.5, "cached": 0.1}
    assert batch.model_extra["price"] == price
