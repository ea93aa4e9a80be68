"""Questions of documents, whole and cut: the same in every column, paired, and judged."""

from itertools import islice
from typing import Any

import pytest

from headway.evals.shortened import (
    KEEPS,
    METHODS,
    SKILLS,
    Column,
    ShortenedReport,
    ask,
    questions_of,
    split_document,
    table,
)
from headway.evals.skills.suite import LEVELS, examples

SEED = 1_000_003


@pytest.mark.parametrize("skill", SKILLS)
@pytest.mark.parametrize("level", LEVELS)
def test_a_question_is_parted_and_nothing_of_it_is_lost(skill, level):
    for example in islice(examples(skill, level, SEED), 60):
        if example.before:
            continue
        before, text, behind = split_document(example, skill)
        words = f"{before} {text} {behind}".split()
        assert words == example.prompt.split()
        assert text.strip() and (before or behind)


@pytest.mark.parametrize("skill", SKILLS)
def test_the_text_is_a_document_and_the_question_is_not(skill):
    for example, body in islice(questions_of(skill, 2, SEED), 20):
        [message] = body["messages"]
        kinds = [part["type"] for part in message["content"]]
        assert kinds.count("document") == 1 and "text" in kinds
        document = next(p for p in message["content"] if p["type"] == "document")
        told = " ".join(p["text"] for p in message["content"] if p["type"] == "text")
        assert "Once" not in told and "data" in document["document"]
        if skill == "lookup":
            key = example.answer.split()[1].rstrip(":")
            assert key in told and f"{key}: " in document["document"]["data"]


class Fake:
    """Answers rightly where less than half is cut, or where surprisal cuts."""

    def __init__(self) -> None:
        self.asked: list[list[dict[str, Any]]] = []
        self.answers = {
            str(body["messages"]): example.answer
            for skill in SKILLS
            for level in LEVELS
            for example, body in islice(questions_of(skill, level, SEED), 12)
        }

    def whole_answers(self, bodies):
        self.asked.append(list(bodies))
        return [self.answer(body) for body in bodies]

    def answer(self, body):
        wanted = body.get("context", {"keep": 1.0, "method": "surprisal"})
        right = wanted["method"] == "surprisal" or wanted["keep"] > 0.5
        content = self.answers[str(body["messages"])] if right else "?"
        usage = {"prompt_tokens": round(100 * wanted["keep"])}
        return {"choices": [{"message": {"content": content}}], "usage": usage}


def test_every_column_asks_the_same_questions():
    model = Fake()
    report = ask(model, questions=4, seed=SEED)
    assert len(report.columns) == len(model.asked) == 1 + len(KEEPS) * len(METHODS)
    for bodies in model.asked[1:]:
        assert [b["messages"] for b in bodies] == [b["messages"] for b in model.asked[0]]
    assert all("context" not in body for body in model.asked[0])
    contexts = [bodies[0]["context"] for bodies in model.asked[1:]]
    assert contexts == [{"keep": k, "method": m} for k in KEEPS for m in METHODS]


def test_shares_savings_and_chances():
    report = ask(Fake(), questions=4, seed=SEED)
    half, chance = report.column(0.5, "surprisal"), report.column(0.5, "random")
    assert half.share()[:2] == (36, 36) and chance.share()[:2] == (0, 36)
    assert half.share("lookup")[:2] == (12, 12)
    assert half.saved(report.columns[0]) == pytest.approx(0.5)
    chances = report.chances()
    assert chances[0.5] < 1e-6 and chances[0.8] == 1.0
    assert not report.better_than_random, "at 0.8 both had all right"


def test_better_has_to_be_better_at_every_share():
    def column(keep: float, method: str, num_right: int) -> Column:
        right = [i < num_right for i in range(100)]
        return Column(
            keep=keep,
            method=method,
            skills=["lookup"] * 100,
            right=right,
            prompt_tokens=[50] * 100,
        )

    def report(right: int) -> ShortenedReport:
        pairs = [(0.8, right), (0.5, 60), (0.3, 60)]
        columns = [column(1.0, "whole", 70)]
        for keep, best in pairs:
            columns += [column(keep, "surprisal", best), column(keep, "random", 40)]
        return ShortenedReport(seed=0, questions=100, columns=columns)

    assert report(60).better_than_random
    assert not report(42).better_than_random


def test_the_table_has_a_row_for_each_column():
    lines = table(ask(Fake(), questions=2, seed=SEED)).splitlines()
    assert len(lines) == 2 + 7 and lines[0].count("|") == lines[2].count("|")
    assert "| 0.5 | surprisal | 50% | 100% (" in lines[5] and "| 0.5 | random |" in lines[6]
