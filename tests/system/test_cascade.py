"""A cascade before real servers: calibrated by the command, asked in each dialect."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from live_gateway import LiveGateway
from live_server import LiveServer, headway

MESSAGES: Any = [{"role": "user", "content": "Tell me of rivers."}]
SHORT: dict[str, Any] = {"temperature": 0, "max_tokens": 12}


@pytest.fixture(scope="module")
def servers(tiny_model: Path) -> Iterator[list[LiveServer]]:
    started = [
        LiveServer(tiny_model, "--kv-memory=32MiB", "--served-model-name=tiny") for _ in range(2)
    ]
    try:
        yield [live.wait_ready() for live in started]
    finally:
        for live in started:
            live.close()


def file_of(servers: list[LiveServer], evidence: str) -> str:
    """The cheap and the dear route are the same model at two prices: all that is cheap is right."""
    cheap, dear = (f"{server.url}/v1" for server in servers)
    return f"""
upstreams:
  - {{name: little, url: '{cheap}', price: {{input: 1, output: 1}}}}
  - {{name: big, url: '{dear}', price: {{input: 10, output: 10}}}}
models:
  - {{name: tiny, upstreams: [big], cascade: {{cheap: small, evidence: '{evidence}'}}}}
  - {{name: small, upstreams: [little]}}
tasks: [{{name: rivers, matches: rivers}}]
"""


def test_what_calibrate_writes_the_gateway_goes_by(
    servers: list[LiveServer], tmp_path: Path
) -> None:
    """The answer of the dear model is the right one; streams of each dialect come from the cheap
    route, as the dear one would have given them."""
    evidence, file = tmp_path / "e.json", tmp_path / "gateway.yaml"
    file.write_text(file_of(servers, str(evidence)))
    with openai.OpenAI(base_url=servers[1].url + "/v1", api_key="x") as direct:
        chat = direct.chat.completions.create(model="tiny", messages=MESSAGES, **SHORT)
        right = chat.choices[0].message.content or ""
    line = {"task": "rivers", "messages": MESSAGES, "answer": right, "max_tokens": 12}
    (tmp_path / "suite.jsonl").write_text(f"{json.dumps(line)}\n" * 80)
    done = headway("gateway", "calibrate", file, f"--suite={tmp_path / 'suite.jsonl'}")
    assert done.returncode == 0 and "rivers" in done.stdout, done.stderr
    told = json.loads(evidence.read_text())
    (task,) = told["tasks"]
    assert task["cheap_right"] == task["dear_right"] == 80, "one model, one answer"
    assert told["fingerprints"]["cheap"] == told["fingerprints"]["dear"] != []
    assert task["use"] is False, "all of it was cut at its length: an answer that is not whole"
    task |= {"use": True, "check": "margin", "least": -1.0, "asked": 80}
    evidence.write_text(json.dumps(told))
    drive(file_of(servers, str(evidence)), right)


def drive(file: str, right: str) -> None:
    """Answers that are cut come from the dear route, and the ledger knows both attempts."""
    gateway = LiveGateway(file=file)
    try:
        with openai.OpenAI(base_url=gateway.url + "/v1", api_key="x", max_retries=0) as client:
            stream = client.chat.completions.create(
                model="tiny", messages=MESSAGES, stream=True, **SHORT
            )
            text = "".join(c.choices[0].delta.content or "" for c in stream if c.choices)
            assert text == right
            rows = gateway.rows("SELECT upstream, outcome FROM attempts ORDER BY number")
            assert rows == [("little", "rejected"), ("big", "ok")]
            raw = client.chat.completions.with_raw_response.create(
                model="tiny", messages=[{"role": "user", "content": "Of hills."}], **SHORT
            )
            assert raw.headers["x-headway-upstream"] == "big", "no evidence, no cheap route"
    finally:
        gateway.close()


def test_each_dialect_is_answered_cheaply(servers: list[LiveServer], tmp_path: Path) -> None:
    """Stop strings end the answers, so that they are whole; a class without a margin."""
    evidence = tmp_path / "e.json"
    task = {"task": "rivers", "asked": 99, "cheap_right": 99, "dear_right": 99, "use": True}
    known = {"model": "tiny", "cheap": "small", "made_at": 4e9, "tolerance": 0.05, "alpha": 0.05}
    evidence.write_text(json.dumps({**known, "tasks": [task]}))
    gateway = LiveGateway(file=file_of(servers, str(evidence)))
    letters: Any = ["a", "e", "i", "o", "u", " "]
    try:
        with openai.OpenAI(base_url=gateway.url + "/v1", api_key="x", max_retries=0) as client:
            for given in ({"stream": True}, {"stream": False}):
                client.completions.create(
                    model="tiny", prompt="of rivers", seed=1, max_tokens=99, **given
                )
            with client.responses.stream(model="tiny", input="of rivers") as events:
                response = events.get_final_response()
            assert response.status in ("completed", "incomplete")
        with (
            anthropic.Anthropic(base_url=gateway.url, api_key="x", max_retries=0) as claude,
            claude.messages.stream(
                model="tiny", max_tokens=200, messages=MESSAGES, stop_sequences=letters[:4]
            ) as stream,
        ):
            message = stream.get_final_message()
        assert message.stop_reason in ("stop_sequence", "end_turn", "max_tokens")
        rows = gateway.rows("SELECT upstream, outcome FROM attempts WHERE number = 1")
        assert len(rows) == 4 and {name for name, _ in rows} == {"little"}
        assert {outcome for _, outcome in rows} <= {"ok", "rejected"}
        assert gateway.rows("SELECT COUNT(*) FROM requests WHERE status = 'ok'") == [(4,)]
    finally:
        gateway.close()
