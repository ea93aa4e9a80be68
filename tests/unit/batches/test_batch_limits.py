"""Lines of batches count for their key: its requests, its tokens, its classes. They wait, not fail.

The clock of the limits is virtual and stands until a test moves it; the rest is real.
"""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from batch_calls import ended, jsonl, line, results, upload, wait_until
from batch_runs import Endpoint, begin, names_of, over, running, until, written
from headway.batches.runner import Runner
from headway.core.clock import VirtualClock
from headway.core.errors import RequestError
from headway.edge.key_file import digest
from headway.edge.keys import Keyring
from in_process import InProcess


def key_file(folder: Path, **rows: str) -> Path:
    path = folder / "keys.yaml"
    path.write_text(
        "keys:\n"
        + "".join(
            f"  - {{name: {name}, sha256: {digest(name).hex()}, {more}}}\n"
            for name, more in rows.items()
        )
    )
    return path


def limited(runner: Runner, folder: Path, **limits: int) -> VirtualClock:
    """Give the runner's server one key, `me`, with these limits; their clock."""
    clock = VirtualClock()
    text = ", ".join(f"{name}: {value}" for name, value in limits.items())
    runner.state.keyring = Keyring(
        file=key_file(folder, me=f"limits: {{{text}}}", other="admin: false"), clock=clock
    )
    return clock


async def rested(runner: Runner, endpoint: Endpoint, least: int) -> int:
    """How many lines were asked, at least so many, once none runs and their owner rests."""
    await until(
        lambda: endpoint.asked.total() >= least and not runner.lane.busy and "me" in runner._rests
    )
    return endpoint.asked.total()


async def test_lines_are_requests_of_their_key(tmp_path: Path) -> None:
    """480 a minute: 240 lines at once, then 8 a second; another's batch is not held up."""
    endpoint = Endpoint()
    async with running(tmp_path / "d", endpoint, batch_concurrency=8) as runner:
        clock = limited(runner, tmp_path, requests_per_minute=480)
        mine = await begin(runner, names_of(280, "mine"))
        assert await rested(runner, endpoint, 240) == 240
        others = await over(runner, await begin(runner, names_of(20, "other"), owner="other"))
        assert others.request_counts.completed == 20 and endpoint.asked.total() == 260
        clock.advance(1)
        assert await rested(runner, endpoint, 268) == 268
        clock.advance(60)
        batch = await over(runner, mine)
        assert (batch.status, batch.request_counts.completed) == ("completed", 280)
    assert max(endpoint.asked.values()) == 1, "a line that waits is not asked in vain"


async def test_a_timer_that_is_early_ends_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Timers of some loops are a millisecond early; a batch must not stop for ever then."""
    loop = asyncio.get_running_loop()
    later = loop.call_later
    monkeypatch.setattr(
        loop, "call_later", lambda delay, *call: later(max(0.0, delay - 0.005), *call)
    )
    async with running(tmp_path / "d", Endpoint()) as runner:
        clock = limited(runner, tmp_path, requests_per_minute=480)
        batch_id = await begin(runner, names_of(250))
        await until(lambda: runner._rests)
        clock.advance(60)
        assert (await over(runner, batch_id)).request_counts.completed == 250


async def test_as_many_lines_run_at_once_as_the_key_may_less_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where one has ended the next begins: no timer ends a rest here, until the last part."""
    monkeypatch.setattr("headway.batches.runner.MIN_REST_S", 3600.0)
    endpoint = Endpoint()
    async with running(tmp_path / "d", endpoint, batch_concurrency=8) as runner:
        limited(runner, tmp_path, requests_at_once=3)
        endpoint.gate.clear()
        batch_id = await begin(runner, names_of(30))
        await until(lambda: endpoint.running >= 2 and "me" in runner._rests)
        endpoint.gate.set()
        batch = await over(runner, batch_id)
        assert batch.request_counts.completed == 30 and endpoint.most == 2
        owner = runner.state.keyring.named("me")
        assert owner is not None and owner.meter.num_running == 0
        for _ in range(3):
            owner.meter.enter()
        endpoint.asked.clear()
        monkeypatch.undo()
        waiting = await begin(runner, names_of(3))
        assert await rested(runner, endpoint, 0) == 0
        owner.meter.leave()
        owner.meter.leave()
        assert (await over(runner, waiting)).request_counts.completed == 3


async def test_a_line_that_meets_a_limit_goes_back_and_costs_nothing(tmp_path: Path) -> None:
    """The endpoint refuses every line once, as it does for tokens; each is answered in the end."""
    told: set[str] = set()

    def rule(name: str) -> None:
        if name not in told:
            told.add(name)
            raise RequestError("Later.", code="rate_limit_exceeded", status=429, retry_after_s=0.01)

    endpoint = Endpoint(rule)
    async with running(tmp_path / "d", endpoint, batch_concurrency=4) as runner:
        limited(runner, tmp_path, requests_per_minute=1000)
        batch = await over(runner, await begin(runner, names_of(20)))
        assert (batch.request_counts.completed, batch.request_counts.failed) == (20, 0)
        assert list(written(runner, batch.output_file_id)) == names_of(20)
        owner = runner.state.keyring.named("me")
        assert owner is not None and owner.meter.requests is not None
        assert owner.meter.requests.available == 980, "what was refused does not count"


async def test_a_batch_waits_for_a_key_that_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headway.batches.runner.MISSING_KEY_RETRY_S", 0.05)
    endpoint = Endpoint()
    async with running(tmp_path / "d", endpoint) as runner:
        runner.state.keyring = Keyring(file=key_file(tmp_path, other="admin: false"))
        batch_id = await begin(runner, names_of(3))
        assert await rested(runner, endpoint, 0) == 0
        key_file(tmp_path, me="admin: false")
        runner.state.keyring.reload()
        assert (await over(runner, batch_id)).request_counts.completed == 3


# ── over HTTP, through the real endpoints ───────────────────────────────────────────────────


TOKENS = 6000


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InProcess]:
    folder = tmp_path_factory.mktemp("limits")
    path = key_file(
        folder,
        few=f"limits: {{tokens_per_minute: {TOKENS}}}",
        plain="admin: false",
        more="classes: [batch, interactive]",
        ops="admin: true",
    )
    opened = InProcess(folder / "data", key_file=str(path))
    try:
        yield opened
    finally:
        opened.close()


def client_of(live: InProcess, key: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=live.url + "/v1", api_key=key, max_retries=0)


def run(client: openai.OpenAI, lines: list[Any]) -> str:
    return client.batches.create(
        input_file_id=upload(client, jsonl(lines)),
        endpoint="/v1/completions",
        completion_window="24h",
    ).id


def test_lines_take_tokens_of_their_key_and_one_that_never_fits_fails(live: InProcess) -> None:
    """With the clock still, lines take half of the tokens; the key's own request is served."""
    clock = VirtualClock()
    live.state.keyring.clock = clock
    live.state.keyring.callers = []
    live.state.keyring.reload()
    meter = live.state.keyring.named("few").meter
    lines = [line(f"{i}", max_tokens=60, ignore_eos=True) for i in range(60)]
    never = [line("never", max_tokens=400, ignore_eos=True, n=16)]
    with client_of(live, "few") as client:
        batch_id = run(client, lines + never)
        wait_until(lambda: "few" in live.runner._rests and meter.num_running == 0)
        used = client.batches.retrieve(batch_id).usage.total_tokens
        assert 0 < used <= TOKENS / 2 <= meter.tokens.available
        told = client.completions.create(model="tiny", prompt="Tell me", max_tokens=500)
        assert told.usage is not None, "the key's own request finds the other half"
        while client.batches.retrieve(batch_id).status != "completed":
            clock.advance(10)
            time.sleep(0.05)
        batch = ended(client, batch_id)
        assert (batch.request_counts.completed, batch.request_counts.failed) == (60, 1)
        (error,) = results(client, batch.error_file_id).values()
    body = error["response"]["body"]["error"]
    assert error["custom_id"] == "never" and body["code"] == "tokens_per_minute_exceeded"
    assert str(TOKENS) in body["message"] and body["param"] == "max_tokens"


@pytest.mark.parametrize(
    ("key", "refused"),
    [("plain", {"class", "tier"}), ("more", {"default"}), ("ops", set())],
)
def test_a_batch_is_of_its_class_unless_the_key_may_more(
    live: InProcess, key: str, refused: set[str]
) -> None:
    """A key's row names the classes that its batches may use; the operator's may use all."""
    lines = [
        line("none"),
        line("auto", service_tier="auto"),
        line("flex", service_tier="flex"),
        line("class", service_class="interactive"),
        line("tier", service_tier="priority"),
    ]
    if key == "more":
        lines.append(line("default", service_class="default"))
    with client_of(live, key) as client:
        batch = ended(client, run(client, lines))
        errors = results(client, batch.error_file_id)
        assert errors.keys() == refused
        for name, error in errors.items():
            body = error["response"]["body"]["error"]
            assert (error["response"]["status_code"], body["code"]) == (403, "permission_denied")
            assert body["param"] == ("service_tier" if name == "tier" else "service_class")


def test_a_request_names_a_class_that_its_key_may_use(live: InProcess) -> None:
    def ask(key: str, **extra: Any) -> int:
        with client_of(live, key) as client:
            try:
                client.completions.create(
                    model="tiny", prompt="Hi", max_tokens=1, extra_body=extra or None
                )
            except openai.APIStatusError as error:
                return error.status_code if error.code == "permission_denied" else 0
        return 200

    assert ask("more") == ask("more", service_class="interactive") == 200
    assert ask("more", service_class="standard") == ask("more", service_tier="default") == 403
    assert ask("more", service_tier="auto") == ask("plain", service_class="standard") == 200
