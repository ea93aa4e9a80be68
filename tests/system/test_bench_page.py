"""The HTML report in a real browser, where there is one: it draws itself and asks nobody."""

import shutil
import warnings
from pathlib import Path

import pytest

from bench_runs import run_of, steady
from headway.bench import page
from headway.bench.report import build_report

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_draws_every_plot_without_a_network(tmp_path: Path, scheme: str) -> None:
    sync_api = pytest.importorskip("playwright.sync_api")
    if CHROMIUM is None:
        pytest.skip("there is no chromium")
    answers = steady(200, 0.05, ttft_s=lambda i: 0.1 + 0.01 * (i % 7))
    answers[3].error = "timeout"
    report = build_report(run_of(answers, 10.0, slos={"default": "ttft=1s"}), "0")
    file = tmp_path / "report.html"
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
        opened.wait_for_selector("#plot3 .main-svg")
        drawn = opened.locator(".plot:has(.main-svg)").count()
        wider = opened.evaluate("document.documentElement.scrollWidth > innerWidth")
        browser.close()
    assert faults == []
    assert drawn == 4
    assert [url for url in asked if not url.startswith(("file:", "data:", "blob:"))] == []
    assert not wider, "on a phone nothing is cut off"
