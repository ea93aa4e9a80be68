"""The HTML reports in a real browser, where there is one: they draw themselves and ask nobody."""

import os
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench_runs import run_of, steady
from headway.advise import show as doctor_page
from headway.advise.diagnosis import diagnose
from headway.advise.from_report import reading_from_report
from headway.bench import page as bench_page
from headway.bench.report import BenchReport, build_report
from headway.evals import page as eval_page
from headway.evals.pairs import POINTS, RELATIVE, EvalComparison, Measure
from headway.evals.questions import Share, SkillsReport
from headway.evals.report import EvalReport
from headway.evals.skills.suite import SKILLS
from headway.measure import onepage

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
MAX_BYTES = 300_000
STYLE_SHEET = Path(onepage.__file__).parents[1] / "edge" / "page" / "page.css"


def bench_report(count: int = 6000) -> BenchReport:
    """A run of two classes with a tail and a failure."""
    answers = steady(count, 0.05, ttft_s=lambda i: 0.1 + 0.01 * (i % 7) + (i % 50 == 0) * 0.8)
    answers[3].error = "timeout"
    for i, each in enumerate(answers):
        each.service_class = "interactive" if i % 3 else "default"
    slos = {"default": "ttft=1s", "interactive": "ttft=300ms,tpot=50ms"}
    run = run_of(answers, 0.05 * count, slos=slos)
    for part, seconds in (("queue", 0.04), ("prefill", 0.08)):
        run.server.counters[f"request_{part}_time_seconds_sum"] = seconds * count
        run.server.counters[f"request_{part}_time_seconds_count"] = count
    return build_report(run, "0")


def measure(name: str, kind: str, loss: float, verdict: str) -> Measure:
    return Measure(
        name=name, kind=kind, items=10, first=0.9, second=0.9 - loss, loss=loss, low=loss - 0.04,
        high=loss + 0.05, tolerance=0.02, floor=loss - 0.05, ceiling=loss + 0.06, verdict=verdict,
        required=verdict == "as good",
    )  # fmt: skip


def eval_report() -> EvalReport:
    """Skills of which none is decided, and a text that is as good."""
    names = list(SKILLS)
    shares = [Share(skill=n, level=1, right=9 - i % 3, total=10, low=0.6, high=0.98)
              for i, n in enumerate(names)]  # fmt: skip
    whole = Share(skill="", level=0, right=96, total=120, low=0.72, high=0.86)
    comparison = EvalComparison(
        first="tiny", second="tiny int4", differences=[],
        measures=[
            *(measure(f"skill {n}", POINTS, i % 3 / 50, "unclear") for i, n in enumerate(names)),
            measure("bits per byte, <b>", RELATIVE, 0.004, "as good"),
        ],
    )  # fmt: skip
    return EvalReport(
        headway="0", model="tiny int4", place="folder", began="", seconds=9.0,
        skills=SkillsReport(seed=0, questions=120, unfit=0, shares=[whole, *shares], items=[]),
        comparison=comparison,
    )  # fmt: skip


def pages() -> dict[str, str]:
    """The pages of all reports."""
    report = bench_report()
    diagnosis = diagnose(reading_from_report("report.json", report))
    return {
        "bench": bench_page.html(report),
        "eval": eval_page.html(eval_report(), gate=True),
        "doctor": doctor_page.html(diagnosis),
    }


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api")
    if CHROMIUM is None:
        pytest.skip("there is no chromium")
    with warnings.catch_warnings(), sync_api.sync_playwright() as playwright:
        warnings.simplefilter("ignore")
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


def test_every_report_has_its_answer_and_its_plots(browser: Any, tmp_path: Path) -> None:
    """On a phone, light and dark, without a network and without a script."""
    answers = {
        "bench": ("requests/s met their objectives", 4),
        "eval": ("12 skills: no difference that 10 questions each could show", 2),
        "doctor": (":", 1),
    }
    for name, text in pages().items():
        assert len(text.encode()) <= MAX_BYTES and "<script" not in text, name
        file = tmp_path / f"{name}.html"
        file.write_text(text, encoding="utf-8")
        for scheme in ("light", "dark"):
            view = {"width": 400, "height": 800}
            opened = browser.new_page(color_scheme=scheme, viewport=view, java_script_enabled=True)
            asked: list[str] = []
            opened.on("request", lambda request, asked=asked: asked.append(request.url))
            opened.goto(file.as_uri())
            headline, plots = answers[name]
            assert headline in opened.inner_text("h1"), name
            drawn = opened.locator(".plot svg")
            assert drawn.count() == plots, name
            assert "NaN" not in "".join(each.inner_html() for each in drawn.all()), name
            assert not opened.evaluate("document.documentElement.scrollWidth > innerWidth"), name
            dark = opened.evaluate("getComputedStyle(document.body).backgroundColor")
            assert (dark == "rgb(14, 17, 22)") == (scheme == "dark"), name
            assert asked == [file.as_uri()], name
            opened.close()
        if folder := os.environ.get("HEADWAY_SCREENSHOTS"):
            opened = browser.new_page(viewport={"width": 980, "height": 900})
            opened.goto(file.as_uri())
            opened.screenshot(path=Path(folder) / f"report-{name}.png")
            opened.close()


def test_reports_have_the_colours_of_the_live_page() -> None:
    css = STYLE_SHEET.read_text()
    for colours in (onepage.LIGHT, onepage.DARK):
        for declaration in filter(None, map(str.strip, colours.split(";"))):
            assert declaration in css, declaration
