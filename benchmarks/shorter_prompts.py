"""Prompts with a part of their documents: tokens saved against answers right.

    python benchmarks/shorter_prompts.py [FOLDER] [--questions 40] [--url URL] [--json FILE]
    python benchmarks/shorter_prompts.py --scores [--draft DRAFT]

Serves FOLDER (the embedded model with its draft; another needs --flags "--draft-model=…") and asks
lookups, extractions and refusals of a document among stories: whole, and with 0.8, 0.5 and 0.3 of
its tokens kept, by surprisal and at random. Then it says what a cut costs: the draft's seconds for
each 1,000 tokens of a document beside those of the model's prefill. About 5 minutes on two cores
(40 questions of each skill at each level). Exits with 1 where surprisal is not surely better than
random at every share.

--scores asks no server: it counts in how many documents what is needed stays whole, by surprisal
alone, by the words of the question alone, by their sum, with the question read before the text in
place of its words, and at random (half a minute).
"""

import argparse
import random
import sys
import time
from contextlib import ExitStack
from itertools import islice
from pathlib import Path

import msgspec

from common import write_json
from headway.evals.shortened import (
    KEEPS,
    Body,
    Column,
    ask,
    chat_of,
    parted,
    questions_of,
    table,
)
from headway.evals.skills.example import Example
from headway.evals.skills.reading import filler
from headway.evals.url import UrlModel, open_url
from headway.frontend.shorten.choose import by_chance, choose, relevance, words
from headway.frontend.shorten.units import split
from headway.spec.embedded import model_folder
from headway.surprisal import OPTIONS, surprisals
from headway.whole_model import FolderModel
from served import headway

TEXTS = 12
CHARACTERS = 6000


def main() -> int:
    """Print the tables; 1 where a random cut does as well."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", default="headway-tiny")
    parser.add_argument("--flags", default="", help="more flags of the server")
    parser.add_argument("--url", default="", help="a server that runs already")
    parser.add_argument("--questions", type=int, default=40, help="of each skill at each level")
    parser.add_argument("--seed", type=int, default=1_000_003)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--scores", action="store_true", help="what stays, by way of scoring")
    parser.add_argument("--draft", default="headway-draft", help="--scores: who scores")
    given = parser.parse_args()
    if given.scores:
        print(scored(given))
        return 0
    with ExitStack() as stack:
        url = given.url or stack.enter_context(
            headway("headway", given.folder, given.flags).running()
        )
        model = stack.enter_context(open_url(url))
        report = ask(model, questions=given.questions, seed=given.seed, on_column=told)
        print(table(report))
        print(costs(model))
    if given.json:
        write_json(given.json, msgspec.to_builtins(report))
    return 0 if report.better_than_random else 1


def told(column: Column) -> None:
    """Progress, beside the table."""
    right, asked, _, _ = column.share()
    print(f"keep {column.keep:g} {column.method}: {right} of {asked}", file=sys.stderr, flush=True)


def costs(model: UrlModel) -> str:
    """Seconds to the end of one token's answer, whole and cut to a half, one text after another:
    texts that nobody has sent before, so that neither is found in a cache."""
    seconds = {}
    for name, extra in (("whole", {}), ("cut", {"context": {"keep": 0.5}})):
        texts = [filler(random.Random(f"{name} {i}"), CHARACTERS) for i in range(TEXTS)]
        bodies = [{**chat_of("", text, "What is it about?"), "max_tokens": 1} for text in texts]
        model.whole_answers([{**bodies[0], **extra}])
        started_s = time.perf_counter()
        tokens = sum(
            model.whole_answers([{**body, **extra}])[0]["usage"]["prompt_tokens"]
            for body in bodies[1:]
        )
        seconds[name] = (time.perf_counter() - started_s) / (TEXTS - 1), tokens / (TEXTS - 1)
    (whole_s, whole), (cut_s, cut) = seconds["whole"], seconds["cut"]
    return (
        f"\nOne request alone: {whole:.0f} prompt tokens in {whole_s * 1e3:.0f} ms; cut to "
        f"{cut:.0f} in {cut_s * 1e3:.0f} ms, the draft's reading included."
    )


# ── what each way of scoring keeps ──────────────────────────────────────────────────────────


def scored(given: argparse.Namespace) -> str:
    """A table: documents in which all that is needed stays, by skill, share and way."""
    model = FolderModel(model_folder(given.draft), **OPTIONS)
    lines = [f"| what | keep | {' | '.join(WAYS)} |", "| --- " * (2 + len(WAYS)) + "|"]
    for name, cases in kinds(given).items():
        ways = [ways_of(model, units, question) for units, question, _ in cases]
        sizes = [model.tokenizer.counts(units) for units, _, _ in cases]
        for keep in KEEPS:
            cells = []
            for way in WAYS:
                stay = 0
                for (units, _, needed), size, each in zip(cases, sizes, ways, strict=True):
                    kept = choose(size, [False] * len(units), each[way], keep).kept
                    stay += all(kept[i] for i in needed)
                cells.append(f"{stay / len(cases):.0%}")
            lines.append(f"| {name} | {keep:g} | {' | '.join(cells)} |")
    return "\n".join(lines)


WAYS = ("surprisal", "question before", "words", "surprisal + words", "random")
Case = tuple[list[str], str, list[int]]
"""Units, the question, and which units hold what is asked for."""


def ways_of(model: FolderModel, units: list[str], question: str) -> dict[str, list[float]]:
    """The scores of the units by each way."""
    plain, words = surprisals(model, units), relevance(units, question)
    told = surprisals(model, [f"{question}\n", *units])[1:]
    return {
        "surprisal": plain,
        "question before": [2 * a - b for a, b in zip(plain, told, strict=True)],
        "words": words,
        "surprisal + words": [a + b for a, b in zip(plain, words, strict=True)],
        "random": by_chance(units),
    }


def kinds(given: argparse.Namespace) -> dict[str, list[Case]]:
    """Lists alone, lists behind which stories stand, facts and sentences among stories."""
    found: dict[str, list[Case]] = {}
    asked = [("lookup", 2), ("lookup", 3), ("extract", 2), ("refuse", 3)]
    for skill, level in asked:
        cases = islice(questions_of(skill, level, given.seed), given.questions * 3)
        found[f"{skill} {level}"] = [case_of(skill, *pair) for pair in cases]
    return found


def case_of(skill: str, example: Example, body: Body) -> Case:
    """One document in units, and those that the answer is in."""
    parts = body["messages"][0]["content"]
    document = next(p["document"]["data"] for p in parts if p["type"] == "document")
    question = "\n".join(p["text"] for p in parts if p["type"] == "text")
    units = split(document).units
    own = {unit.strip() for unit in split(parted(example, skill)[1]).units}
    if skill == "lookup":
        key = example.answer.split()[1]
        needed = [i for i, unit in enumerate(units) if unit.strip().startswith(key)]
    else:
        needed = [i for i, unit in enumerate(units) if unit.strip() in own]
    if skill == "refuse":
        named = words(question.split(" is the ")[-1].split("?")[0]) - {"of"}
        needed = [i for i in needed if words(units[i]) & named]
    return units, question, needed


if __name__ == "__main__":
    sys.exit(main())
