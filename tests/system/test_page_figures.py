"""The figures of the live page: they move, follow the window, and know the past."""

import asyncio
import re
import statistics
from typing import Any

import aiohttp
import pytest
from browser import OpenPage, Visit
from live_server import LiveServer
from page_cases import TICK_MS, browser, embedded, load, ticks_of, visit, wait_ticks

pytestmark = pytest.mark.asyncio(loop_scope="module")

FIXTURES = (browser, embedded, visit)


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


async def tick_ms(one: Visit) -> float:
    """The median of a page's ticks, its first one left out."""
    return statistics.median((await ticks_of(one))[1:])


async def test_guesses_have_a_line_where_they_are_made(
    embedded: LiveServer, visit: OpenPage
) -> None:
    """The server guesses nothing and the page says nothing of it; then /stats tells of some."""
    plain = await visit(embedded.url)
    await plain.wait_text("#status-text", "^ready$")
    assert await plain.page.evaluate("document.querySelector('#drafts').hidden")
    source = {"drafts": 10, "draft_tokens": 31, "accepted_tokens": 19}
    drafts: dict[str, Any] = {
        **source,
        "acceptance": 19 / 31,
        "drafts_per_step": 3.1,
        "tokens_per_step": 2.9,
        "draft_share": 0.15,
        "verify_share": 0.06,
        "speedup": 2.3,
        "by_source": {"lookup": source, "draft": dict.fromkeys(source, 0)},
    }

    async def guessing(page: Any) -> None:
        async def change(route: Any) -> None:
            answer = await route.fetch()
            stats = await answer.json()
            for window in stats["windows"]:
                window["drafts"] = drafts
            await route.fulfill(response=answer, json=stats)

        await page.route("**/stats*", change)

    one = await visit(embedded.url, prepare=guessing)
    said = r"61.?% of 3\.1 a step kept, 2\.9 tokens a step for 21.?% of its time \(lookup 61.?%\)"
    await one.wait_text("#drafts", f"Guesses: {said}")
    drafts["draft_tokens"] = 0
    await one.wait_text("#drafts", r"Guesses: none in this window \(lookup, draft\)")


async def test_256_requests_are_shown_each_tick(embedded: LiveServer, visit: OpenPage) -> None:
    one = await open_crowded(embedded.url, visit)
    assert await one.page.locator("#requests tr").count() == 256
    await one.wait_text("#requests-note", "256 requests: 200 sequences run")
    first = await one.text("#requests td:nth-child(9)")
    await one.wait_js(
        "document.querySelector('#requests td:nth-child(9)').textContent !== argument", first
    )


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
