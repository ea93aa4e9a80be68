"""The live page in a real browser, on a real server: chat, figures, states, keyboard, phone."""

import asyncio
import contextlib
import json
import os
import re
import signal
import statistics
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from browser import PATIENCE_MS, OpenPage, Visit, chromium, visits
from live_server import NO_TORCH, LiveServer
from scripted import ScriptedServer, scripted
from tool_scripts import HERMES

import headway
from headway.evals.skills.suite import SKILLS
from headway.server.page import FILES, PATHS

pytestmark = pytest.mark.asyncio(loop_scope="module")

EMBEDDED = Path(headway.__file__).parent / "embedded" / "headway-tiny"
FLAGS = (
    "--kv-memory=32MiB",
    "--price-per-hour=0.2",
    "--slo=ttft=20s,tpot=2s",
    "--slo=interactive:ttft=300ms,tpot=50ms",
)
PHONE = {"width": 360, "height": 740}
TICK_MS = 10.0
DONE = "TTFT .* tokens? in "
"""What stands under a whole answer; its speed too, where it has more than one token."""


@pytest.fixture(scope="module")
def embedded() -> Iterator[LiveServer]:
    """The model that comes along, with a price and two classes."""
    live = LiveServer(EMBEDDED, *FLAGS)
    try:
        yield live.wait_ready()
    finally:
        live.close()


@pytest.fixture(scope="module")
def slow() -> Iterator[LiveServer]:
    """A server whose steps take 10 ms and whose answers are nonsense as long as the context."""
    live = LiveServer(EMBEDDED, NO_TORCH, "--kv-memory=32MiB", "--api-key=sesame")
    try:
        yield live.wait_ready()
    finally:
        live.close()


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedServer]:
    """A server whose model writes down its reasoning first."""
    with scripted(tmp_path_factory.mktemp("thinking") / "hermes", HERMES) as server:
        yield server


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Any]:
    async with chromium() as found:
        yield found


@pytest_asyncio.fixture(loop_scope="module")
async def visit(browser: Any) -> AsyncIterator[OpenPage]:
    async with visits(browser) as open_page:
        yield open_page


@contextlib.asynccontextmanager
async def load(url: str, streams: int = 4) -> AsyncIterator[None]:
    """Keep `streams` answers running, each followed by another, until the block ends."""

    async def keep_asking(session: aiohttp.ClientSession, number: int) -> None:
        body = {
            "model": "headway-tiny",
            "messages": [{"role": "user", "content": "Tell me of the sea. " * (5 + 6 * number)}],
            "stream": True,
            "max_tokens": 150 + 30 * number,
            "ignore_eos": True,
            "service_class": "interactive" if number % 2 else "default",
        }
        while True:
            async with session.post("/v1/chat/completions", json=body) as answer:
                assert answer.status == 200, await answer.text()
                async for _ in answer.content:
                    pass

    async with aiohttp.ClientSession(url) as session:
        tasks = [asyncio.create_task(keep_asking(session, i)) for i in range(streams)]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            ends = await asyncio.gather(*tasks, return_exceptions=True)
            assert all(isinstance(end, asyncio.CancelledError) for end in ends), ends


async def ask(one: Visit, text: str) -> None:
    await one.page.fill("#chat-input", text)
    await one.page.press("#chat-input", "Enter")


async def set_option(one: Visit, name: str, value: str) -> None:
    await one.page.click("#chat-options summary")
    await one.page.fill(f"#chat-{name}", value)


def answer_of(turn: int) -> str:
    """The selector of the page's n-th answer."""
    return f".turn.assistant:nth-of-type({2 * turn})"


# ── doors ───────────────────────────────────────────────────────────────────────────────────


async def test_files_are_public_and_nothing_else_is(slow: LiveServer) -> None:
    async with aiohttp.ClientSession(slow.url) as session:
        for path in PATHS:
            async with session.get(path) as answer:
                assert answer.status == 200 and await answer.read(), path
                policy = answer.headers["content-security-policy"]
                assert "default-src 'none'" in policy and "unsafe" not in policy
                assert answer.headers["x-content-type-options"] == "nosniff"
                tag = answer.headers["etag"]
            async with session.get(path, headers={"if-none-match": tag}) as again:
                assert again.status == 304 and not await again.read()
        for path in (
            "/stats",
            "/metrics",
            "/v1/models",
            "/page",
            "/page/",
            "/page/x.js",
            "/page//",
        ):
            async with session.get(path) as answer:
                assert answer.status == 401, path
        async with session.post("/", headers={"authorization": "Bearer sesame"}) as answer:
            assert answer.status == 405


async def test_the_files_hold_nothing_inline_and_nothing_from_elsewhere() -> None:
    html = next(file for file in FILES if file.name == "index.html").read_text()
    assert not re.search(r"<style|<script(?![^>]*src=)|\son\w+=|\sstyle=|javascript:", html)
    for file in FILES:
        text = file.read_text().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"(https?:)?//[a-z]", text.replace("// ", "")), file.name
        if file.suffix == ".js":
            assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval", text)


# ── chat ────────────────────────────────────────────────────────────────────────────────────


async def test_a_chat_is_typed_and_answered(embedded: LiveServer, visit: OpenPage) -> None:
    one = await visit(embedded.url)
    await one.wait_text("#status-text", "^ready$")
    await set_option(one, "temperature", "0")
    await ask(one, "What is 2 + 3?")
    await one.wait_text(answer_of(1) + " .after", DONE)
    assert await one.text(answer_of(1) + " .said") == "2 + 3 = 5."
    await ask(one, "What is 4 + 4?")
    await one.wait_text(answer_of(2) + " .after", DONE)
    assert await one.text(answer_of(2) + " .said") == "4 + 4 = 8."
    await one.wait_text('[data-figure="usd-total"]', r"\$0\.")
    await one.page.click("#chat-clear")
    assert await one.page.locator(".turn").count() == 0


async def test_each_skill_has_an_example_for_the_box(embedded: LiveServer, visit: OpenPage) -> None:
    one = await visit(embedded.url)
    await one.wait_text("#status-text", "^ready$")
    chips = one.page.locator("#chat-examples button")
    assert await chips.all_inner_texts() == list(SKILLS)
    filled = set()
    for name in SKILLS:
        await one.page.get_by_role("button", name=name, exact=True).click()
        filled.add(await one.page.input_value("#chat-input"))
    assert len(filled) == len(SKILLS)
    await set_option(one, "temperature", "0")
    for turn, (name, said) in enumerate({"recall": "white", "tool": "get_weather"}.items(), 1):
        if turn > 1:
            await one.page.click("#chat-clear")
        await one.page.get_by_role("button", name=name, exact=True).click()
        await one.page.press("#chat-input", "Enter")
        await one.wait_text(answer_of(1) + " .after", DONE)
        assert said in (await one.text(answer_of(1) + " .said")).lower()
        if name == "recall":
            await one.wait_js(
                "document.querySelector('#chat-input').value === 'What is my favourite colour?'"
            )


async def test_another_model_has_no_examples(slow: LiveServer, visit: OpenPage) -> None:
    async def renamed(page: Any) -> None:
        async def change(route: Any) -> None:
            answer = await route.fetch()
            cards = await answer.json()
            cards["data"][0] |= {"id": "other", "root": "other"}
            await route.fulfill(response=answer, json=cards)

        async def stats(route: Any) -> None:
            await route.fulfill(response=await route.fetch(url=slow.url + "/stats"))

        await keyed(page)
        await page.route("**/v1/models", change)
        await page.route("**/stats*", stats)

    one = await visit(slow.url, prepare=renamed)
    await one.wait_text("#status-text", "^ready$")
    assert not await one.page.locator("#chat-examples").is_visible()


async def test_reasoning_is_shown_apart_from_the_answer(
    thinking: ScriptedServer, visit: OpenPage
) -> None:
    one = await visit(thinking.url)
    await one.wait_text("#status-text", "^ready$")
    thinking.says("<think>\nTwo <b>and</b> three.\n</think>\n\nFive.", "Six.")
    await ask(one, "What is 2 + 3?")
    await one.wait_text(answer_of(1) + " .after", DONE)
    assert await one.text(answer_of(1) + " .said") == "Five."
    assert await one.page.locator(answer_of(1) + " .thinking").is_hidden()
    await one.page.click(answer_of(1) + " .thought summary")
    assert await one.text(answer_of(1) + " .thinking") == "Two <b>and</b> three."
    await ask(one, "And 3 + 3?")
    await one.wait_text(answer_of(2) + " .after", DONE)
    assert await one.text(answer_of(2) + " .said") == "Six."
    assert await one.page.locator(answer_of(2) + " .thought").count() == 0


async def test_a_speed_is_what_the_reader_saw_from_sending_to_the_last_text(
    thinking: ScriptedServer, visit: OpenPage
) -> None:
    one = await visit(thinking.url)
    await one.wait_text("#status-text", "^ready$")
    thinking.says("Six. " * 200)
    await ask(one, "Say it often.")
    after = await one.wait_text(answer_of(1) + " .after", r"TTFT .* tokens in .*, .* tok/s")
    numbers = [float(number.replace(",", "")) for number in re.findall(r"[\d.,]*\d", after)]
    units = re.findall(r"(ms|s)\b(?!\w)", after)
    ttft_s = numbers[0] / (1e3 if units[0] == "ms" else 1)
    assert numbers[-1] <= numbers[1] / ttft_s * 1.01, "faster than the reader saw it"


async def test_a_model_without_a_template_continues_text(
    embedded: LiveServer, visit: OpenPage
) -> None:
    async def only_text(page: Any) -> None:
        async def change(route: Any) -> None:
            answer = await route.fetch()
            cards = await answer.json()
            cards["data"][0]["accepts"] = ["text", "token_ids"]
            await route.fulfill(response=answer, json=cards)

        await page.route("**/v1/models", change)

    one = await visit(embedded.url, prepare=only_text)
    await one.wait_text("#chat-hint", "no chat template")
    asked: list[str] = []
    one.page.on("request", lambda request: asked.append(request.url))
    await set_option(one, "max", "5")
    await ask(one, "Once upon a time")
    await one.wait_text(answer_of(1) + " .after", "5 tokens")
    assert embedded.url + "/v1/completions" in asked


async def test_what_a_model_says_is_text(embedded: LiveServer, visit: OpenPage) -> None:
    evil = "<img src=x onerror=alert(1)><script>alert(2)</script>"

    async def answer(route: Any) -> None:
        piece = {"choices": [{"index": 0, "delta": {"content": evil}}]}
        body = f"data: {json.dumps(piece)}\n\ndata: [DONE]\n\n"
        await route.fulfill(content_type="text/event-stream", body=body)

    one = await visit(
        embedded.url, prepare=lambda page: page.route("**/v1/chat/completions", answer)
    )
    await one.wait_text("#status-text", "^ready$")
    await ask(one, evil)
    await one.wait_text(answer_of(1) + " .after", "TTFT")
    assert await one.page.locator(".said").all_inner_texts() == [evil, evil]
    assert await one.page.locator(".said *").count() == 0


async def test_errors_are_said_in_the_servers_words(embedded: LiveServer, visit: OpenPage) -> None:
    one = await visit(embedded.url, refusals=True)
    await one.wait_text("#status-text", "^ready$")
    await set_option(one, "max", "99999")
    await ask(one, "Hello")
    said = await one.wait_text(".turn .error", "context_length_exceeded")
    assert "4096" in said.replace(",", "")
    await one.page.fill("#chat-max", "")
    await ask(one, "Hello")
    await one.wait_text(".turn:last-of-type .after", DONE)


# ── figures ─────────────────────────────────────────────────────────────────────────────────


async def test_charts_move_under_load(embedded: LiveServer, visit: OpenPage) -> None:
    one = await visit(embedded.url)
    await one.wait_text("#status-text", "^ready$")
    points = "document.querySelectorAll('#chart-tokens .line')[0].getAttribute('d').split('L')"
    async with load(embedded.url):
        await one.wait_js("document.querySelectorAll('#requests tr').length >= 2")
        await one.wait_js(f"{points}.length >= 3")
        shape = await one.page.evaluate(f"{points}.join()")
        await one.wait_js(f"{points}.join() !== argument", shape)
        for figure in ("output", "input", "arrivals", "finished", "step", "busy"):
            await one.wait_js(
                "parseFloat(document.querySelector(`[data-figure=${argument}]`).textContent) > 0",
                figure,
            )
        await one.wait_js("document.querySelector('#timeline .bars.decode').getAttribute('d')")
        await one.wait_text("#percentiles", r"TTFT.*\s(ms|s).*TPOT")
        await one.wait_text("#classes", "default.*interactive.*TTFT ≤ 300.ms")
        await one.wait_text("#groups", "[1-9][0-9]* of .*blocks")
        await one.wait_text(
            "#verdict-head", "-bound: |Under-loaded: |Cores in use by others: |No verdict"
        )
        await one.wait_text("#parts-list", "forward")
        await one.wait_js(
            "document.querySelector('#roofline .spot').getAttribute('visibility') !== 'hidden'"
        )
    await one.wait_js("document.querySelectorAll('#requests tr').length === 0")
    await one.wait_text("#requests-note", "None runs")


async def test_figures_follow_the_window(embedded: LiveServer, visit: OpenPage) -> None:
    async def three(page: Any) -> None:
        async def change(route: Any) -> None:
            answer = await route.fetch()
            stats = await answer.json()
            for i, window in enumerate(stats["windows"]):
                window["goodput_per_s"] = 11.0 + i
            await route.fulfill(response=answer, json=stats)

        await page.route("**/stats*", change)

    one = await visit(embedded.url, prepare=three)
    await one.wait_text('[data-figure="goodput"]', "^12req/s$")
    await one.page.get_by_role("radio", name="5 min").check()
    await one.wait_text('[data-figure="goodput"]', "^13req/s$")


def crowd(number: int) -> list[dict[str, Any]]:
    """256 requests as they are at the `number`-th tick: the oldest ends, one joins, all age."""
    return [
        {
            "id": f"chatcmpl-{i:032x}",
            "class": ("default", "interactive")[i % 2],
            "age_s": 300.0 - i + number,
            "state": ("decode", "decode", "prefill", "waiting")[i % 4],
            "num_sequences": 1,
            "prompt_tokens": 100 + i,
            "cached_tokens": i,
            "computed_tokens": 100 + i + number,
            "generated_tokens": number * 20 + i,
            "ttft_s": 0.1 + i / 1000,
            "num_preemptions": i % 3,
        }
        for i in range(number, number + 256)
    ]


async def open_crowded(url: str, visit: OpenPage) -> Visit:
    """The page of a server that claims 256 requests, with all of its 200 steps."""
    number = 0

    async def change(route: Any) -> None:
        nonlocal number
        number += 1
        answer = await route.fetch()
        stats = await answer.json()
        stats["now"] |= {"requests": crowd(number), "num_requests": 256, "num_running": 200}
        stats["steps"] = [
            [i, stats["now_s"] - 4 + i / 50, 0.019, i % 7 * 60, 200, 200, 56, 0.9]
            for i in range(200)
        ]
        await route.fulfill(response=answer, json=stats)

    one = await visit(url, prepare=lambda page: page.route("**/stats*", change))
    await wait_ticks(one, 6)
    return one


async def ticks_of(one: Visit) -> list[float]:
    """How long the script of each tick took, in ms."""
    found: list[float] = await one.page.evaluate(
        "import('/page/main.js').then((module) => module.ticks)"
    )
    return found


async def wait_ticks(one: Visit, count: int) -> None:
    async with asyncio.timeout(PATIENCE_MS / 1e3 + 2 * count):
        while len(await ticks_of(one)) < count:
            await asyncio.sleep(0.1)


async def tick_ms(one: Visit) -> float:
    """The median of a page's ticks, its first one left out."""
    return statistics.median((await ticks_of(one))[1:])


async def test_256_requests_are_shown_each_tick(embedded: LiveServer, visit: OpenPage) -> None:
    one = await open_crowded(embedded.url, visit)
    assert await one.page.locator("#requests tr").count() == 256
    await one.wait_text("#requests-note", "256 requests: 200 sequences run")
    first = await one.text("#requests td:nth-child(9)")
    await one.wait_js(
        "document.querySelector('#requests td:nth-child(9)').textContent !== argument", first
    )
    assert await tick_ms(one) < 10 * TICK_MS


@pytest.mark.hardening
async def test_a_tick_with_256_requests_takes_10_ms(embedded: LiveServer, visit: OpenPage) -> None:
    one = await open_crowded(embedded.url, visit)
    await wait_ticks(one, 20)
    assert await tick_ms(one) < TICK_MS


async def test_a_selector_where_several_models_are_served(
    embedded: LiveServer, visit: OpenPage
) -> None:
    asked: list[str] = []

    async def two(page: Any) -> None:
        async def models(route: Any) -> None:
            answer = await route.fetch()
            cards = await answer.json()
            cards["data"].append({**cards["data"][0], "id": "second", "root": "second"})
            await route.fulfill(response=answer, json=cards)

        async def stats(route: Any) -> None:
            asked.append(route.request.url.rpartition("=")[2])
            await route.fulfill(response=await route.fetch(url=embedded.url + "/stats"))

        await page.route("**/v1/models", models)
        await page.route("**/stats*", stats)

    one = await visit(embedded.url, prepare=two)
    await one.page.get_by_role("combobox", name="Model").select_option("second")
    await one.wait_text("#status-text", "^ready$")
    while asked[-1] != "second":
        await asyncio.sleep(0.05)
    assert asked[0] == "headway-tiny"


async def keyed(page: Any) -> None:
    """The key as a visitor of earlier has it."""
    await page.add_init_script("sessionStorage.setItem('headway-key', 'sesame')")


async def test_charts_know_the_past(embedded: LiveServer, visit: OpenPage) -> None:
    """Seconds that passed before the page was opened are in its lines at its first tick."""
    lengths: list[int] = []

    async def kept(page: Any) -> None:
        async def look(route: Any) -> None:
            answer = await route.fetch()
            lengths.append(len((await answer.json())["history"]))
            await route.fulfill(response=answer)

        await page.route("**/stats*", look)

    async with aiohttp.ClientSession(embedded.url) as session:
        while True:
            async with session.get("/stats?history=true") as answer:
                if len((await answer.json())["history"]) >= 5:
                    break
            await asyncio.sleep(0.2)
    one = await visit(embedded.url, prepare=kept)
    await one.wait_text("#status-text", "^ready$")
    line = await one.page.get_attribute("#chart-tokens .line", "d")
    assert len(re.findall("[ML]", line)) >= lengths[0] >= 5
    await wait_ticks(one, 3)
    assert set(lengths[1:3]) == {0}, "the past is asked for once"


async def test_an_idle_server_shows_no_old_steps(embedded: LiveServer, visit: OpenPage) -> None:
    ago_s = 0.0

    async def change(route: Any) -> None:
        answer = await route.fetch()
        stats = await answer.json()
        start_s = stats["now_s"] - ago_s - 1
        stats["steps"] = [[i, start_s + i / 9, 0.1, 5, 1, 1, 0, 0.1] for i in range(9)]
        await route.fulfill(response=answer, json=stats)

    one = await visit(embedded.url, prepare=lambda page: page.route("**/stats*", change))
    bars = "document.querySelector('#timeline .bars.decode').getAttribute('d')"
    await one.wait_js(bars)
    ago_s = 100.0
    await one.wait_js(f"{bars} === ''")
    await one.wait_text("#timeline .at", "last step 1 min 40 s ago")


# ── states ──────────────────────────────────────────────────────────────────────────────────


async def test_without_traffic_it_says_what_to_try(slow: LiveServer, visit: OpenPage) -> None:
    async def empty(page: Any) -> None:
        async def change(route: Any) -> None:
            answer = await route.fetch()
            stats = await answer.json()
            stats["totals"]["requests"] = 0
            await route.fulfill(response=answer, json=stats)

        await keyed(page)
        await page.route("**/stats*", change)

    one = await visit(slow.url, prepare=empty)
    await one.wait_text("#verdict-head", "^Ready, and nothing to do yet$")
    assert f"headway bench {slow.url}" in await one.text("#try")


STATUSES = {
    "loading 43%": "being loaded",
    "restarting": "being started again",
    "draining": "shutting down",
    "failed": "cannot be started",
}


async def test_a_server_that_is_not_ready_says_so(slow: LiveServer, visit: OpenPage) -> None:
    status = ""

    async def change(route: Any) -> None:
        answer = await route.fetch()
        stats = await answer.json()
        await route.fulfill(response=answer, json={**stats, "status": status})

    async def prepare(page: Any) -> None:
        await keyed(page)
        await page.route("**/stats*", change)

    one = await visit(slow.url, prepare=prepare)
    for status, words in STATUSES.items():
        await one.wait_text("#status-text", f"^{status}$")
        await one.wait_text("#banner", words)


async def test_it_asks_for_the_key_and_keeps_it_in_this_tab(
    slow: LiveServer, visit: OpenPage
) -> None:
    one = await visit(slow.url, refusals=True)
    await one.page.wait_for_selector("#key-dialog[open]")
    await one.page.fill("#key-input", "open please")
    await one.page.press("#key-input", "Enter")
    await one.wait_text("#key-error", "does not know this key")
    await one.page.fill("#key-input", "sesame")
    await one.page.get_by_role("button", name="Use this key").click()
    await one.wait_text("#status-text", "^ready$")
    kept = await one.page.evaluate("[{...sessionStorage}, {...localStorage}, document.cookie]")
    assert kept == [{"headway-key": "sesame"}, {}, ""]
    assert not await one.page.locator("#banner").is_visible()
    await one.page.get_by_role("button", name="Forget key").click()
    await one.page.wait_for_selector("#key-dialog[open]")
    assert await one.page.evaluate("({...sessionStorage})") == {}
    await one.page.get_by_role("button", name="Not now").click()
    await one.page.get_by_role("button", name="Enter key").click()
    await one.page.wait_for_selector("#key-dialog[open]")


async def test_an_answer_can_be_stopped(slow: LiveServer, visit: OpenPage) -> None:
    one = await visit(slow.url, prepare=keyed)
    await one.wait_text("#status-text", "^ready$")
    await ask(one, "Hello")
    await one.wait_text(answer_of(1) + " .said", ".{20}")
    await one.page.get_by_role("button", name="Stop").click()
    await one.wait_text(answer_of(1) + " .after", "^Stopped · TTFT .* about .* tokens")
    assert await one.page.get_by_role("button", name="Send").is_visible()
    await one.wait_js("document.querySelectorAll('#requests tr').length === 0")


async def test_silence_is_shown_and_overcome(slow: LiveServer, visit: OpenPage) -> None:
    one = await visit(slow.url, prepare=keyed, refusals=True)
    await one.wait_text("#status-text", "^ready$")
    await one.page.context.set_offline(True)
    await one.wait_text("#banner", "no connection")
    await one.wait_text("#status-text", "^disconnected$")
    assert await one.page.locator("main.stale").count() == 1
    await ask(one, "Hello")
    await one.wait_text(".turn .error", "no connection")
    await one.page.context.set_offline(False)
    await one.page.get_by_role("button", name="Retry now").click()
    await one.wait_text("#status-text", "^ready$")
    assert not await one.page.locator("#banner").is_visible()


async def test_a_dead_engine_is_told_and_the_answer_goes_on(
    slow: LiveServer, visit: OpenPage
) -> None:
    one = await visit(slow.url, prepare=keyed, refusals=True)
    await one.wait_text("#status-text", "^ready$")
    await ask(one, "Hello")
    await one.wait_text(answer_of(1) + " .said", ".{5}")
    os.kill(slow.engine_pid(), signal.SIGKILL)
    await one.wait_text("#uptime", "engine restarted 1×")
    await one.wait_text("#status-text", "^ready$")
    said = await one.page.inner_text(answer_of(1) + " .said")
    await one.wait_text(answer_of(1) + " .said", f".{{{len(said) + 5}}}")
    assert not await one.page.locator(".turn .error").count()
    await one.page.get_by_role("button", name="Stop").click()


# ── people ──────────────────────────────────────────────────────────────────────────────────


async def focused(one: Visit) -> str:
    """What has the focus: its id, or its text."""
    found: str = await one.page.evaluate(
        "document.activeElement.id || document.activeElement.textContent.trim()"
    )
    return found


async def test_the_keyboard_is_enough(embedded: LiveServer, visit: OpenPage) -> None:
    one = await visit(embedded.url)
    await one.wait_text("#status-text", "^ready$")
    keys = one.page.keyboard
    await keys.press("Tab")
    assert await focused(one) == "Skip to the chat"
    await keys.press("Enter")
    assert await focused(one) == "chat-input"
    await keys.type("What is 1 + 1?")
    await keys.press("Enter")
    await one.wait_text(answer_of(1) + " .after", DONE)
    assert await focused(one) == "chat-input"
    await keys.press("Tab")
    assert await focused(one) == "Options"
    await keys.press("Tab")
    assert await focused(one) == "chat-send"

    await one.page.locator("[name=window][value='60']").focus()
    await keys.press("ArrowRight")
    assert await one.page.locator("[name=window][value='300']").is_checked()
    await keys.press("Tab")
    assert await focused(one) == "theme"
    await keys.press("Enter")
    assert await one.text("#theme") == "Theme: light"
    await keys.press("Tab")
    assert await focused(one) == "Bottleneck"
    assert "bounds this server" in await one.text("#tip")
    await keys.press("Escape")
    assert not await one.page.locator("#tip").is_visible()


async def test_everything_that_can_be_used_has_a_name(
    embedded: LiveServer, visit: OpenPage
) -> None:
    one = await visit(embedded.url)
    await one.wait_text("#status-text", "^ready$")
    nameless = await one.page.evaluate(
        """() => [...document.querySelectorAll('button, input, select, textarea, svg, [tabindex]')]
        .filter((node) => node.checkVisibility())
        .filter((node) => !(node.getAttribute('aria-label') || node.labels?.length
          || node.textContent.trim()))
        .map((node) => node.outerHTML.slice(0, 80))"""
    )
    assert nameless == []
    undefined = await one.page.evaluate(
        """import('/page/terms.js').then(({TERMS}) => [...document.querySelectorAll('[data-term]')]
        .map((node) => node.dataset.term).filter((name) => !TERMS[name]))"""
    )
    assert undefined == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_a_phone_needs_no_sideways_scroll(
    embedded: LiveServer, visit: OpenPage, scheme: str
) -> None:
    one = await visit(embedded.url, viewport=PHONE, color_scheme=scheme, has_touch=True)
    await one.wait_text("#status-text", "^ready$")
    async with load(embedded.url, 2):
        await ask(one, "Tell me " + "averyveryverylongword" * 8)
        await one.wait_text(answer_of(1) + " .after", "TTFT")
        await one.wait_js("document.querySelectorAll('#requests tr').length >= 1")
        assert not await one.is_wider_than_the_screen()
    await one.page.locator("[data-term=burn], [data-term=e2e]").first.tap()
    assert await one.page.locator("#tip").is_visible()
    assert not await one.is_wider_than_the_screen()


def widest(stats: dict[str, Any]) -> dict[str, Any]:
    """The same figures, each as wide as it may become."""
    wide = {"count": 9, "mean": 0.000888, **dict.fromkeys(("p50", "p95"), 0.000888)}
    wide |= {"p90": 0.0888, "p99": 82_800.0}
    for window in stats["windows"]:
        window["latency"] = dict.fromkeys(window["latency"], wide)
        window["lengths"] = {name: {**wide, "p50": 88_888.0} for name in window["lengths"]}
        for name in window:
            if name.endswith("_per_s"):
                window[name] = 88_888_888.0
        window |= {"num_failed": 8_888_888, "cache_hit_rate": 0.00888}
        if window["cost"]:
            window["cost"] = dict.fromkeys(window["cost"], 88_888.88)
    return stats


@pytest.mark.parametrize("wider_px", [0, 1.5], ids=["this font", "a wider font"])
async def test_a_phone_has_room_for_the_widest_figures(
    embedded: LiveServer, visit: OpenPage, wider_px: float
) -> None:
    async def change(route: Any) -> None:
        answer = await route.fetch()
        await route.fulfill(response=answer, json=widest(await answer.json()))

    one = await visit(
        embedded.url,
        prepare=lambda page: page.route("**/stats*", change),
        viewport=PHONE,
        bypass_csp=True,
    )
    await one.wait_text('[data-figure="output"]', "88,888,888")
    await one.page.add_style_tag(content=f"* {{ letter-spacing: {wider_px}px !important }}")
    await one.wait_text("#percentiles", "0.888 ms.*88.8 ms.*23 h")
    assert not await one.is_wider_than_the_screen()
    outside = await one.page.evaluate(
        "[...document.querySelectorAll('#figures *')].filter((node) => "
        "node.getBoundingClientRect().right > window.innerWidth && !node.closest('.scroll')"
        " && !node.closest('svg') && !node.closest('.unseen'))"
        ".map((node) => node.outerHTML.slice(0, 80))"
    )
    assert outside == []


async def test_colours_follow_preference_and_choice(embedded: LiveServer, visit: OpenPage) -> None:
    dark = "rgb(14, 17, 22)"
    ground = "getComputedStyle(document.body).backgroundColor"
    one = await visit(embedded.url, color_scheme="dark", reduced_motion="reduce")
    await one.wait_text("#status-text", "^ready$")
    assert await one.page.evaluate(ground) == dark
    await one.page.click("#theme")
    assert await one.page.evaluate(ground) != dark
    await one.page.reload()
    assert await one.page.evaluate(ground) != dark, "the choice is kept"
    moving = await one.page.evaluate(
        "[...document.querySelectorAll('*')].filter((node) => "
        "parseFloat(getComputedStyle(node).transitionDuration) > 0).length"
    )
    assert moving == 0


SCREENS = {
    "light": {"viewport": {"width": 1280, "height": 1180}, "color_scheme": "light"},
    "dark": {"viewport": {"width": 1280, "height": 1180}, "color_scheme": "dark"},
    "phone": {"viewport": PHONE, "color_scheme": "light", "has_touch": True},
}


@pytest.mark.parametrize("name", SCREENS)
async def test_screenshots(
    embedded: LiveServer, visit: OpenPage, name: str, tmp_path: Path
) -> None:
    """`make screenshots` keeps them in docs/images, after a minute of load."""
    kept = os.environ.get("HEADWAY_SCREENSHOTS")
    one = await visit(embedded.url, **SCREENS[name])
    await one.wait_text("#status-text", "^ready$")
    await set_option(one, "temperature", "0")
    async with load(embedded.url, 6):
        for turn, question in enumerate(("What is 2 + 3?", "What is the opposite of hot?"), 1):
            await ask(one, question)
            await one.wait_text(answer_of(turn) + " .after", DONE)
        await one.page.click("#chat-options summary")
        await wait_ticks(one, 55 if kept else 2)
        await one.page.evaluate("document.activeElement.blur(); window.scrollTo(0, 0)")
        picture = await one.page.screenshot(path=Path(kept or tmp_path) / f"page-{name}.png")
    assert 10_000 < len(picture) < 200_000
