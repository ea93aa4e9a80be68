"""A stream is opened before its first token: what comes then, and what is still possible.

The engine is a script that holds its answer back until it is told to go on; the server and the
clients are real. Nothing here goes by the clock but the server's own patience, cut short.
"""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import anthropic
import openai
import pytest
import requests
from client_fields import TEMPLATE, USER
from scripted import ScriptedServer, scripted

from headway.admit.admission import Rules
from headway.config.scheduler_config import SchedulerConfig
from headway.core.errors import RequestError, ShedError
from headway.edge import event_stream
from headway.measure.client import ChunkReader
from headway.server import session

CHAT, TEXT, RESPONSES, MESSAGES = PATHS = (
    *("/v1/chat/completions", "/v1/completions"),
    *("/v1/responses", "/v1/messages"),
)
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": USER},
    TEXT: {"prompt": "Once", "max_tokens": 50},
    RESPONSES: {"input": "How is Rome?"},
    MESSAGES: {"messages": USER, "max_tokens": 50},
}
OPENINGS = {
    CHAT: b'"delta":{"role":"assistant","content":""}',
    TEXT: b": ping",
    RESPONSES: b"event: response.created",
    MESSAGES: b"event: message_start",
}
PINGS = {**dict.fromkeys(PATHS, b": ping\n\n"), MESSAGES: b'data: {"type":"ping"}\n\n'}
SAID = "It is sunny."


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedServer]:
    with scripted(tmp_path_factory.mktemp("long") / "script", TEMPLATE) as running:
        yield running


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets the server's patience: seconds, or 3600 for what must not happen by itself."""

    def patience(*, begun: float = 3600, waiting: float = 3600, refusable: float = 3600) -> None:
        monkeypatch.setattr(event_stream, "TICK_S", 0.005)
        monkeypatch.setattr(event_stream, "PING_INTERVAL_S", 0.02)
        monkeypatch.setattr(session, "GRACE_S", begun)
        monkeypatch.setattr(session, "ENGINE_WAIT_S", waiting)
        monkeypatch.setattr(session, "PING_INTERVAL_S", refusable)

    return patience


@pytest.fixture
def held(script: ScriptedServer) -> Iterator[threading.Event]:
    """The script has begun with the prompt, and says nothing until this is set."""
    client = script.client
    client.hold, client.begins = threading.Event(), True
    script.says(SAID)
    yield client.hold
    client.hold.set()
    client.hold, client.begins, client.fails = None, False, None


def post(script: ScriptedServer, path: str, **fields: Any) -> requests.Response:
    """A stream, as soon as its headers are there."""
    body = {"model": "script", "stream": True, **BODIES[path], **fields}
    return requests.post(script.url + path, json=body, stream=True, timeout=60)


def read_until(answer: requests.Response, mark: bytes, count: int) -> tuple[bytes, Iterator[bytes]]:
    """What comes until `mark` has come so often, and the rest."""
    data, pieces = b"", answer.iter_content(None)
    while data.count(mark) < count:
        data += next(pieces)
    return data, pieces


@pytest.mark.parametrize("path", PATHS)
def test_a_stream_is_opened_and_kept_alive_while_its_prompt_is_computed(
    script: ScriptedServer, held: threading.Event, patience: Any, path: str
) -> None:
    patience(begun=0.01)
    answer = post(script, path)
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event")
    early, pieces = read_until(answer, PINGS[path], 4)
    assert OPENINGS[path] in early.partition(PINGS[path])[0] or path == TEXT
    (timeline,) = script.telemetry.live
    assert timeline.ttft_s is None, "an opening is no token"
    if path in (CHAT, TEXT):
        chunks = ChunkReader().feed(early)
        assert not any(c.has_content for chunk in chunks for c in chunk.choices), "nor for bench"
    held.set()
    whole = early + b"".join(pieces)
    assert whole.count(OPENINGS[path]) == 1 or path == TEXT
    assert timeline.ttft_s is not None and timeline.ended is not None
    assert timeline.ended.outcome == "ok"


@pytest.mark.parametrize("path", PATHS)
def test_one_that_waits_for_the_engine_is_opened_too(
    script: ScriptedServer, held: threading.Event, patience: Any, path: str
) -> None:
    patience(waiting=0.01)
    script.client.begins = False
    early, pieces = read_until(post(script, path), PINGS[path], 3)
    assert OPENINGS[path] in early
    held.set()
    assert b"".join(pieces)


def test_the_official_clients_read_on(
    script: ScriptedServer, held: threading.Event, patience: Any
) -> None:
    """Opening, pings, then the answer: the clients' own accumulators get it whole."""
    patience(begun=0.01)
    release = threading.Timer(0.2, held.set)
    release.start()
    with (
        openai.OpenAI(base_url=script.url + "/v1", api_key="none", max_retries=0) as first,
        anthropic.Anthropic(base_url=script.url, api_key="none", max_retries=0) as second,
    ):
        with first.chat.completions.stream(model="script", messages=USER) as stream:
            assert stream.get_final_completion().choices[0].message.content == SAID
        held.clear()
        threading.Timer(0.2, held.set).start()
        script.says(SAID)
        with first.responses.stream(model="script", input="How is Rome?") as events:
            assert events.get_final_response().output_text == SAID
        held.clear()
        threading.Timer(0.2, held.set).start()
        script.says(SAID)
        with second.messages.stream(model="script", messages=USER, max_tokens=50) as told:
            final = told.get_final_message()
            begun = told.current_message_snapshot
    assert final.content[0].text == SAID  # type: ignore[union-attr]
    assert begun.usage.input_tokens == len(script.client.asked[-1].prompt_token_ids)
    release.join()


def test_every_choice_is_opened_once(
    script: ScriptedServer, held: threading.Event, patience: Any
) -> None:
    patience(begun=0.01)
    script.says(SAID, SAID, SAID)
    early, pieces = read_until(post(script, CHAT, n=3), PINGS[CHAT], 2)
    assert early.count(b'"role":"assistant"') == 3
    held.set()
    rest = b"".join(pieces)
    assert b'"role"' not in rest and rest.count(b'"finish_reason":"stop"') == 3


# ── what fails ──────────────────────────────────────────────────────────────────────────────


def shed() -> RequestError:
    return ShedError("Too busy.")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("error", "status"),
    [(shed(), 503), (RequestError("No.", code="unsupported_keyword"), 400)],
    ids=["shed", "refused"],
)
def test_what_fails_before_the_opening_has_a_status(
    script: ScriptedServer,
    held: threading.Event,
    patience: Any,
    path: str,
    error: RequestError,
    status: int,
) -> None:
    """One that may be refused is opened late as long as the engine has not begun."""
    patience(begun=0.0, waiting=0.0)
    script.client.begins, script.client.fails = False, error
    script.model.admission.rules = Rules(scheduler=SchedulerConfig(late="shed"))
    threading.Timer(0.1, held.set).start()
    try:
        assert post(script, path).status_code == status
    finally:
        script.model.admission.rules = Rules()


@pytest.mark.parametrize("path", PATHS)
def test_what_is_shed_later_ends_with_the_dialects_error_event(
    script: ScriptedServer, held: threading.Event, patience: Any, path: str
) -> None:
    patience(begun=0.01)
    script.client.fails = shed()
    before = script.counted("admission_rejections", "given_up")
    _, pieces = read_until(post(script, path), PINGS[path], 1)
    held.set()
    rest = b"".join(pieces)
    wanted = {
        RESPONSES: b"event: response.failed",
        MESSAGES: b'event: error\ndata: {"type":"error","error":{"type":"overloaded_error"',
    }
    assert wanted.get(path, b'data: {"error":{"message":"Too busy."') in rest
    assert b"[DONE]" not in rest and b"message_stop" not in rest
    assert script.counted("admission_rejections", "given_up") == before + 1


def test_a_grammar_may_be_refused_so_its_stream_is_opened_late(
    script: ScriptedServer, held: threading.Event, patience: Any
) -> None:
    patience(waiting=0.0)
    script.client.begins = False
    script.client.fails = RequestError("No.", code="unsupported_keyword")
    threading.Timer(0.1, held.set).start()
    answer = post(script, CHAT, structured_outputs={"regex": "a"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "unsupported_keyword")
