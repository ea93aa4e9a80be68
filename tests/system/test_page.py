"""The live page in a real browser, on a real server: its files, and the chat."""

import hashlib
import re
from typing import Any

import aiohttp
import pytest
from browser import OpenPage
from live_server import LiveServer
from page_cases import (
    DONE,
    answer_of,
    ask,
    browser,
    embedded,
    keyed,
    set_option,
    slow,
    thinking,
    visit,
)
from scripted import ScriptedServer

from headway.evals.skills.suite import SKILLS
from headway.server.page import FILES, PATHS

pytestmark = pytest.mark.asyncio(loop_scope="module")

FIXTURES = (browser, embedded, slow, thinking, visit)


# ── access ───────────────────────────────────────────────────────────────────────────────────


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
        if file.name == "marked.js":  # a library, unchanged: docs/decisions
            digest = hashlib.sha256(file.read_bytes()).hexdigest()
            assert digest == "5371fea86fd0656b4fc7bea7c94c663109d82789b69433eeee78d42895aa44de"
            continue
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
