"""What evaluations conclude: intervals and tests against known values, the gate, the reports.

Tables of values: Newcombe (1998), Statistics in Medicine 17, table I, for Wilson's interval; exact
tails are counted out. The command line is run in this process on stored reports: no model.
"""

import itertools
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec import structs

from headway.cli.common import GATE_FAILED
from headway.cli.main import main
from headway.core.errors import UsageError
from headway.core.scoring import STOP, Score, transcript
from headway.evals import page, questions, suites
from headway.evals.divergence import Divergence, PassageDivergence
from headway.evals.pairs import (
    ALPHA,
    NATS,
    PERPLEXITY,
    POINTS,
    POSITIONS,
    RELATIVE,
    EvalComparison,
    Measure,
    Paired,
    compare,
    judge,
    tolerances,
    usual_kl_tolerance,
)
from headway.evals.report import EvalReport, read_report
from headway.evals.skills.suite import SKILLS, TEST_SEED, examples
from headway.evals.statistics import (
    binomial_tail,
    holm,
    interval,
    mcnemar,
    mcnemar_worse,
    paired_bootstrap,
    wilson,
)
from headway.evals.table import gate_text
from headway.evals.text import LastWord, LastWords, Passage, TextScore
from headway.evals.texts import (
    DivergenceReport,
    TextReport,
    bits_figure,
    blocks,
    divergence_figures,
    last_words_figure,
)
from headway.spec.embedded import NAMES, model_folder

TOLERANCES = {POINTS: 0.02, RELATIVE: 0.02, NATS: 0.02}

# ── statistics ──────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("right", "asked", "low", "high"),
    [
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
        (20, 20, 0.8389, 1.0),
    ],
)
def test_wilson_is_the_published_interval(right: int, asked: int, low: float, high: float):
    assert wilson(right, asked) == pytest.approx((low, high), abs=5e-5)


def test_wilson_of_nothing_is_everything():
    assert wilson(0, 0) == (0.0, 1.0)


def test_exact_tails_are_those_counted_out():
    for trials in range(9):
        heads = [sum(tosses) for tosses in itertools.product((0, 1), repeat=trials)]
        for least in range(trials + 1):
            counted = sum(count >= least for count in heads) / 2**trials
            assert binomial_tail(least, trials) == counted
    assert mcnemar(1, 9) == mcnemar(9, 1) == 22 / 1024
    assert mcnemar_worse(9, 1) == 11 / 1024
    assert mcnemar(0, 0) == mcnemar(4, 4) == 1.0
    assert mcnemar_worse(3000, 2000) < 1e-40, "large counts neither overflow nor underflow"


def test_holm():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([]) == [] and holm([0.9, 0.8]) == [1.0, 1.0]


def test_the_bootstrap_finds_the_standard_error_and_repeats():
    values = np.random.default_rng(1).normal(0.3, 1.0, 400)
    draws = paired_bootstrap(values)
    assert np.array_equal(draws, paired_bootstrap(values))
    low, high = interval(draws)
    half = 1.96 * values.std() / 20
    assert (low, high) == pytest.approx((values.mean() - half, values.mean() + half), abs=0.02)


def test_strata_are_drawn_by_themselves_and_weights_make_a_ratio():
    values = np.array([1.0, 1.0, 0.0, 0.0, 0.0])
    assert set(paired_bootstrap(values, strata=["a", "a", "b", "b", "b"])) == {0.4}
    assert set(paired_bootstrap(np.array([2.0, 6.0]), np.array([1.0, 3.0]))) == {2.0}


def test_blocks_are_sums_of_neighbours():
    assert blocks(range(4)).tolist() == [0, 1, 2, 3]
    found = blocks([1.0] * 1201)
    assert len(found) == 401 and found[:-1].tolist() == [3.0] * 400 and found.sum() == 1201


# ── A against B ─────────────────────────────────────────────────────────────────────────────


def shares(lost: int, gained: int, items: int) -> Paired:
    """Right and wrong of two models that differ in so many items."""
    loss = np.array([1.0] * lost + [-1.0] * gained + [0.0] * (items - lost - gained))
    return Paired(name="skills", kind=POINTS, first=0.9, second=0.9, items=items, loss=loss)


@pytest.mark.parametrize(
    ("lost", "gained", "items", "verdict"),
    [
        (0, 0, 1000, "as good"),
        (0, 0, 20, "cannot tell"),
        (3, 0, 3, "cannot tell"),
        (60, 5, 1000, "worse"),
        (25, 5, 1000, "unclear"),
        (10, 60, 1000, "as good"),
        (100, 100, 1000, "cannot tell"),
        (150, 50, 5000, "unclear"),
        (0, 12, 100, "as good"),
    ],
)
def test_the_gates_rule(lost: int, gained: int, items: int, verdict: str):
    found = judge(shares(lost, gained, items), 0.02, 1)
    assert found.verdict == verdict, found
    assert (found.only_first, found.only_second) == (lost, gained)
    assert found.loss == pytest.approx((lost - gained) / items)
    assert found.low <= found.loss <= found.high


def test_a_model_that_can_hardly_do_it_cannot_lose_it():
    """1.4% right in both, as a small model is in skills that it was not trained on."""
    paired = replace(shares(0, 0, 1800), first=0.014)
    assert judge(paired, 0.02, 1).verdict == "cannot tell"
    assert judge(replace(paired, first=0.04), 0.02, 1).verdict == "as good"


def gate_of(*rows: tuple[str, bool], allow: bool = False) -> EvalComparison:
    """A comparison of measures with these verdicts, required or not."""
    known = judge(shares(0, 0, 1000), 0.02, 1)
    measures = [structs.replace(known, verdict=v, required=required) for v, required in rows]
    return EvalComparison(
        first="A", second="B", measures=measures, differences=[], allow_unclear=allow
    )


@pytest.mark.parametrize(
    ("rows", "failed"),
    [
        ([("as good", True), ("cannot tell", False)], False),
        ([("as good", True), ("worse", False)], True),
        ([("worse", True), ("as good", True)], True),
        ([("unclear", True)], False),
        ([("cannot tell", True), ("as good", True)], False),
        ([("cannot tell", True), ("as good", False)], True),
        ([("as good", False)], True),
    ],
)
def test_the_gate_needs_a_required_measure_that_can_tell(
    rows: list[tuple[str, bool]], failed: bool
):
    assert gate_of(*rows).failed is failed
    worse = any(verdict == "worse" for verdict, _ in rows)
    assert gate_of(*rows, allow=True).failed is worse


def test_tolerances_follow_the_bits_of_the_weights():
    """An int8 may lose 0.02 nats, an int4 beside more bits 0.1; beside its own int4 0.02 again."""
    assert usual_kl_tolerance(16.0, 16.0) == usual_kl_tolerance(16.0, 8.5) == 0.02
    assert usual_kl_tolerance(16.0, 5.3) == usual_kl_tolerance(8.5, 6.2) == 0.1
    assert usual_kl_tolerance(5.3, 5.3) == usual_kl_tolerance(None, None) == 0.02
    limits = tolerances(0.02, 0.02)
    assert limits[POSITIONS] == pytest.approx(0.1)
    assert limits[PERPLEXITY] == pytest.approx(0.0202, abs=1e-4)


def test_more_measures_ask_for_more_evidence():
    paired = shares(42, 5, 1000)
    assert judge(paired, 0.02, 1).verdict == "worse"
    assert judge(paired, 0.02, 20).verdict == "unclear"


def test_a_model_of_equal_quality_seldom_fails():
    """400 items of which each model gets a tenth wrong by itself: no more failures than ALPHA."""
    rng = np.random.default_rng(0)
    failed = 0
    for _ in range(40):
        a, b = (rng.random((2, 400)) < 0.9).astype(float)
        paired = Paired(name="skills", kind=POINTS, first=0.9, second=0.9, items=400, loss=a - b)
        failed += judge(paired, 0.0, 1).verdict == "worse"
    assert failed <= 2 * ALPHA * 40


def test_bits_and_divergences_are_judged_by_their_own_tolerances():
    rng = np.random.default_rng(0)
    of_a = rng.normal(100, 10, 300)
    pairs = [
        Paired(
            name="bits per byte, books", kind=RELATIVE, first=1.5, second=1.5 * more, items=300,
            loss=of_a * (more - 1) + rng.normal(0, 0.5, 300), weight=of_a,
        )
        for more in (1.05, 1.001)
    ]  # fmt: skip
    kl = np.full(300, 4.0)
    pairs.append(
        Paired(name="KL, books", kind=NATS, first=None, second=0.04, items=300, loss=kl,
               weight=np.full(300, 100.0))
    )  # fmt: skip
    found = compare(("A", "B"), pairs, TOLERANCES)
    assert [each.verdict for each in found.measures] == ["worse", "as good", "worse"]
    assert found.measures[0].loss == pytest.approx(0.05, abs=0.001)
    assert found.measures[2].loss == pytest.approx(0.04)
    generous = compare(("A", "B"), pairs, TOLERANCES | {NATS: 0.1, RELATIVE: 0.1})
    assert not generous.worse


# ── the suite ───────────────────────────────────────────────────────────────────────────────


class Knowing:
    """A model that knows every answer, but to one skill of `ignores` and what is too long."""

    name = "knowing"

    def __init__(self, ignores: str = "", longest: int = 10**9, questions: int = 4) -> None:
        self.ignores, self.longest = ignores, longest
        self.answers: dict[str, str] = {}
        for skill in SKILLS:
            for level in (1, 2, 3):
                for one in itertools.islice(examples(skill, level, TEST_SEED), questions):
                    reply = "no" if skill == ignores else one.answer
                    self.answers[json.dumps(one.messages)] = reply

    def generate(self, chats: Any, *, max_tokens: int) -> list[str | None]:
        told = [json.dumps(chat) for chat in chats]
        return [None if len(chat) > self.longest else self.answers[chat] for chat in told]

    def score(self, texts: Any, *, top: int = 0) -> list[Score]:
        raise NotImplementedError


def report_of(model: Knowing, **wants: Any) -> EvalReport:
    chosen = {"skills": list(SKILLS), "levels": (1, 2, 3), "questions": 4, "seed": TEST_SEED}
    wanted = suites.EvalSettings(**(chosen | {"corpora": None} | wants))
    return suites.evaluate(model, "here", wanted)


def test_every_right_answer_counts_and_every_item_is_kept():
    found = report_of(Knowing()).skills
    assert found is not None and len(found.items) == 12 * 3 * 4
    assert all(item.right and item.reply == item.answer for item in found.items)
    whole = found.find("", 0)
    assert whole is not None and (whole.right, whole.total) == (144, 144)
    assert found.find("copy", 2) is not None and found.find("copy", 4) is None


def test_what_does_not_fit_is_wrong_and_told():
    report = report_of(Knowing(longest=2000), skills=["lookup", "copy"])
    assert report.skills is not None and report.skills.unfit > 0
    unfit = [item for item in report.skills.items if item.reply is None]
    assert len(unfit) == report.skills.unfit and not any(item.right for item in unfit)
    assert "did not fit into the context" in page.as_text(report, False)
    assert "(the chat exceeds the context)" in page.html(report)


def test_fewer_questions_are_the_first_of_more():
    few, more = (report_of(Knowing(), questions=n) for n in (2, 4))
    comparison = suites.side_by_side(few, more, tolerance=0.02, kl_tolerance=0.02)
    assert comparison.measures[0].items == 12 * 3 * 2
    assert comparison.differences == ["skills: questions is 2 in A and 4 in B"]


def test_skills_that_a_model_can_do_are_found_by_asking():
    """Without --suite, of twelve skills those that four of six first questions are right of."""
    wanted = suites.EvalSettings(
        skills=list(SKILLS), levels=(1, 2, 3), questions=2, seed=TEST_SEED, corpora=None,
        only_feasible=True,
    )  # fmt: skip
    only_feasible, notes = suites.select_suites(Knowing("copy", questions=6), wanted)
    assert only_feasible.skills == [skill for skill in SKILLS if skill != "copy"]
    assert notes == ["skills not asked, for knowing has under 4 of 6 right: copy 0"]
    named, notes = suites.select_suites(
        Knowing("copy", questions=6), replace(wanted, only_feasible=False)
    )
    assert named.skills == list(SKILLS) and notes == []


def test_a_chat_as_a_transcript():
    chat = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
    chat += [{"role": "assistant", "content": "Hello!"}, {"role": "user", "content": "2 + 3?"}]
    text = transcript(chat)
    assert text == "Be kind.\nUser: Hi\nAssistant: Hello!\nUser: 2 + 3?\nAssistant:"
    assert STOP in text


# ── texts ───────────────────────────────────────────────────────────────────────────────────


def text_report(more: float, right: int) -> TextReport:
    """700 windows of two texts at about 1.5 bits a byte, so many times `more`; 100 last words."""
    rng = np.random.default_rng(0)
    scores = [
        TextScore(
            name=name, context_chars=256, stride_chars=256,
            passages=[
                Passage(nats=float(x) * more, num_bytes=256, num_tokens=90)
                for x in rng.normal(266, 20, 700)
            ],
        )
        for name in ("wikitext-2", "books")
    ]  # fmt: skip
    words = [LastWord(word=str(i), right=i < right, nats=1.0) for i in range(100)]
    found = LastWords(name="lambada", items=words)
    figures = [*map(bits_figure, scores), last_words_figure(found)]
    return TextReport(limit=None, figures=figures, texts=scores, last_words=found)


def divergence(kl: float) -> Divergence:
    passage = PassageDivergence(
        num_tokens=50, kl=50 * kl, agreed=45, overlap=48.0, reference_nats=100.0, nats=101.0
    )
    return Divergence(name="books", reference="A", method="exact", passages=[passage] * 100)


def test_texts_and_divergence_in_table_gate_page_and_file(tmp_path: Path):
    first, second = (report_of(Knowing(), skills=[]) for _ in "AB")
    first.text, second.text = text_report(1.0, 80), text_report(1.05, 50)
    figures = {figure.name: figure for figure in first.text.figures}
    books = figures["books"]
    assert books.value == pytest.approx(1.5, abs=0.01) and books.low < books.value < books.high
    assert figures["lambada"].value == 0.8
    found = divergence(0.1)
    second.divergence = DivergenceReport(
        method="exact", figures=list(divergence_figures(found)), texts=[found]
    )
    second.against = first
    second.comparison = suites.side_by_side(first, second, tolerance=0.02, kl_tolerance=0.03)
    rows = {row.name: row for row in second.comparison.measures}
    assert list(rows) == [
        *("bits per byte, wikitext-2", "last words, lambada", "KL, books"),
        *("same top token, books", "perplexity, books"),
    ]
    assert rows.pop("same top token, books").verdict == "as good", "10 of the 12 points"
    assert rows.pop("perplexity, books").verdict == "as good", "2 of the 3%"
    assert all(row.verdict == "worse" for row in rows.values())
    assert rows["bits per byte, wikitext-2"].loss == pytest.approx(0.05)
    assert (rows["last words, lambada"].only_first, rows["KL, books"].loss) == (
        30,
        pytest.approx(0.1),
    )
    told = {figure.name: figure.value for figure in second.divergence.figures}
    assert told == pytest.approx(
        {
            "books: KL": 0.1,
            "books: same likeliest token": 0.9,
            "books: Σ min(p, q)": 0.96,
            "books: perplexity, B / A": math.exp(0.02),
        }
    )
    text = page.html(second, gate=True)
    assert text.count('class="plot"') == 3 and "gate: fails: bits per byte, wikitext-2" in text
    assert re.search('<h1 class="bad">[^<]*fails: bits per byte, wikitext-2', text)
    again = read_report(write(tmp_path / "b.json", second))
    assert again == second


# ── the command line on stored reports ──────────────────────────────────────────────────────


def write(path: Path, report: EvalReport) -> str:
    path.write_bytes(msgspec.json.encode(report))
    return str(path)


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Reports of a model that knows everything, and of one that cannot copy."""
    folder = tmp_path_factory.mktemp("reports")
    return {
        name: write(folder / f"{name}.json", report_of(Knowing(ignores)))
        for name, ignores in (("good", ""), ("bad", "copy"))
    }


def test_the_gate_by_its_exit_status(stored: dict[str, str], capsys: pytest.CaptureFixture[str]):
    good, bad = stored["good"], stored["bad"]
    assert main(["eval", bad, "--against", good, "--gate"]) == GATE_FAILED == 5
    assert "gate: fails: skills lost more than" in capsys.readouterr().out
    assert main(["eval", good, "--against", good, "--gate"]) == GATE_FAILED
    assert "gate: fails: no required measure has the items" in capsys.readouterr().out
    assert main(["eval", good, "--against", good, "--gate", "--allow-unclear"]) == 0
    assert "gate: passes, for --allow-unclear was given" in capsys.readouterr().out
    assert main(["eval", good, "--against", bad, "--gate"]) == 0
    assert main(["eval", bad, "--against", good]) == 0, "without --gate it only tells"
    assert "with --gate: fails" in capsys.readouterr().out
    assert main(["eval", bad, "--against", good, "--gate", "--tolerance=1"]) == 0


def measure(name: str, verdict: str, items: int = 10) -> Measure:
    fields = dict.fromkeys(("loss", "low", "high", "tolerance", "floor", "ceiling"), 0.0)
    return Measure(
        name=name,
        kind=POINTS,
        items=items,
        first=0.9,
        second=0.9,
        verdict=verdict,
        required=verdict == "as good",
        **fields,
    )


@pytest.mark.parametrize(
    ("measures", "says"),
    [
        (
            [measure("skills", "unclear", 120), *(measure(f"skill {n}", "unclear") for n in "abc"),
             measure("bits per byte, books", "as good"), measure("KL", "as good")],
            "passes: 3 skills: no difference that 10 questions each could show; "
            "text: as good within the tolerance",
        ),
        (
            [measure("task gsm8k", "cannot tell", 50), measure("task ifeval", "cannot tell", 1200),
             measure("KL", "as good", 9)],
            "passes: 2 tasks: no difference that 50 to 1,200 questions each could show; "
            "text: as good within the tolerance",
        ),
        ([measure("skills", "as good", 40)], "passes: skills: as good within the tolerance"),
    ],
    ids=["skills and text", "tasks", "one skill"],
)  # fmt: skip
def test_a_gate_that_passes_says_so_in_one_sentence(measures: list[Measure], says: str):
    comparison = EvalComparison(first="a", second="b", measures=measures, differences=[])
    assert gate_text(comparison) == says


def test_json_and_html_hold_everything(stored: dict[str, str], tmp_path: Path):
    kept, shown = tmp_path / "b.json", tmp_path / "b.html"
    words = ["eval", stored["bad"], "--against", stored["good"]]
    assert main([*words, "--json", str(kept), "--html", str(shown)]) == 0
    report = json.loads(kept.read_text())
    assert report["format"] == "headway-eval"
    items = report["skills"]["items"]
    assert len(items) == 144
    assert set(items[0]) == {"skill", "level", "prompt", "answer", "reply", "right"}
    assert [i["skill"] for i in items if not i["right"]] == ["copy"] * 12
    rows = {row["name"]: row for row in report["comparison"]["measures"]}
    assert (rows["skills"]["lost"], rows["skills"]["gained"]) == (12, 0)
    assert rows["skills"]["verdict"] == "worse" and rows["skill sort"]["lost"] == 0
    assert rows["skill copy"]["p"] == pytest.approx(12 * 2 / 2**12)
    assert report["against"]["model"] == "knowing" and read_report(str(kept)).against is not None
    text = shown.read_text()
    assert not re.search(r"<(script|link|img)", text) and len(text) < 300_000
    assert text.count('class="plot"') == 4
    assert "copy, level 2: 4 wrong" in text and "reply   no" in text


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The two lines of a usage error."""
    assert main(["eval", *words]) == 2
    told = capsys.readouterr().err
    assert len(told.splitlines()) == 2, told
    return told


def test_bad_input_is_told_by_name(
    stored: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    good, broken = stored["good"], tmp_path / "broken.json"
    broken.write_text('{"format": "headway-bench"}')
    no_text = tmp_path / "nothing"
    no_text.mkdir()
    assert "--gate needs something" in refused(capsys, good, "--gate")
    assert "no skill 'fly'" in refused(capsys, good, "--skills", "fly")
    assert "--levels" in refused(capsys, good, "--levels", "4")
    assert "one model" in refused(capsys, good, good)
    assert "is no report of headway eval" in refused(capsys, str(broken))
    assert "No such file" in refused(capsys, str(tmp_path / "none.json"))
    assert str(no_text) in refused(capsys, good, "--suite", "text", "--data", str(no_text))
    assert "http://127.0.0.1:8000" in refused(capsys, "127.0.0.1:8000")
    assert "--test-seed 1000003" in refused(capsys, good, "--test-seed", "7")
    assert "cannot be reached" in refused(capsys, "http://127.0.0.1:9")
    assert "none.html" in refused(capsys, good, "--html", str(tmp_path / "no" / "none.html"))


def test_a_dry_run_says_what_would_be_asked(
    stored: dict[str, str], capsys: pytest.CaptureFixture[str]
):
    assert main(["eval", stored["good"], "--skills", "copy,sort", "--levels=1", "--dry-run"]) == 0
    assert "sort, copy; levels 1; 50 questions each, at most 100" in capsys.readouterr().out


# ── names of embedded models ────────────────────────────────────────────────────────────────


def test_embedded_models_have_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    there = model_folder(None)
    assert there.is_dir() and model_folder(there.name) == there
    assert model_folder("some/folder") == Path("some/folder")
    missing = [name for name in NAMES if not (there.parent / name).is_dir()]
    for name in missing:
        with pytest.raises(UsageError, match="not embedded"):
            model_folder(name)
    monkeypatch.chdir(tmp_path)
    (tmp_path / there.name).mkdir()
    assert model_folder(there.name) == Path(there.name), "a folder of that name is meant first"


def test_a_model_of_the_wrong_skills_is_refused():
    with pytest.raises(UsageError, match="no question in common"):
        suites.side_by_side(
            report_of(Knowing(), skills=["copy"]),
            report_of(Knowing(), skills=["sort"]),
            tolerance=0.02,
            kl_tolerance=0.02,
        )
    assert questions.check_skills(["sort", "copy"]) == ["sort", "copy"]
