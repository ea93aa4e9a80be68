"""A gateway before two real servers, driven by the official clients; one of them is killed."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from live_gateway import LiveGateway
from live_server import LiveServer, clean_environment, wait_until

MESSAGES: Any = [{"role": "user", "content": "Tell me of rivers."}]
LONG: dict[str, Any] = {"temperature": 1.0, "seed": 3, "max_tokens": 60}


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


@pytest.fixture(scope="module")
def live(servers: list[LiveServer]) -> Iterator[LiveGateway]:
    gateway = LiveGateway(*(server.url for server in servers))
    try:
        yield gateway
    finally:
        gateway.close()


@pytest.fixture
def client(live: LiveGateway) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=live.url + "/v1", api_key="none", max_retries=0) as opened:
        yield opened


def texts_of(stream: Any) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)


def test_the_official_clients_ask_the_gateway_as_a_server(
    live: LiveGateway, servers: list[LiveServer], client: openai.OpenAI
) -> None:
    assert [card.id for card in client.models.list()] == ["tiny"]
    direct = openai.OpenAI(base_url=servers[0].url + "/v1", api_key="none", max_retries=0)
    with direct:
        for asked in (direct, client):
            chat = asked.chat.completions.create(model="tiny", messages=MESSAGES, **LONG)
            plain = asked.completions.create(model="tiny", prompt="Once", **LONG)
            whole = asked.responses.create(model="tiny", input="Once", max_output_tokens=9)
            found = (
                *(chat.choices[0].message.content, chat.usage.prompt_tokens),  # type: ignore[union-attr]
                *(plain.choices[0].text, plain.choices[0].finish_reason, whole.status),
            )
            if asked is direct:
                expected = found
    assert found == expected
    assert client.responses.retrieve(whole.id).id == whole.id
    onward = client.responses.create(
        model="tiny", input="more", previous_response_id=whole.id, max_output_tokens=4
    )
    assert onward.previous_response_id == whole.id
    with anthropic.Anthropic(base_url=live.url, api_key="none", max_retries=0) as claude:
        message = claude.messages.create(model="tiny", max_tokens=12, messages=MESSAGES)
        counted = claude.messages.count_tokens(model="tiny", messages=MESSAGES)
        assert message.usage.output_tokens == 12 and counted.input_tokens > 3
        with claude.messages.stream(model="tiny", max_tokens=12, messages=MESSAGES) as stream:
            assert stream.get_final_message().usage.output_tokens == 12
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=9)


def test_a_killed_server_costs_no_stream_a_token(
    tiny_model: Path, servers: list[LiveServer]
) -> None:
    """Seeded streams at a server that is killed go on at the other, token for token."""
    victim = LiveServer(tiny_model, "--kv-memory=32MiB", "--served-model-name=tiny").wait_ready()
    gateway = LiveGateway(victim.url, servers[0].url)
    try:
        with openai.OpenAI(base_url=gateway.url + "/v1", api_key="x", max_retries=0) as client:
            extra = {"ignore_eos": True}

            def ask(seed: int) -> str:
                asked: dict[str, Any] = {
                    **{"model": "tiny", "seed": seed, "max_tokens": 400},
                    **{"stream": True, "extra_body": extra},
                }
                if seed % 2:
                    plain = client.completions.create(prompt="Tell me of rivers.", **asked)
                    chunks = [chunk for chunk in plain if chunk.choices]
                    assert len({chunk.id for chunk in chunks}) == 1
                    return "".join(chunk.choices[0].text for chunk in chunks)
                return texts_of(client.chat.completions.create(messages=MESSAGES, **asked))

            expected = [ask(seed) for seed in range(6)]
            found: dict[int, str] = {}
            threads = [
                threading.Thread(target=lambda seed=seed: found.update({seed: ask(seed)}))
                for seed in range(6)
            ]
            told = victim.metric("generation_tokens_total")
            for thread in threads:
                thread.start()
            wait_until(lambda: victim.metric("generation_tokens_total") > told)
            victim.process.kill()
            for thread in threads:
                thread.join()
        assert [found[seed] for seed in range(6)] == expected
        assert gateway.rows("SELECT COUNT(*) FROM requests WHERE status = 'ok'") == [(12,)]
        broken = (
            "SELECT COUNT(*), TOTAL(estimated) FROM attempts "
            "WHERE outcome = 'reset' AND output_tokens > 0"
        )
        ((count, estimated),) = gateway.rows(broken)
        assert count > 0 and not estimated, "what was shown is known to the token"
        sums = gateway.rows("SELECT SUM(output_tokens), SUM(estimated) FROM requests")
        assert sums == [(12 * 400, 0)]
    finally:
        gateway.close()
        victim.close()


def test_a_server_that_drains_costs_no_request(tiny_model: Path, servers: list[LiveServer]) -> None:
    """It ends what it began and refuses what comes: each round has more requests than might be
    tried again, and all are answered, until it is gone and once more."""
    flags = ("--kv-memory=32MiB", "--served-model-name=tiny", "--drain-timeout=60")
    victim = LiveServer(tiny_model, *flags).wait_ready()
    gateway = LiveGateway(victim.url, servers[0].url)
    try:
        with (
            openai.OpenAI(base_url=victim.url + "/v1", api_key="x", max_retries=0) as direct,
            openai.OpenAI(base_url=gateway.url + "/v1", api_key="x", max_retries=0) as client,
            ThreadPoolExecutor(32) as pool,
        ):

            def ask(asked: openai.OpenAI, count: int) -> str:
                stream = asked.chat.completions.create(
                    model="tiny",
                    messages=MESSAGES,
                    max_tokens=count,
                    seed=1,
                    stream=True,
                    extra_body={"ignore_eos": True},
                )
                return texts_of(stream)

            expected = ask(client, 8)
            told = victim.metric("generation_tokens_total")
            running = pool.submit(ask, direct, 400)
            wait_until(lambda: victim.metric("generation_tokens_total") > told)
            victim.process.send_signal(signal.SIGTERM)
            is_over = False
            while not is_over:
                is_over = victim.process.poll() is not None
                asked = [pool.submit(ask, client, 8) for _ in range(24)]
                assert {each.result() for each in asked} == {expected}
            assert running.result(), "what it began"
    finally:
        gateway.close()
        victim.close()


def test_the_ledger_survives_a_kill_of_the_gateway(servers: list[LiveServer]) -> None:
    """What clients have seen complete is there to the token; what was cut is told as cut."""
    gateway = LiveGateway(*(server.url for server in servers))
    data, again = gateway.temp / "data", None
    complete: list[int] = []
    try:
        with openai.OpenAI(base_url=gateway.url + "/v1", api_key="x", max_retries=0) as client:

            def ask() -> None:
                with contextlib.suppress(openai.OpenAIError):
                    while True:
                        done = client.chat.completions.create(
                            model="tiny", messages=MESSAGES, max_tokens=20
                        )
                        complete.append(done.usage.completion_tokens)  # type: ignore[union-attr]

            threads = [threading.Thread(target=ask) for _ in range(4)]
            for thread in threads:
                thread.start()
            wait_until(lambda: len(complete) >= 12)
            gateway.process.kill()
            for thread in threads:
                thread.join()
        gateway.process.wait()
        again = LiveGateway(servers[0].url, env={"HEADWAY_DATA_DIR": str(data)})
        sums = "SELECT COUNT(*), SUM(output_tokens) FROM requests WHERE status = 'ok'"
        ((count, tokens),) = gateway.rows(sums)
        # an answer may be written and not yet be with its client, one a thread
        assert len(complete) <= count <= len(complete) + 4
        assert sum(complete) <= tokens <= sum(complete) + 4 * 20
        cut = gateway.rows("SELECT estimated FROM requests WHERE status != 'ok'")
        assert set(cut) <= {(1,)} and len(cut) + count <= len(complete) + 8
    finally:
        if again is not None:
            again.close()
        gateway.close()


@pytest.mark.parametrize("good", [True, False])
def test_a_canary_is_promoted_or_goes_back(servers: list[LiveServer], good: bool) -> None:
    """Two real servers; the bad version is one that does not serve the model it is asked for."""
    file = f"""
upstreams:
  - {{name: today, url: '{servers[0].url}/v1'}}
  - {{name: new, url: '{servers[1].url}/v1', model: {"tiny" if good else "another"}}}
models: [{{name: tiny}}]
rollouts:
  - {{name: r, model: tiny, canary: [new], steps: [50], requests: 20, slo: 'e2e=600s'}}
"""
    gateway = LiveGateway(file=file)
    changes = "SELECT state, reason FROM rollouts ORDER BY rowid DESC LIMIT 1"
    try:
        with openai.OpenAI(base_url=gateway.url + "/v1", api_key="x", max_retries=0) as client:
            for _ in range(300):
                stream = client.chat.completions.create(
                    model="tiny", messages=MESSAGES, max_tokens=2, stream=True
                )
                assert list(stream)[-1].choices[0].finish_reason == "length", "no client notices"
                if gateway.rows(changes):
                    break
        ((state, reason),) = gateway.rows(changes)
        assert state == ("promoted" if good else "rolled back"), reason
        ((tries,),) = gateway.rows("SELECT COUNT(*) FROM attempts WHERE upstream = 'new'")
        assert good or tries <= 30
    finally:
        gateway.close()


def test_it_starts_without_torch_and_while_nobody_is_there() -> None:
    began_s = time.monotonic()
    gateway = LiveGateway("http://127.0.0.1:9", real=True)
    try:
        maps = Path(f"/proc/{gateway.process.pid}/maps").read_text()
        assert "torch" not in maps and "tokenizers" not in maps
        assert time.monotonic() - began_s < 60
        with openai.OpenAI(base_url=gateway.url + "/v1", api_key="x", max_retries=0) as client:
            with pytest.raises(openai.APIStatusError) as raised:
                client.chat.completions.create(model="tiny", messages=MESSAGES)
            assert raised.value.status_code in (404, 502, 503)
        os.kill(gateway.process.pid, signal.SIGHUP)
    finally:
        gateway.close()


def test_a_second_gateway_on_one_ledger_is_refused_by_name(
    live: LiveGateway, servers: list[LiveServer]
) -> None:
    """The first goes on, and no row of it is lost."""
    folder = live.temp / "data"
    before = live.rows("SELECT COUNT(*) FROM requests")[0][0]
    command = [sys.executable, "-m", "headway.cli.main", "gateway", "--port=0"]
    command += [f"--upstream={servers[0].url}", f"--data-dir={folder}"]
    second = subprocess.run(
        command, capture_output=True, text=True, timeout=60, env=clean_environment()
    )
    assert second.returncode == 1 and "ready" not in second.stdout
    assert f"{folder / 'gateway'}" in second.stderr and "--data-dir" in second.stderr
    assert "Traceback" not in second.stderr
    with openai.OpenAI(base_url=live.url + "/v1", api_key="none", max_retries=0) as client:
        client.completions.create(model="tiny", prompt="Once", max_tokens=2)
    assert live.rows("SELECT COUNT(*) FROM requests") == [(before + 1,)]
