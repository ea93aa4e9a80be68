"""What the OpenAPI document describes is sent, and what it excludes: every answer is as described.

Schemathesis reads /openapi.json and makes requests of it, good ones and bad ones. No answer is a
5xx, each has a documented status, type and shape; the engine's process and a probe stay the same.
"""

import random
from collections.abc import Iterator
from typing import Any

import hypothesis
import msgspec
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase
from live_server import LiveServer
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

SEED = 20_261_121
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
PROMISED = ("/health", "/ready", "/version", "/metrics", "/stats", "/trace", "/openapi.json")
"""Answers that no request changes; a few are enough."""
GENERATING = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")


def operations(live: LiveServer) -> Iterator[Any]:
    """The operations of the document that `live` serves."""
    document = msgspec.json.decode(live.get("/openapi.json")[1])
    for found in schemathesis.openapi.from_dict(document).get_all_operations():
        yield found.ok()


def send_cases(
    live: LiveServer, session: requests.Session, operation: Any, count: int, seed: int
) -> int:
    """Send `count` requests of one operation, half of them bad ones; returns how many were."""
    sent = 0
    for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):

        @hypothesis.seed(seed)
        @hypothesis.settings(
            max_examples=max(1, count // 2),
            database=None,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
        def send(case: Any) -> None:
            nonlocal sent
            sent += 1
            answer = case.call(base_url=live.url, session=session, timeout=60)
            case.validate_response(answer, checks=CHECKS)

        try:
            send()
        except hypothesis.errors.Unsatisfiable:
            continue  # nothing could be wrong with a request that brings nothing
    return sent


def unharmed(live: LiveServer, count: int, seed: int) -> None:
    """Send what the document describes and compare the engine before and after."""
    engine, tokens, total = live.engine_pid(), live.probe(), 0
    with requests.Session() as session:
        for operation in operations(live):
            share = 2 if operation.path in PROMISED else count
            share = 4 * count if operation.path in GENERATING else share
            total += send_cases(live, session, operation, share, seed)
    print(f"{total} cases")
    assert total >= 20 * count
    assert live.engine_pid() == engine
    assert live.metric("engine_restarts_total") == 0
    assert live.probe() == tokens
    assert "Traceback" not in live.stderr, live.stderr[-3000:]


def test_a_sample_of_what_is_described_is_answered_as_described(server: LiveServer) -> None:
    unharmed(server, 4, SEED)


@pytest.mark.hardening
@pytest.mark.timeout(3600)
def test_all_that_is_described_is_answered_as_described(server: LiveServer) -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    unharmed(server, 260, seed)
