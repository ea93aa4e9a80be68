"""The key file of a running server: rights by key, limits, and reading it again."""

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import openai
import pytest
from door_cases import ROUTES, ask, error_of
from live_server import NO_TORCH, LiveServer, headway, wait_until

from headway.edge.auth import KEY, OPERATOR, PUBLIC
from headway.edge.key_file import row_text
from headway.edge.keys import Keyring
from headway.edge.relayed import LOAD_PATH
from headway.server import app
from headway.server.app import ACCESS, access

KEYS = {
    "user": "key-of-a-user",
    "busy": "key-of-a-busy-one",
    "brief": "key-of-a-client",
    "ops": "key-of-the-operator",
}
FLAG_KEY = "key-on-the-command-line"
BODY = {"model": "m", "prompt": [5, 6], "max_tokens": 4, "ignore_eos": True}


def write_keys(path: Path, *names: str, more: dict[str, str] | None = None) -> None:
    rows = ["keys:\n"]
    for name in names:
        rows.append(row_text(name, KEYS[name]))
        rows.append((more or {}).get(name, ""))
    path.write_text("".join(rows))


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "keys.yaml"
    more = {
        "user": "    class: batch\n",
        "busy": "    limits: {requests_at_once: 2, requests_per_minute: 6}\n",
        "brief": "    limits: {requests_per_minute: 2}\n",
        "ops": "    admin: true\n",
    }
    write_keys(path, *KEYS, more=more)
    return path


@pytest.fixture(scope="module")
def live(tiny_model: Path, keys: Path) -> Iterator[LiveServer]:
    """A server with four keys in a file and one on its command line."""
    opened = LiveServer(
        tiny_model, NO_TORCH, f"--key-file={keys}", f"--api-key={FLAG_KEY}",
        "--served-model-name=m", "--kv-memory=64MiB",
    )  # fmt: skip
    try:
        yield opened.wait_ready()
    finally:
        opened.close()


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_every_route_is_in_the_table_of_access() -> None:
    """The walk over all routes of the application: none is open by oversight."""
    paths = {path for _, path, _ in app.SMALL_ROUTES} | {path for _, path in ROUTES}
    for path in paths - {"/nowhere"}:
        named = path in ACCESS or path.startswith("/v1/")
        assert named, f"{path} is not in ACCESS"


@pytest.mark.parametrize("name", ["user", "ops"])
def test_open_doors_each_route_asks_for_the_right_key(live: LiveServer, name: str) -> None:
    for method, path in ROUTES:
        path = path.replace("careful", "m")
        status, _, content = ask(live, method, path, bearer(KEYS[name]), b"{}")
        if (path == LOAD_PATH or access(path) == OPERATOR) and name != "ops":
            assert (status, error_of(content)["code"]) == (403, "permission_denied"), path
        else:
            assert status not in (401, 403) and status < 500, (path, content)
        status, _, _ = ask(live, method, path, {}, b"{}")
        assert (status == 401) == (access(path) != PUBLIC), path


def test_the_class_of_a_key_is_its_requests_class(live: LiveServer) -> None:
    before = live_metric(live, "slo_met_total", "batch")
    body = msgspec.json.encode(BODY)
    assert ask(live, "POST", "/v1/completions", bearer(KEYS["user"]), body)[0] == 200
    assert live_metric(live, "slo_met_total", "batch") == before + 1


def live_metric(live: LiveServer, name: str, label: str) -> float:
    """The sum of a metric's samples that name `label`, asked with the operator's key."""
    _, _, text = ask(live, "GET", "/metrics", bearer(KEYS["ops"]))
    lines = [line for line in text.decode().splitlines() if line.startswith(f"headway:{name}")]
    return sum(float(line.rpartition(" ")[2]) for line in lines if f'"{label}"' in line)


async def test_unbounded_cost_only_the_heavy_key_is_refused(live: LiveServer) -> None:
    """Twenty requests at once under a key that may have two, beside one that has no limit."""
    body = {**BODY, "max_tokens": 40}

    async def post(http: aiohttp.ClientSession, key: str) -> tuple[int, Any, Any]:
        async with http.post("/v1/completions", json=body, headers=bearer(KEYS[key])) as answer:
            return answer.status, answer.headers, await answer.json()

    async with aiohttp.ClientSession(live.url) as http:
        heavy = [asyncio.create_task(post(http, "busy")) for _ in range(20)]
        normal = await asyncio.gather(*(post(http, "user") for _ in range(10)))
        answers = await asyncio.gather(*heavy)
    assert [status for status, _, _ in normal] == [200] * 10
    statuses = sorted(status for status, _, _ in answers)
    assert statuses[0] == 200 and statuses[-1] == 429 and set(statuses) == {200, 429}
    for status, headers, content in answers:
        assert headers["x-ratelimit-limit-requests"] == "6"
        if status == 429:
            assert content["error"]["code"] == "rate_limit_exceeded"
            assert content["error"]["type"] == "rate_limit_error"
            assert 1 <= int(headers["retry-after"]) <= 120
    assert live_metric(live, "admission_rejections_total", "requests_at_once") >= 1


def test_the_official_client_understands_a_limit(live: LiveServer) -> None:
    """Three within the minute of a key that may have two."""
    with (
        openai.OpenAI(base_url=live.url + "/v1", api_key=KEYS["brief"], max_retries=0) as client,
        pytest.raises(openai.RateLimitError) as refused,
    ):
        _ = [client.completions.create(model="m", prompt=[5], max_tokens=1) for _ in range(3)]
    assert refused.value.code == "rate_limit_exceeded"
    with (
        openai.OpenAI(base_url=live.url, api_key=KEYS["user"]) as client,
        pytest.raises(openai.PermissionDeniedError),
    ):
        client.get("/metrics", cast_to=str)


def test_the_file_is_read_again(live: LiveServer, keys: Path) -> None:
    """Keys are taken away, and come back."""
    text = keys.read_text()
    status = lambda key: ask(live, "GET", "/v1/models", bearer(key))[0]  # noqa: E731
    assert status(KEYS["user"]) == 200
    write_keys(keys, "ops")
    live.signal(signal.SIGHUP)
    wait_until(lambda: status(KEYS["user"]) == 401)
    assert status(KEYS["ops"]) == 200 and status(FLAG_KEY) == 200
    keys.write_text("keys: [")
    live.signal(signal.SIGHUP)
    wait_until(lambda: "the keys stay as they were" in live.stderr)
    assert status(KEYS["ops"]) == 200
    keys.write_text(text)
    live.signal(signal.SIGHUP)
    wait_until(lambda: status(KEYS["user"]) == 200)
    for key in (*KEYS.values(), FLAG_KEY):
        assert key not in live.stderr + live.stdout


def test_a_key_is_made_on_the_command_line(tmp_path: Path) -> None:
    made = headway("key", "alice")
    assert made.returncode == 0 and made.stdout.startswith('keys:\n  - name: "alice"\n')
    key = made.stderr.split()[-1]
    assert key.startswith("hw-") and key not in made.stdout
    assert headway("key").returncode == 2


def test_the_key_verb_adds_to_a_file(tmp_path: Path) -> None:
    """Each key works; a name that is there is refused, and so is a file of two `>>`."""
    path = tmp_path / "keys.yaml"
    made = [headway("key", name, f"--file={path}") for name in ("alice", "bob")]
    assert [each.returncode for each in made] == [0, 0]
    ring = Keyring(file=path)
    found = [ring.find(each.stdout.strip()) for each in made]
    assert [caller and caller.principal.name for caller in found] == ["alice", "bob"]
    assert not any(each.stdout.strip() in each.stderr for each in made)
    again = headway("key", "alice", f"--file={path}")
    assert (again.returncode, again.stdout) == (2, "") and "already" in again.stderr
    path.write_text(headway("key", "a").stdout + headway("key", "b").stdout)
    refused = headway("serve", f"--key-file={path}", "--port=0")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert f"{path}, line 4: the key 'keys' is there twice" in refused.stderr


def test_the_key_that_admin_makes_reads_the_metrics(live: LiveServer, keys: Path) -> None:
    """Through the file, and by the row that is printed without one."""
    text = keys.read_text()
    made = {
        "watcher": headway("key", "watcher", "--admin", f"--file={keys}"),
        "client": headway("key", "client", f"--file={keys}"),
    }
    assert [each.returncode for each in made.values()] == [0, 0]
    found = {name: each.stdout.strip() for name, each in made.items()}
    live.signal(signal.SIGHUP)
    wait_until(lambda: ask(live, "GET", "/v1/models", bearer(found["client"]))[0] == 200)
    for path in ("/metrics", "/stats"):
        assert ask(live, "GET", path, bearer(found["watcher"]))[0] == 200, path
        status, _, content = ask(live, "GET", path, bearer(found["client"]))
        assert status == 403 and "headway key NAME --admin" in error_of(content)["message"]
    assert "admin: true\n" in headway("key", "a", "--admin").stdout
    refused = headway("key", "revoke", "client", "--admin", f"--file={keys}")
    assert refused.returncode == 2 and "no --admin" in refused.stderr
    keys.write_text(text)
    live.signal(signal.SIGHUP)


@pytest.mark.parametrize("text", ["keys: [{name: a}]", "nothing", None])
def test_a_bad_key_file_is_told_before_anything_starts(
    tiny_model: Path, tmp_path: Path, text: str | None
) -> None:
    path = tmp_path / "keys.yaml"
    if text is not None:
        path.write_text(text)
    refused = headway("serve", tiny_model, f"--key-file={path}", "--port=0")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert len(refused.stderr.splitlines()) == 2 and "keys.yaml" in refused.stderr


# ── without keys, on loopback ───────────────────────────────────────────────────────────────


def test_a_page_from_elsewhere_gets_nothing_from_loopback(server: LiveServer) -> None:
    """A name that leads here (DNS rebinding), and a form that posts here."""
    body = msgspec.json.encode({"model": "tiny", "prompt": [5], "max_tokens": 1})
    host = server.url.removeprefix("http://")
    for headers, expected in (
        ({}, 200),
        ({"Host": "localhost:1"}, 200),
        ({"Host": "evil.example"}, 403),
        ({"Host": "localhost.evil.example"}, 403),
        ({"Origin": "http://evil.example", "content-type": "text/plain"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": f"http://{host}"}, 200),
    ):
        status, _, content = ask(server, "POST", "/v1/completions", headers, body)
        assert status == expected, (headers, content)
        if expected == 403:
            assert error_of(content)["code"] == "permission_denied"
    assert ask(server, "GET", "/stats", {"Host": "evil.example"})[0] == 403
    assert ask(server, "GET", "/health", {"Host": "evil.example"})[0] in (200, 403)


def test_keys_of_the_table_have_a_meaning() -> None:
    assert set(ACCESS.values()) == {PUBLIC, KEY, OPERATOR}
