"""The live page when little works, and for whoever looks: keyboard, phone, colours."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from browser import OpenPage, Visit
from live_server import LiveServer
from page_cases import (
    DONE,
    PHONE,
    answer_of,
    ask,
    browser,
    embedded,
    keyed,
    load,
    set_option,
    slow,
    visit,
    wait_ticks,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")

FIXTURES = (browser, embedded, slow, visit)


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
    await one.wait_text("#verdict-head", "^Ready: no requests yet$")
    tries = await one.text("#try")
    assert f"headway bench {slow.url}" in tries and f"headway doctor {slow.url}" in tries
    cards = one.page.locator("#figures > .card")
    assert [await card.is_visible() for card in await cards.all()].count(True) == 1


async def test_of_several_engines_it_says_how_many_are_ready(
    slow: LiveServer, visit: OpenPage
) -> None:
    async def three(page: Any) -> None:
        async def change(route: Any) -> None:
            answer = await route.fetch()
            stats = await answer.json()
            [engine] = stats["engines"]
            stats["engines"] = [engine, {**engine, "engine": 1, "ready": False}, engine]
            await route.fulfill(response=answer, json=stats)

        await keyed(page)
        await page.route("**/stats*", change)

    one = await visit(slow.url, prepare=three)
    await one.wait_text("#status-text", "^ready, 2 of 3 engines$")


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
    for name in ("Options", "chat-attach", "chat-send"):
        await keys.press("Tab")
        assert await focused(one) == name

    await one.page.locator("[name=window][value='60']").focus()
    await keys.press("ArrowRight")
    assert await one.page.locator("[name=window][value='300']").is_checked()
    await keys.press("Tab")
    assert await focused(one) == "theme"
    await keys.press("Enter")
    assert await one.text("#theme") == "Theme: light"
    await keys.press("Tab")
    assert await focused(one) == "chat-wide"
    await one.page.focus("#verdict-title button")
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
    "light": {"viewport": {"width": 1280, "height": 1100}, "color_scheme": "light"},
    "dark": {"viewport": {"width": 1280, "height": 1100}, "color_scheme": "dark"},
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
