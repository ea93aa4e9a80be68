"""POST /cache/forget and revoked keys: whose blocks are dropped, and who may say so."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from headway.edge.key_file import revoke_row, row_text
from headway.server.forgetting import forget_revoked
from in_process import InProcess

PROMPT = list(range(5, 105))


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "keys.yaml"
    more = {"gate": "    gateway: true\n", "ops": "    admin: true\n"}
    rows = [row_text(name, name) + more.get(name, "") for name in ("al", "bo", "gate", "ops")]
    path.write_text("keys:\n" + "".join(rows))
    return path


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory, keys: Path) -> Iterator[InProcess]:
    served = InProcess(tmp_path_factory.mktemp("state"), key_file=str(keys))
    try:
        yield served
    finally:
        served.close()


def headers(key: str, user: str = "") -> dict[str, str]:
    return {"authorization": f"Bearer {key}"} | ({"x-headway-user": user} if user else {})


def found(live: InProcess, key: str, salt: str | None = None, user: str = "") -> int:
    """Prompt tokens that a request finds, which computes the others."""
    body: dict[str, Any] = {"model": "tiny", "prompt": PROMPT, "max_tokens": 1}
    body |= {"cache_salt": salt} if salt else {}
    answer = requests.post(live.url + "/v1/completions", json=body, headers=headers(key, user))
    assert answer.status_code == 200, answer.text
    cached: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return cached


def forget(live: InProcess, caller: str, user: str = "", /, **body: Any) -> requests.Response:
    return requests.post(live.url + "/cache/forget", json=body, headers=headers(caller, user))


def test_a_key_forgets_its_own_blocks_alone(live: InProcess):
    for key in ("al", "bo"):
        found(live, key), found(live, key, "x")
    assert forget(live, "al").json() == {
        "object": "cache.forgotten", "key": "al", "cache_salt": None
    }  # fmt: skip
    assert (found(live, "al"), found(live, "al", "x")) == (0, 0)
    assert found(live, "bo") > 90 and found(live, "bo", "x") > 90


def test_one_salt_goes_alone(live: InProcess):
    for salt in (None, "x", "y"):
        found(live, "bo", salt)
    assert forget(live, "bo", cache_salt="x").json()["cache_salt"] == "x"
    assert found(live, "bo", "x") == 0
    assert found(live, "bo", "y") > 90 and found(live, "bo") > 90


def test_a_gateways_user_forgets_its_own(live: InProcess):
    for user in ("u", "v"):
        found(live, "gate", user=user), found(live, "gate", "x", user)
    assert forget(live, "gate", "u").status_code == 200
    assert (found(live, "gate", user="u"), found(live, "gate", "x", "u")) == (0, 0)
    assert found(live, "gate", user="v") > 90
    assert forget(live, "gate").status_code == 200
    assert found(live, "gate", user="v") == 0


def test_another_key_is_for_the_operator(live: InProcess):
    found(live, "bo")
    refused = forget(live, "al", key="bo")
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "permission_denied")
    assert found(live, "bo") > 90
    assert forget(live, "ops", key="bo").json()["key"] == "bo"
    assert found(live, "bo") == 0
    assert forget(live, "ops", key="eve").json()["error"]["param"] == "key"


@pytest.mark.parametrize("body", [{"salt": "x"}, {"cache_salt": 5}, {"key": ["bo"]}])
def test_a_word_that_is_not_known_forgets_nothing(live: InProcess, body: dict[str, Any]):
    """A misspelt `cache_salt` would else forget all of the key."""
    found(live, "bo")
    assert forget(live, "bo", **body).status_code == 400
    assert found(live, "bo") > 90


async def in_the_servers_thread(live: InProcess) -> None:
    forget_revoked(live.state)


def test_a_revoked_keys_blocks_go(live: InProcess, keys: Path):
    found(live, "al"), found(live, "bo")
    revoke_row(keys, "al")
    live.state.keyring.reload()
    assert forget(live, "al").status_code == 401
    asyncio.run_coroutine_threadsafe(in_the_servers_thread(live), live.loop).result(60)
    pool = live.state.rows[0].client.engine.kv.pools[0]
    listed = pool.num_cached
    assert found(live, "bo") > 90 and pool.num_cached == listed
    owners = {cached.owner[:12] for cached in pool.index.cached if cached is not None}
    assert live.state.keyring.revoked[0].block_owner()[:12] not in owners
