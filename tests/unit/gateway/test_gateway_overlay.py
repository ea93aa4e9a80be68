"""`headway gateway rollout`: the file beside the gateway's, what it refuses, how it follows."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from gateway_world import Stub, world
from headway.cli import rollout as cli
from headway.cli.main import main
from headway.config.options import RolloutOptions
from headway.core.errors import HeadwayError, UsageError
from headway.gateway import overlay
from headway.gateway.config import read_config
from raw_upstream import raw_upstream

FILE = """
upstreams: [{name: a, url: 'http://a/v1'}, {url: 'http://b:1/v1'}]
models: [{name: chat}, {name: other, upstreams: [a]}]     # a comment of the operator's
"""
HTTP = b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n%b"
CANARY = {"name": "canary-r", "url": "http://c/v1"}
ROW = {"name": "r", "model": "chat", "canary": ["canary-r"]}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    found = tmp_path / "gateway.yaml"
    found.write_text(FILE)
    return found


def test_a_canary_joins_its_model_alone(file: Path) -> None:
    """`chat` named no upstreams and has all of the file; the canary is the rollout's."""
    overlay.add(file, CANARY, ROW)
    config = read_config(file)
    chat, other = config.models
    assert chat.upstreams == ("a", "b:1", "canary-r") and other.upstreams == ("a",)
    assert [row.name for row in config.rollouts] == ["r"]
    assert file.read_text() == FILE, "the operator's file is as it was"
    overlay.remove(file, "r")
    assert not overlay.overlay_path(file).exists()
    assert read_config(file).models[0].upstreams == ("a", "b:1")
    overlay.remove(file, "r")


def test_a_model_has_one_rollout_and_others_keep_theirs(file: Path) -> None:
    overlay.add(file, CANARY, ROW)
    overlay.add(
        file,
        {**CANARY, "name": "canary-o"},
        {**ROW, "name": "o", "model": "other"} | {"canary": ["canary-o"]},
    )
    overlay.add(file, {**CANARY, "name": "canary-s"}, {**ROW, "name": "s", "canary": ["canary-s"]})
    config = read_config(file)
    assert [(row.name, row.canary) for row in config.rollouts] == [
        ("o", ("canary-o",)),
        ("s", ("canary-s",)),
    ]
    assert "canary-r" not in [row.name for row in config.upstreams]
    overlay.remove(file, "s")
    assert [row.name for row in read_config(file).rollouts] == ["o"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "has not upstreams"),
        ("{a: [", "not YAML"),
        ("{upstreams: 5, rollouts: []}", "Expected `array`"),
        ("{upstreams: [], rollouts: null}", "Expected `array`"),
        ("{upstreams: [a], rollouts: []}", "Expected `object`"),
        ("{upstreams: [], rollouts: [{name: r, model: [], canary: [c]}]}", "Expected `str`"),
        ("{upstreams: [], rollouts: [{name: r, model: chat}]}", "canary"),
    ],
)
def test_a_file_that_somebody_has_spoiled_is_named(file: Path, text: str, message: str) -> None:
    overlay.overlay_path(file).write_text(text)
    with pytest.raises(UsageError) as raised:
        read_config(file)
    assert message in raised.value.cause and "gateway.rollouts.yaml" in raised.value.cause


@pytest.mark.parametrize(
    "text",
    [
        "upstreams: 5",
        "upstreams: [a]",
        "upstreams: [{url: 'http://['}]",
        "{upstreams: [{url: 'http://a'}], models: [{name: [chat]}]}",
        "{upstreams: [{url: 'http://a'}], models: [{name: chat, upstreams: 5}]}",
    ],
)
def test_a_row_that_is_none_is_named_beside_a_rollout_too(file: Path, text: str) -> None:
    overlay.add(file, CANARY, ROW)
    file.write_text(text)
    with pytest.raises(UsageError, match=r"gateway.yaml: (upstreams|models)"):
        read_config(file)


# ── the command ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("headway-tiny",), "--to the gateway's file"),
        (("headway-tiny", "--to=FILE"), "There is chat, other"),
        (("headway-tiny", "--to=FILE", "--model=chut"), "Which model"),
        (("headway-tiny", "--to=FILE", "--model=chat", "--gateway=http://127.0.0.1:9"), "Is it up"),
        (("none-such", "--to=FILE", "--model=chat"), "none-such"),
    ],
)
def test_what_it_refuses(
    file: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], message: str
) -> None:
    assert main(["gateway", "rollout", *(word.replace("FILE", str(file)) for word in words)]) in (
        1,
        2,
        3,
    )
    assert message in capsys.readouterr().err


def test_a_dry_run_says_the_steps(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["headway-tiny", f"--to={file}", "--model=chat", "--quantize=int4", "--dry-run"]
    assert main(["gateway", "rollout", *words]) == 0
    said = capsys.readouterr().out
    assert [line.split()[0] for line in said.splitlines()] == [
        *("quantize", "gate", "serve", "canary")
    ]
    assert "against http://a/v1" in said and "beside a, b:1" in said


@pytest.mark.parametrize(
    ("status", "verdict"), [(cli.GATE_FAILED, "refused by the gate"), (2, "not evaluated")]
)
def test_a_refused_one_leaves_the_gateway_alone(
    file: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    status: int,
    verdict: str,
) -> None:
    """The gate's status is the command's, and nothing was asked of the gateway."""
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(cli, "verb", lambda *words: asked.append(words) or status)
    options = RolloutOptions(to=str(file), questions=7)
    steps = cli.RolloutRun(options, Path("model"), file, "chat", cli.GatewayClient(options))
    assert steps.run("http://a/v1") == status
    assert f"{verdict}. The gateway was not touched" in capsys.readouterr().out
    (words,) = asked
    assert words[0] == "eval" and {"--gate", "--questions=7"} <= set(words)
    assert not overlay.overlay_path(file).exists()


@pytest.mark.parametrize(("fault", "status"), [("", 0), ("status429", cli.GATE_FAILED)])
async def test_it_follows_until_it_is_promoted_or_back(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    fault: str,
    status: int,
) -> None:
    """Its row is put beside the file, the gateway reads it, and what went back is taken away."""
    monkeypatch.setattr(cli, "verb", lambda *words: 0)
    monkeypatch.setattr(cli, "POLL_S", 0.02)
    today, canary = Stub("a"), await Stub("c", fault=lambda number: fault).start()
    (folder := tmp_path / "new").mkdir()
    (folder / "config.json").write_text("{}")
    file = tmp_path / "gateway.yaml"
    try:
        async with world(today, models=({"name": "tiny"},)) as live:
            row = {"name": "a", "url": today.url, "price": {"output": 1.0}}
            file.write_text(json.dumps({"upstreams": [row], "models": [{"name": "tiny"}]}))
            live.state.reload_config = lambda: read_config(file)
            options = RolloutOptions(
                to=str(file),
                gateway=live.url,
                canary=canary.url,
                steps=[50.0],
                requests=10,
                slo="ttft=600s",
            )
            steps = cli.RolloutRun(options, folder, file, "tiny", cli.GatewayClient(options))
            running = asyncio.create_task(asyncio.to_thread(steps.run, today.url))
            while not running.done():
                assert (await live.chat()).is_complete, "no client notices"
            assert await running == status
            names = {(await live.chat()).headers["x-headway-upstream"] for _ in range(4)}
            assert names == ({"canary-new"} if status == 0 else {"a"})
    finally:
        await canary.stop()
    said = capsys.readouterr().out
    assert ("promoted: new answers all requests" in said) is (status == 0)
    assert overlay.overlay_path(file).exists() is (status == 0)
    if status == 0:
        config = read_config(file)
        assert config.upstreams[1].price == config.upstreams[0].price, "cost is a guard, too"


async def test_a_gateway_that_has_gone_leaves_no_row(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "verb", lambda *words: 0)
    options = RolloutOptions(to=str(file), gateway="http://127.0.0.1:9", canary="http://c/v1")
    steps = cli.RolloutRun(options, file.parent, file, "chat", cli.GatewayClient(options))
    with pytest.raises(HeadwayError, match="cannot be asked"):
        await asyncio.to_thread(steps.run, "http://a/v1")
    assert not overlay.overlay_path(file).exists()
    assert "the current version answers all" in capsys.readouterr().out


@pytest.mark.parametrize("answer", [b"SSH-2.0-OpenSSH_9.6\r\n", HTTP % b"<html>", HTTP % b"[]"])
async def test_what_is_no_gateway_is_told(answer: bytes) -> None:
    with raw_upstream(answer) as other:
        running = cli.GatewayClient(RolloutOptions(gateway=other.url))
        with pytest.raises(HeadwayError, match="cannot be asked"):
            await asyncio.to_thread(running.reload)


async def test_what_the_gateway_refuses_is_told() -> None:
    async with world(Stub("a"), options={"api_key": ["sesame"]}) as live:
        running = cli.GatewayClient(RolloutOptions(gateway=f"{live.url}/v1"))
        with pytest.raises(HeadwayError, match="answered /stats with 401"):
            await asyncio.to_thread(running.stats)
        keyed = cli.GatewayClient(RolloutOptions(gateway=live.url, api_key="sesame"))
        assert (await asyncio.to_thread(keyed.stats))["rollouts"] == []
