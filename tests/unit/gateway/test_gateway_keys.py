"""Keys by API: made by an operator alone, shown once, kept as a hash, bounded in all they may."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from gateway_world import Gateway, Stub, config_of, world
from headway.cli.main import main
from headway.edge.key_file import digest
from headway.gateway.config import TeamRow
from headway.gateway.ledger import ADD_KEY

ADMIN, ALICE = {"authorization": "Bearer boss"}, {"authorization": "Bearer alice-key"}
TEAMS = {"research": TeamRow(dollars=5.0)}
MODELS = ({"name": "tiny"}, {"name": "big"})


def key_file(folder: Path, *more: dict[str, Any]) -> dict[str, Any]:
    rows = [
        {"name": "boss", "sha256": digest("boss").hex(), "admin": True},
        {"name": "alice", "sha256": digest("alice-key").hex()},
    ]
    (folder / "keys.yaml").write_text(json.dumps({"keys": [*rows, *more]}))
    return {"key_file": str(folder / "keys.yaml"), "key_api": True}


async def ask(
    live: Gateway, method: str, path: str, headers: dict[str, str] = ADMIN, **body: Any
) -> tuple[int, Any]:
    async with live.http.request(method, path, headers=headers, json=body or None) as answer:
        return answer.status, await answer.json()


async def test_the_routes_of_keys_are_an_operators_and_off_unless_asked_for(tmp_path: Path) -> None:
    options = key_file(tmp_path)
    async with world(Stub("a"), folder=tmp_path, options=options) as live:
        for headers, status in ((ALICE, 403), ({}, 401), ({"authorization": "Bearer x"}, 401)):
            for method, path in (("POST", "/keys"), ("GET", "/keys"), ("DELETE", "/keys/alice")):
                assert (await ask(live, method, path, headers, name="eve"))[0] == status
        for name in ("alice", "boss"):
            assert (await ask(live, "DELETE", f"/keys/{name}"))[0] == 404, "the file's own"
            status, refusal = await ask(live, "POST", "/keys", name=name)
            assert (status, refusal["error"]["param"]) == (409, "name")
        assert live.state.made_keys.rows == {}
        status, made = await ask(live, "POST", "/keys", name="carol")
        own = {"authorization": f"Bearer {made['key']}"}
        for method, path in (("POST", "/keys"), ("GET", "/keys"), ("DELETE", "/keys/carol")):
            assert (await ask(live, method, path, own, name="eve"))[0] == 403, "it makes no others"
        assert (await ask(live, "GET", "/stats", own))[0] == 403
    options = {**options, "key_api": False}
    async with world(Stub("a"), folder=tmp_path, options=options) as live:
        assert (await ask(live, "POST", "/keys", name="dave"))[0] == 404
        assert (await live.chat(False, key=made["key"])).status == 401, "nor are its keys any"
    assert main(["gateway", "--upstream=http://127.0.0.1:1", "--key-api"]) == 2


async def test_a_made_key_is_shown_once_and_kept_as_a_hash(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It outlasts a restart and a reload; a deleted one does not come back."""
    options = key_file(tmp_path)
    caplog.set_level("DEBUG")
    async with world(Stub("a"), folder=tmp_path, options=options) as live:
        status, made = await ask(
            live, "POST", "/keys", name="carol", limits={"requests_at_once": 3}
        )
        key = made["key"]
        assert status == 201 and key.startswith("hw-") and "sha256" not in made
        await ask(live, "POST", "/keys", name="dave")
        await ask(live, "DELETE", "/keys/dave")
        assert (await live.chat(False, key=key)).status == 200
        _, listed = await ask(live, "GET", "/keys")
        assert [row["name"] for row in listed["data"]] == ["carol"]
        assert listed["others"] == ["alice", "boss"]
        assert key not in str(listed) and digest(key).hex() not in str(listed)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    data = b"".join(path.read_bytes() for path in files)
    assert key.encode() not in data and digest(key).hex().encode() in data
    assert key not in caplog.text
    async with world(Stub("a"), folder=tmp_path, options=options) as live:
        assert (await live.chat(False, key=key)).status == 200
        assert [*live.state.made_keys.rows] == ["carol"]
        live.state.keyring.reload()
        assert (await live.chat(False, key=key)).status == 200
        key_file(tmp_path, {"name": "carol", "sha256": digest("other").hex()})
        live.state.keyring.reload()
        assert (await live.chat(False, key=key)).status == 401, "the file's row comes first"
        assert (await live.chat(False, key="other")).status == 200


async def test_a_made_key_may_what_it_was_made_for(tmp_path: Path) -> None:
    """Models, an expiry, a budget, a rate and a team's budget hold."""
    options = key_file(tmp_path)
    more: dict[str, Any] = {"models": MODELS, "teams": TEAMS, "options": options}
    stub = Stub("a")
    async with world(stub, folder=tmp_path, **more) as live:

        async def make(**fields: Any) -> str:
            status, made = await ask(live, "POST", "/keys", **fields)
            assert status == 201, made
            return str(made["key"])

        one = await make(name="one", models=["tiny"])
        assert (await live.chat(False, key=one)).status == 200
        refused = await live.chat(False, key=one, model="big")
        assert (refused.status, refused.json["error"]["code"]) == (403, "model_not_allowed")
        headers = {"authorization": f"Bearer {one}"}
        assert (await ask(live, "POST", "/tokenize", headers, model="big", prompt="x"))[0] == 403
        _, cards = await ask(live, "GET", "/v1/models", headers)
        assert [card["id"] for card in cards["data"]] == ["tiny"]
        assert (await ask(live, "GET", "/v1/models/tiny", headers))[0] == 200
        assert (await ask(live, "GET", "/v1/models/big", headers))[0] == 403
        budget = {"dollars": 0.000001, "per": "day"}
        poor = await make(name="poor", budget=budget)
        assert (await live.chat(False, key=poor)).json["error"]["code"] == "budget_exceeded"
        slow = await make(name="slow", limits={"requests_per_minute": 1})
        statuses = [(await live.chat(False, key=slow)).status for _ in range(2)]
        assert statuses == [200, 429]
        member = await make(name="member", team="research")
        assert (await live.chat(False, key=member)).status == 200
        (row,) = [each for each in live.state.budget_rows(None) if each["kind"] == "team"]
        assert row["spent"] > 0
        gone = await make(name="gone", expires_in_days=1e-9)
        expired = await live.chat(False, key=gone)
        assert (expired.status, expired.json["error"]["code"]) == (401, "key_expired")
        await live.state.reload(config_of([stub], *MODELS))
        assert (await live.chat(False, key=member)).status == 403, "no team, no budget: no request"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        *(({"name": ""}, "name"), ({"name": "a/b"}, "name"), ({"name": "*"}, "name")),
        *(({"name": "x\ny"}, "name"), ({"name": "x" * 65}, "name"), ({}, "name")),
        *(({"name": "x", "admin": True}, "admin"), ({"name": "x", "team": "none"}, "team")),
        *(({"name": "x", "models": ["nothing"]}, "model"),),
        *(({"name": "x", "expires_in_days": 0}, "expires_in_days"),),
        *(({"name": "x", "expires_in_days": 1e9}, "expires_in_days"),),
        *(({"name": "x", "budget": {"dollars": -1}}, "budget"),),
        *(({"name": "x", "limits": {"requests_at_once": 0}}, "limits"),),
    ],
)
async def test_a_bad_key_is_refused_by_field(
    tmp_path: Path, body: dict[str, Any], param: str
) -> None:
    async with world(Stub("a"), folder=tmp_path, models=MODELS, options=key_file(tmp_path)) as live:
        async with live.http.post("/keys", json=body, headers=ADMIN) as answer:
            assert answer.status in (400, 404, 409)
            assert param in (await answer.json())["error"]["param"]
        assert live.state.made_keys.rows == {}


async def test_a_key_that_cannot_be_stored_is_none(tmp_path: Path) -> None:
    async with world(Stub("a"), folder=tmp_path, options=key_file(tmp_path)) as live:
        await live.state.ledger.store(ADD_KEY, "carol", "{}")
        status, _ = await ask(live, "POST", "/keys", name="carol")
        assert status == 503 and live.state.made_keys.rows == {}
    assert os.stat(tmp_path / "gateway").st_mode & 0o077 == 0
