"""The page of `claims_page.py` in a real browser, where there is one: it asks nobody."""

import shutil
import warnings
from pathlib import Path

import pytest

from literature import page, table
from literature.subject import Subject

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
ASKED = ("quantization", "kv-13b", "kv-twenty", "mbu", "cost-retries", "guess-medusa")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_draws_every_picture_without_a_network(tmp_path: Path, scheme: str) -> None:
    sync_api = pytest.importorskip("playwright.sync_api")
    if CHROMIUM is None:
        pytest.skip("there is no chromium")
    report = table.run(Subject(url="http://nobody"), table.chosen(ASKED))
    file = tmp_path / "claims.html"
    file.write_text(page.html(report), encoding="utf-8")
    faults: list[str] = []
    asked: list[str] = []
    with warnings.catch_warnings(), sync_api.sync_playwright() as playwright:
        warnings.simplefilter("ignore")
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        opened = browser.new_page(color_scheme=scheme, viewport={"width": 400, "height": 800})
        opened.on("pageerror", lambda error: faults.append(str(error)))
        opened.on("console", lambda m: faults.append(m.text) if m.type == "error" else None)
        opened.on("request", lambda request: asked.append(request.url))
        opened.goto(file.as_uri())
        drawn = opened.locator(".plot svg").count()
        points = opened.locator(".plot >> nth=0").locator("circle").count()
        cards = opened.locator(".claim").count()
        words = opened.inner_text("body")
        wider = opened.evaluate("document.documentElement.scrollWidth > innerWidth")
        browser.close()
    assert faults == []
    assert drawn == 4  # where all stand, and three that have a picture
    assert points == sum(row.finding is not None for row in report.rows)
    assert cards == len(report.rows) == 6
    assert table.NOT_ASKED in words and "holds in part" in words
    assert [url for url in asked if not url.startswith(("file:", "data:", "blob:"))] == []
    assert not wider, "on a phone nothing is cut off"
