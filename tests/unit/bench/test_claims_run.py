"""The table of claims, and a run over it: who is asked what, and what is told where it fails."""

import re
from pathlib import Path

import msgspec
import pytest

from headway.core.errors import CapacityError, UsageError
from literature import page, table
from literature.claim import Claim, Figure, Finding, NotThereError, Promise
from literature.subject import Subject


def test_every_claim_has_a_key_of_its_own_a_source_and_a_family():
    keys = [claim.key for claim in table.CLAIMS]
    assert len(set(keys)) == len(keys) >= 25
    for claim in table.CLAIMS:
        assert claim.family in table.FAMILIES and claim.source and claim.how, claim.key
        assert claim.says.endswith("."), claim.key
    assert {claim.needs for claim in table.CLAIMS} == {"nothing", "server", "folder"}


def test_claims_are_chosen_by_key_and_family():
    assert [c.key for c in table.chosen(["mbu", "kv"])] == [
        *(c.key for c in table.CLAIMS if c.family == "KV"),
        "mbu",
    ]
    assert table.chosen([]) == list(table.CLAIMS)
    assert {c.family for c in table.chosen(["prompt-caching"])} == {"Prompt caching"}
    with pytest.raises(UsageError, match="no claim and no family 'speed'") as caught:
        table.chosen(["speed"])
    assert "kv-13b" in caught.value.fix


def claim(key: str, needs: str, measure) -> Claim:
    return Claim(
        key=key, family="KV", says=f"{key}.", source="nobody", measure=measure, needs=needs
    )


def two(subject: Subject) -> Finding:
    return Finding(
        figures=[Figure(name="speed", value=2.0, unit="x", low=1.9, high=2.1)],
        promise=Promise(low=2.0),
        why="It | is.",
    )


def fails(subject: Subject) -> Finding:
    raise CapacityError("No room.", "Buy some.")


def lacks(subject: Subject) -> Finding:
    raise NotThereError("no heads")


CLAIMS = [
    claim("good", "nothing", two),
    claim("inside", "folder", two),
    claim("full", "server", fails),
    claim("bare", "server", lacks),
]


def test_a_url_is_asked_what_it_allows_and_the_rest_is_listed():
    told: list[str] = []
    report = table.run(Subject(url="http://x", watch=told.append), CLAIMS)
    assert [row.missing for row in report.rows] == ["", table.NOT_ASKED, "No room.", "no heads"]
    assert report.verdicts() == {"holds": 1, "not measured": 3}
    assert told[0] == "[1/4] good." and len(told) == 4


def test_a_run_that_is_cut_short_leaves_what_it_has():
    def stops(subject: Subject) -> Finding:
        raise KeyboardInterrupt

    subject = Subject(url="http://x")
    report = table.empty(subject)
    with pytest.raises(KeyboardInterrupt):
        table.run(subject, [CLAIMS[0], claim("cut", "nothing", stops)], report)
    assert [row.key for row in report.rows] == ["good"]
    assert "good" in page.html(report)


def test_what_is_made_once_is_made_once():
    subject, made = Subject(), []

    def make(of: Subject) -> int:
        made.append(of)
        return len(made)

    assert (subject.once(make), subject.once(make)) == (1, 1)


def test_a_report_is_told_as_words_table_json_and_page():
    report = table.run(Subject(url="http://x"), CLAIMS)
    assert "speed: 2x (1.9 … 2.1)" in table.words_of(report.rows[0])
    assert "holds: It | is." in table.words_of(report.rows[0])
    assert f"not measured: {table.NOT_ASKED}" in table.words_of(report.rows[1])
    lines = table.markdown(report).splitlines()
    assert len(lines) == 2 + len(CLAIMS)
    assert {line.count("|") for line in lines} == {6}, "a bar in a text would be a column"
    again = msgspec.json.decode(msgspec.json.encode(report), type=table.Report)
    assert again == report
    text = page.html(report)
    assert "no heads" in text and "speed" in text


def test_a_promise_of_other_scale_is_drawn_within_the_picture():
    """A hundredth and a thousandfold are drawn at the edges."""
    small, large = (
        table.Row(
            key="k", family="KV", says="", source="", how="",
            finding=Finding(figures=[Figure(name="", value=v)], promise=Promise(low=1.0), why=""),
        )
        for v in (0.01, 1000.0)
    )  # fmt: skip
    assert page.ratios(small) == (page.LEAST,) * 3
    assert page.ratios(large) == (page.MOST,) * 3


ROOT = Path(__file__).resolve().parents[3]
SCRIPTS = {
    path.stem: re.findall(
        r'"([a-z0-9-]+)"', path.read_text(encoding="utf-8").rpartition("__main__")[2]
    )
    for path in (ROOT / "benchmarks" / "claims").glob("*.py")
}
LONGER = {"quantized_skills": "bits-by-skill", "pruned_skills": "lottery"}
"""Scripts with a claim of their own, which `claims_page.py` leaves out for its time."""


def test_each_claim_has_one_script():
    asked = [key for name, keys in SCRIPTS.items() if name != "script" for key in keys]
    assert sorted(asked) == sorted(claim.key for claim in table.CLAIMS)
    assert not any(SCRIPTS[name] for name in LONGER)


def test_the_page_of_the_docs_has_every_claim_and_its_script():
    text = (ROOT / "docs" / "claims.md").read_text(encoding="utf-8")
    for claim in table.CLAIMS:
        assert claim.says in text, claim.key
    for name in SCRIPTS.keys() - {"script"}:
        assert f"`{name}.py`" in text, name
