"""Keys, CORS and strictness: what the server does when it is told to be careful."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from door_cases import ROUTES, ask, error_of
from live_gateway import LiveGateway
from live_server import LiveAddress, LiveServer, headway

from headway.server import page

KEY, OTHER_KEY, ORIGIN = "key-one", "key-two", "http://localhost:3000"
PUBLIC = ("/health", "/ready", *page.PATHS)
TRICKS = [
    "//v1/models",
    "/v1//models",
    "/v1/models/",
    "/v1/models//careful",
    "/health/../v1/models",
    "/health/..;/v1/models",
    "/health/%2e%2e/v1/models",
    "/v1/%2e/models",
    "/%2e/v1/models",
    "/v1%2fmodels",
    "/page/../stats",
    "/page/%2e%2e/stats",
    "/page/__init__.py",
    "/page/index.html",
    "/page",
    "/page/",
    "//page/main.js",
    "/V1/models",
    "/v1/models;/health",
    "/v1/models?path=/health",
    "/v1/models%00/health",
    "/health%00",
    "/health;",
    "/health/",
    "//health",
    "/health/x",
    "/metrics/",
    "/./metrics",
    "*",
    "http://127.0.0.1/v1/models",
]


@pytest.fixture(scope="module")
def careful(tiny_model: Path) -> Iterator[LiveServer]:
    """A server with two keys, one allowed origin, a small body limit, and strict fields."""
    live = LiveServer(
        tiny_model,
        f"--api-key={KEY},{OTHER_KEY}",
        f"--allowed-origins={ORIGIN}",
        "--strict-api=true",
        "--max-body=2000",
        "--served-model-name=careful",
        "--kv-memory=64MiB",
    )
    try:
        yield live.wait_ready()
    finally:
        live.close()


WRONG = {
    "none": {},
    "wrong bearer": {"Authorization": "Bearer key-three"},
    "wrong x-api-key": {"x-api-key": "key-three"},
    "another scheme": {"Authorization": f"Basic {KEY}"},
    "empty": {"Authorization": "Bearer "},
    "the list": {"Authorization": f"Bearer {KEY},{OTHER_KEY}"},
    "a prefix": {"x-api-key": KEY[:-1]},
    "not ASCII": {"x-api-key": "clé"},
    "override": {"X-HTTP-Method-Override": "GET", "X-Original-URL": "/health", "Host": "health"},
    "a host that goes on as a path": {"Host": "127.0.0.1/health?"},
}
RIGHT = {
    "bearer": {"Authorization": f"Bearer {KEY}"},
    "lower case": {"authorization": f"bearer {KEY}"},
    "x-api-key": {"x-api-key": OTHER_KEY},
}


@pytest.mark.parametrize("headers", WRONG.values(), ids=WRONG)
def test_without_a_right_key_every_route_but_the_public_ones_is_shut(
    careful: LiveServer, headers: dict[str, str]
) -> None:
    for method, path in ROUTES:
        status, got, content = ask(careful, method, path, headers, b"{}")
        if path in PUBLIC:
            assert status == 200, path
        else:
            assert (status, error_of(content)["code"]) == (401, "invalid_api_key"), path
        assert got["x-request-id"]


@pytest.mark.parametrize("headers", RIGHT.values(), ids=RIGHT)
def test_with_a_key_every_route_answers(careful: LiveServer, headers: dict[str, str]) -> None:
    for method, path in ROUTES:
        status, _, content = ask(careful, method, path, headers, b"{}")
        assert status not in (401, 403) and status < 500, path
        message = msgspec.json.decode(content)["error"]["message"] if status == 404 else ""
        nothing = "is not served here" in message  # Anthropic's shape has no code
        assert nothing == (path == "/nowhere"), (path, content)


@pytest.fixture(scope="module")
def gateway() -> Iterator[LiveGateway]:
    """A gateway with the same keys and origin, before nobody."""
    flags = (f"--api-key={KEY},{OTHER_KEY}", f"--allowed-origins={ORIGIN}")
    live = LiveGateway("http://127.0.0.1:9", flags=flags)
    try:
        yield live
    finally:
        live.close()


@pytest.mark.parametrize("path", TRICKS)
@pytest.mark.parametrize("which", ["careful", "gateway"])
def test_a_trick_with_the_path_opens_nothing(
    request: pytest.FixtureRequest, which: str, path: str
) -> None:
    careful: LiveAddress = request.getfixturevalue(which)
    for method in ("GET", "POST", "HEAD", "OPTIONS"):
        status, _, _ = ask(careful, method, path, {}, b"{}")
        assert status in (401, 403, 404), (method, path, status)
    status, _, content = ask(careful, "GET", path, RIGHT["bearer"])
    assert status in (200, 404), (path, content)


def test_a_key_is_in_no_log_and_no_metric(careful: LiveServer) -> None:
    _, _, metrics = ask(careful, "GET", "/metrics", RIGHT["bearer"])
    for text in (careful.stdout, careful.stderr, metrics.decode()):
        assert KEY not in text and OTHER_KEY not in text
    assert "$HEADWAY_API_KEY" in careful.stdout


def test_only_the_allowed_origin_is_told_it_is(careful: LiveServer) -> None:
    allowed = {**RIGHT["bearer"], "Origin": ORIGIN}
    status, headers, _ = ask(careful, "GET", "/v1/models", allowed)
    assert (status, headers["access-control-allow-origin"]) == (200, ORIGIN)
    assert "x-request-id" in headers["access-control-expose-headers"].lower()
    _, headers, _ = ask(careful, "GET", "/v1/models", {**allowed, "Origin": "http://elsewhere"})
    assert "access-control-allow-origin" not in headers
    asking = {
        "Origin": ORIGIN,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization",
    }
    status, headers, _ = ask(careful, "OPTIONS", "/v1/chat/completions", asking)
    assert (status, headers["access-control-allow-origin"]) == (200, ORIGIN)
    status, headers, _ = ask(
        careful, "OPTIONS", "/v1/models", {**asking, "Origin": "http://elsewhere"}
    )
    assert "access-control-allow-origin" not in headers and status >= 400


def test_an_error_is_readable_to_the_allowed_origin(careful: LiveServer) -> None:
    status, headers, _ = ask(careful, "GET", "/v1/models", {"Origin": ORIGIN})
    assert (status, headers["access-control-allow-origin"]) == (401, ORIGIN)


def test_without_origins_no_page_is_told_anything(server: LiveServer) -> None:
    _, headers, _ = ask(server, "GET", "/v1/models", {"Origin": ORIGIN})
    assert "access-control-allow-origin" not in headers


def test_strict_refuses_unknown_fields_by_name(careful: LiveServer) -> None:
    good = {"model": "careful", "prompt": [5], "max_tokens": 1}
    for name in ("colour", "", "\0", "max_token"):
        body = msgspec.json.encode({**good, name: 1})
        status, _, content = ask(careful, "POST", "/v1/completions", RIGHT["bearer"], body)
        error = error_of(content)
        assert (status, error["code"], error["param"]) == (400, "unknown_parameter", name)
    for fields in ({}, {"user": "me"}):
        body = msgspec.json.encode({**good, **fields})
        status, headers, _ = ask(careful, "POST", "/v1/completions", RIGHT["bearer"], body)
        assert status == 200 and "x-headway-ignored-fields" not in headers


def test_a_stored_response_is_there_for_its_own_key_alone(careful: LiveServer) -> None:
    mine, others = RIGHT["bearer"], RIGHT["x-api-key"]
    asked = {"model": "careful", "input": "hi", "max_output_tokens": 1}
    path = "/v1/responses"
    made = msgspec.json.decode(ask(careful, "POST", path, mine, msgspec.json.encode(asked))[2])
    on = msgspec.json.encode({**asked, "previous_response_id": made["id"]})
    for headers, found, gone_on in ((others, 404, 400), (mine, 200, 200)):
        for method, end in (("GET", ""), ("GET", "/input_items")):
            got = ask(careful, method, f"{path}/{made['id']}{end}", headers)[0]
            assert got == found
        assert ask(careful, "POST", path, headers, on)[0] == gone_on
    for headers, status in ((others, 404), (mine, 200), (mine, 404)):
        assert ask(careful, "DELETE", f"{path}/{made['id']}", headers)[0] == status


def test_the_body_limit_is_the_one_given(careful: LiveServer) -> None:
    for size, status in ((2000, 400), (2001, 413)):
        answer = ask(careful, "POST", "/v1/completions", RIGHT["bearer"], b" " * size)
        assert answer[0] == status


def test_it_listens_beyond_this_machine_only_with_a_key(tiny_model: Path) -> None:
    for host in ("0.0.0.0", "::"):
        refused = headway("serve", tiny_model, "--host", host, "--port=0")
        assert refused.returncode == 2 and refused.stdout == ""
        assert "--api-key" in refused.stderr and len(refused.stderr.splitlines()) == 2
