"""How many examples a model needs before a question, by skill: asked with all and with fewer.

    python benchmarks/examples_needed.py [FOLDER] [--questions 40] [--examples 8] [--url URL]

Chats as an application would record them: eight questions of a skill with their right answers,
always the same, and then another question. `headway eval --suite examples` asks them with 8, 4, 2,
1 and none; so does this script, skill by skill, and prints its tables. Two minutes on two cores.
"""

import argparse
import sys
from contextlib import ExitStack
from itertools import islice

from headway.evals.fewer import Column, Recorded, ask, table
from headway.evals.questions import most_tokens
from headway.evals.skills.suite import examples
from headway.evals.url import open_url
from served import headway

SKILLS = ("classify", "lookup", "sort")
LEVEL = 2


def main() -> int:
    """Print a table for each skill."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", default="headway-tiny")
    parser.add_argument("--flags", default="--price-per-hour=1", help="flags of the server")
    parser.add_argument("--url", default="", help="a server that runs already")
    parser.add_argument("--questions", type=int, default=40, help="of each skill")
    parser.add_argument("--examples", type=int, default=8, help="before each question")
    parser.add_argument("--seed", type=int, default=1_000_003)
    given = parser.parse_args()
    with ExitStack() as stack:
        url = given.url or stack.enter_context(
            headway("headway", given.folder, given.flags).running()
        )
        model = stack.enter_context(open_url(url))
        for skill in SKILLS:
            chats = recorded(skill, given.examples, given.questions, given.seed)
            report = ask(model, chats, most_chats=given.questions, seed=given.seed, on_column=told)
            report.price(model.stats())
            print(f"\n**{skill}**, level {LEVEL}\n\n{table(report)}", flush=True)
    return 0


def recorded(skill: str, count: int, questions: int, seed: int) -> list[Recorded]:
    """So many questions of a skill behind the same `count` examples, with their right answers."""
    asked = (e for e in examples(skill, LEVEL, seed) if not e.before)
    shown = [
        {"role": role, "content": text}
        for example in islice(asked, count)
        for role, text in (("user", example.prompt), ("assistant", example.answer))
    ]
    return [
        Recorded(
            body={
                "messages": [*shown, {"role": "user", "content": example.prompt}],
                "max_tokens": most_tokens(skill),
            },
            answer=example.answer,
        )
        for example in islice(asked, questions)
    ]


def told(column: Column) -> None:
    """Progress, beside the tables."""
    same = f"{sum(column.same)} of {len(column.same)}"
    print(f"{column.examples} examples: {same} the same", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
