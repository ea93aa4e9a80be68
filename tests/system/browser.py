"""A real browser on the live page: Debian's chromium, driven by playwright.

Where one of the two is missing, the tests that want it skip and say so.
"""

import contextlib
import re
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

PATIENCE_MS = 60_000
"""Generous: the browser, the server and its engine share two busy cores."""
NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
).split()
EXPECTED = re.compile(r"Failed to load resource: (the server responded|net::ERR_)")
"""What the browser itself writes of an answer of 400 or more, or of none; tests may allow it."""


@contextlib.asynccontextmanager
async def chromium() -> AsyncIterator[Any]:
    """A headless chromium, or a skip."""
    api = pytest.importorskip("playwright.async_api", reason="playwright is not installed")
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        pytest.skip("there is no chromium here: apt-get install chromium")
    async with api.async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=program, args=FLAGS)
        try:
            yield browser
        finally:
            await browser.close()


class Visit:
    """One browser context with the page open, and everything its console said."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.said: list[str] = []
        page.on("console", self._take)
        page.on("pageerror", lambda error: self.said.append(f"error: {error}"))

    def _take(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.said.append(f"{message.type}: {message.text}")

    def unexpected(self, refusals: bool) -> list[str]:
        """What the console said, without the browser's own lines on refusals when allowed."""
        return [text for text in self.said if not (refusals and EXPECTED.search(text))]

    async def text(self, selector: str) -> str:
        found: str = await self.page.locator(selector).first.inner_text()
        return found

    async def wait_text(self, selector: str, pattern: str) -> str:
        """The element's text once it matches."""
        await self.page.wait_for_function(
            "([where, what]) => new RegExp(what, 's').test(document.querySelector(where)"
            "?.textContent ?? '')",
            arg=[selector, pattern],
            timeout=PATIENCE_MS,
        )
        return await self.text(selector)

    async def wait_js(self, condition: str, argument: Any = None) -> None:
        """Wait until an expression, which may use `argument`, is true.

        It goes as a function: playwright would eval a bare expression, which the page's policy
        forbids.
        """
        await self.page.wait_for_function(
            f"(argument) => {condition}", arg=argument, timeout=PATIENCE_MS
        )

    async def is_wider_than_the_screen(self) -> bool:
        found: bool = await self.page.evaluate(
            "document.documentElement.scrollWidth > window.innerWidth"
        )
        return found


OpenPage = Callable[..., Awaitable[Visit]]


@contextlib.asynccontextmanager
async def visits(browser: Any) -> AsyncIterator[OpenPage]:
    """Opens pages; at the end none of their consoles may have said anything unexpected."""
    opened: list[tuple[Visit, bool]] = []

    async def visit(
        url: str,
        *,
        prepare: Callable[[Any], Awaitable[None]] | None = None,
        refusals: bool = False,
        **options: Any,
    ) -> Visit:
        context = await browser.new_context(**options)
        page = await context.new_page()
        page.set_default_timeout(PATIENCE_MS)
        one = Visit(page)
        opened.append((one, refusals))
        if prepare:
            await prepare(page)
        await page.goto(url)
        return one

    yield visit
    said = [text for one, refusals in opened for text in one.unexpected(refusals)]
    for one, _ in opened:  # who polls while its routes go is refused, and its console says so
        await one.page.unroute_all(behavior="ignoreErrors")  # an answer on its way fails no test
        await one.page.context.close()
    assert said == [], said
