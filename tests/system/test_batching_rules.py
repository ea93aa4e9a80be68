"""Dynamic and static batching through a real server: a full batch is answered, the rest waits."""

import signal
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from live_server import LiveServer, wait_until

from conftest import StartServer

BATCH = 4
PROMPTS = [[10, 20, 30 + number] for number in range(BATCH)]
FIELDS: dict[str, Any] = {"model": "tiny", "max_tokens": 12, "temperature": 0}


def ask(live: LiveServer, prompt: list[int]) -> str:
    """One completion through the official client."""
    with openai.OpenAI(base_url=live.url + "/v1", api_key="none", max_retries=0) as client:
        text: str = client.completions.create(prompt=prompt, **FIELDS).choices[0].text
        return text


@pytest.mark.parametrize("rule", ["--batching=dynamic", "--batching=static"])
def test_a_full_batch_is_answered_as_ever(
    server: LiveServer, start_server: StartServer, rule: str
) -> None:
    live = start_server(rule, f"--max-num-seqs={BATCH}").wait_ready()
    with ThreadPoolExecutor(BATCH) as clients:
        answers = list(clients.map(lambda prompt: ask(live, prompt), PROMPTS))
    assert answers == [ask(server, prompt) for prompt in PROMPTS]
    assert live.idle()
    assert ("WARNING" in live.stderr) == ("static" in rule)


def test_one_request_starts_when_its_window_ends(start_server: StartServer) -> None:
    """Nobody else comes; the engine wakes by itself, not at its next idle poll."""
    live = start_server("--batching=dynamic:50ms").wait_ready()
    assert ask(live, PROMPTS[0]) == ask(live, PROMPTS[0])


def test_static_shows_who_waits_and_answers_when_the_server_drains(
    start_server: StartServer,
) -> None:
    live = start_server("--batching=static", f"--max-num-seqs={BATCH}").wait_ready()
    assert f"requests start {BATCH} at a time" in live.stderr
    with ThreadPoolExecutor(2) as clients:
        answers = [clients.submit(ask, live, prompt) for prompt in PROMPTS[:2]]
        wait_until(lambda: live.metric("num_requests_waiting") == 2)
        assert not any(answer.done() for answer in answers)
        live.signal(signal.SIGTERM)
        assert all(answer.result(timeout=60) for answer in answers)
    assert live.wait_end() == 0
