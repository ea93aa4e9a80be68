"""What a gateway may ask of a server: marks, streams that go on, the load, users of its own."""

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import requests

from headway.edge.key_file import digest
from headway.edge.relayed import FIELD, MARK, Mark, decode_load, mark, read_mark
from headway.frontend import answer
from in_process import InProcess

KEYS = {"gateway": "key-gateway", "plain": "key-plain", "operator": "key-operator"}
RIGHTS = {"gateway": "gateway: true", "plain": "weight: 1", "operator": "admin: true"}
MESSAGES = [{"role": "user", "content": "Tell me of rivers."}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 24, "ignore_eos": True},
    "/v1/completions": {"prompt": "Once upon a time", "max_tokens": 24, "ignore_eos": True},
    "/v1/responses": {"input": "Tell me of rivers.", "max_output_tokens": 24, "ignore_eos": True},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 24, "ignore_eos": True},
}


@pytest.fixture(autouse=True)
def nobody_is_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Events are compared one by one, so none is joined where others have the cores."""
    monkeypatch.setattr(answer, "MAX_BACKLOG_STEPS", 10**9)


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InProcess]:
    folder = tmp_path_factory.mktemp("state")
    rows = [
        f"  - {{name: {name}, sha256: {digest(key).hex()}, {RIGHTS[name]}}}"
        for name, key in KEYS.items()
    ]
    (folder / "keys.yaml").write_text("keys:\n" + "\n".join(rows))
    served = InProcess(folder / "data", key_file=str(folder / "keys.yaml"))
    try:
        yield served
    finally:
        served.close()


def ask(live: InProcess, path: str, body: dict[str, Any], key: str = "gateway", **more: str) -> Any:
    headers = {"authorization": f"Bearer {KEYS[key]}", **more}
    return requests.post(live.url + path, json={"model": "tiny", **body}, headers=headers)


def events_of(answer: requests.Response) -> list[tuple[bytes, list[int]]]:
    """(bytes of the events, tokens of the mark behind them), the last one without a mark."""
    assert answer.status_code == 200, answer.text
    found, shown = [], b""
    for event in answer.content.split(b"\n\n"):
        if event.startswith(MARK):
            found.append((shown, read_mark(event).tokens))
            shown = b""
        elif event:
            shown += event + b"\n\n"
    return [*found, (shown, [])]


def without_usage_of_cache(data: bytes) -> Any:
    """The data of each event; how much of a prompt was cached may differ from run to run."""
    events = [line[6:] for line in data.splitlines() if line.startswith(b"data: {")]
    return [blind(msgspec.json.decode(event)) for event in events]


def blind(value: Any) -> Any:
    if isinstance(value, dict):
        hidden = ("cached_tokens", "cache_read_input_tokens", "completed_at")
        hidden += ("input_tokens",) * ("cache_read_input_tokens" in value)
        return {key: blind(each) for key, each in value.items() if key not in hidden}
    return [blind(each) for each in value] if isinstance(value, list) else value


def resume_of(events: list[tuple[bytes, list[int]]], cut: int) -> dict[str, Any]:
    """What goes on behind the first `cut` marks."""
    first = without_usage_of_cache(events[0][0])[0]
    first = first.get("response") or first.get("message") or first
    tokens = [token for _, told in events[:cut] for token in told]
    created = first.get("created") or first.get("created_at") or 1
    return {"id": first["id"], "created": created, "tokens": tokens}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("cut", [1, 2, 9])
def test_a_stream_goes_on_elsewhere_as_if_nothing_had_happened(
    live: InProcess, path: str, cut: int
) -> None:
    body = {**BODIES[path], "stream": True, "temperature": 1.0, "seed": 5}
    events = events_of(ask(live, path, {**body, FIELD: {"marks": True}}))
    assert len(events) > 10 and sum(len(told) for _, told in events) == 24
    relayed = {"marks": True, "resume": resume_of(events, cut)}
    rest = events_of(ask(live, path, {**body, FIELD: relayed}))
    assert [told for _, told in rest] == [told for _, told in events[cut:]]
    ours = b"".join(data for data, _ in events[:cut]) + b"".join(data for data, _ in rest)
    whole = b"".join(data for data, _ in events)
    assert without_usage_of_cache(ours) == without_usage_of_cache(whole)


def test_a_stream_that_showed_nothing_yet_begins_without_its_opening(live: InProcess) -> None:
    path = "/v1/chat/completions"
    body = {**BODIES[path], "stream": True, "temperature": 0}
    resume = {"id": "chatcmpl-x", "created": 7, "tokens": []}
    answer = ask(live, path, {**body, FIELD: {"resume": resume}})
    chunks = without_usage_of_cache(answer.content)
    assert {(chunk["id"], chunk["created"]) for chunk in chunks} == {("chatcmpl-x", 7)}
    assert all("role" not in choice["delta"] for chunk in chunks for choice in chunk["choices"])


RESUME = {"id": "chatcmpl-a", "created": 1, "tokens": [5]}


@pytest.mark.parametrize(
    "fields",
    [
        {"stream": False},
        {"n": 2},
        {"logprobs": True},
        {FIELD: {"resume": {**RESUME, "tokens": [10**9]}}},
        {FIELD: {"resume": {**RESUME, "tokens": [5] * 24}}},
        {FIELD: {"resume": {**RESUME, "id": "resp_a"}}},
        {FIELD: {"resume": {**RESUME, "id": "chatcmpl-" + "a" * 200}}},
        {FIELD: {"resume": {**RESUME, "created": -1}}},
    ],
)
def test_what_cannot_go_on_is_refused(live: InProcess, fields: dict[str, Any]) -> None:
    path = "/v1/chat/completions"
    body = {**BODIES[path], "stream": True, FIELD: {"resume": RESUME}, **fields}
    answer = ask(live, path, body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, FIELD)


def test_only_a_gateway_may_ask_so(live: InProcess) -> None:
    path = "/v1/completions"
    for key, status in (("plain", 403), ("gateway", 200), ("operator", 200)):
        answer = ask(live, path, {**BODIES[path], FIELD: {"marks": True}}, key)
        assert answer.status_code == status
        headers = {"authorization": f"Bearer {KEYS[key]}"}
        assert requests.get(live.url + "/v1/load", headers=headers).status_code == status
    assert "x-headway-load" not in ask(live, path, BODIES[path]).headers


def test_the_load_comes_with_an_answer_and_by_itself(live: InProcess) -> None:
    path = "/v1/completions"
    answer = ask(live, path, {**BODIES[path], FIELD: {"marks": True}})
    told = decode_load(answer.headers["x-headway-load"])
    headers = {"authorization": f"Bearer {KEYS['gateway']}"}
    found = requests.get(live.url + "/v1/load", headers=headers).json()["tiny"]
    assert told.context == found["context"] == 512 and told.boot == found["boot"] != ""
    assert found["max_rows"] == 16 and found["cache_tokens"] == 8192
    assert found["rows"] == 0 and found["queue_s"] == 0
    assert found["token_s"] > 0


def test_the_callers_of_a_gateway_are_apart(live: InProcess) -> None:
    """Stored responses, prefix caches and queues go by the gateway's callers, not by its key."""
    made = ask(live, "/v1/responses", BODIES["/v1/responses"], **{"x-headway-user": "alice"})
    place = f"{live.url}/v1/responses/{made.json()['id']}"
    for key, user, status in (
        *(("gateway", "alice", 200), ("gateway", "bob", 404), ("plain", "alice", 404)),
    ):
        headers = {"authorization": f"Bearer {KEYS[key]}", "x-headway-user": user}
        assert requests.get(place, headers=headers).status_code == status, (key, user)
    operator = {"authorization": f"Bearer {KEYS['operator']}", "x-headway-user": "alice"}
    assert requests.get(live.url + "/metrics", headers=operator).status_code == 200
    assert ask(live, "/v1/responses", {}, **{"x-headway-user": "a" * 65}).status_code == 400


def test_a_resumed_id_is_of_the_caller_that_the_gateway_names(live: InProcess) -> None:
    """A stream of another caller with the id of a stored response leaves that response alone."""
    path = "/v1/responses"
    alice, bob = {"x-headway-user": "alice"}, {"x-headway-user": "bob"}
    made = ask(live, path, {**BODIES[path], "store": True}, **alice).json()
    place, headers = f"{live.url}{path}/{made['id']}", {"authorization": "Bearer key-gateway"}
    resume = {"id": made["id"], "created": 1, "tokens": [300]}
    relayed = {FIELD: {"resume": resume}, "stream": True, "store": True}
    assert ask(live, path, {**BODIES[path], **relayed}, **bob).status_code == 200
    assert requests.get(place, headers=headers | alice).json()["output"] == made["output"]
    assert requests.get(place, headers=headers | bob).json()["created_at"] == 1
    assert requests.delete(place, headers=headers | bob).status_code == 200
    assert requests.get(place, headers=headers | alice).status_code == 200
    assert live.state.rows[0].telemetry.num_live == 0


def test_a_mark_is_read_as_it_was_written() -> None:
    line = mark(40, 16, [311, 298])
    assert line == b": headway 40 16 311,298\n\n"
    assert read_mark(line.strip()) == Mark(40, 16, [311, 298])
    assert read_mark(mark(1, 0, []).rstrip(b"\n")) == Mark(1, 0, [])
    for wrong in (b": headway", b": headway 1 2", b": headway 1 2 x", b": headway a b 1"):
        with pytest.raises(ValueError, match=r".*"):
            read_mark(wrong)
