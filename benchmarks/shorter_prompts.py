"""Prompts with a part of their documents: tokens saved against answers right.

    python benchmarks/shorter_prompts.py [FOLDER] [--questions 40] [--url URL] [--json FILE]

Serves FOLDER (the embedded model with its draft; another needs --flags "--draft-model=…") and asks
lookups, extractions and refusals of a document among stories: whole, and with 0.8, 0.5 and 0.3 of
its tokens kept, by surprisal and at random. Then it says what a cut costs: the draft's seconds for
each 1,000 tokens of a document beside those of the model's prefill. About 3 minutes on two cores
(40 questions of each skill at each level). Exits with 1 where surprisal is not surely better than
random at every share.
"""

import argparse
import random
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import msgspec

from common import write_json
from headway.evals.shortened import Column, ask, chat_of, table
from headway.evals.skills.reading import filler
from headway.evals.url import UrlModel, open_url
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
    given = parser.parse_args()
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


if __name__ == "__main__":
    sys.exit(main())
