"""What it costs to read or to keep fewer keys: `python benchmarks/kept_keys.py smollm2`.

Of published weights of 16 bits (or gemma3-270m): the ratio of perplexities on wikitext-2, scored
behind the first half of windows of `--window` tokens, and how many key-value lines in texts of
`--lengths` tokens are retrieved. `--rows` are engine options, one row each. What `--json` holds is
not measured again, so that a table can be made in parts. `headway eval MODEL --against … --gate`
judges such options of any model.
"""

import argparse
import itertools
import json
import math
import os
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from common import markdown, write_json  # noqa: E402
from headway.core.request import SamplingParams  # noqa: E402
from headway.evals.statistics import interval, paired_bootstrap  # noqa: E402
from headway.evals.text import read_text  # noqa: E402
from headway.whole_model import FolderModel  # noqa: E402
from published_weights import MODELS, folder_of  # noqa: E402

DATA = Path(os.environ.get("HEADWAY_SHARED") or ROOT / ".." / "shared") / "data"


class Retrieval(NamedTuple):
    """A form of question that a model answers with its full KV: `keys` lines a text."""

    line: str
    question: str
    keys: int


RETRIEVALS = {
    "smollm2": Retrieval("\n\n{0}: {1}\n{0}: {1}\n{0}: {1}\n\n", "\n\n{0}:", 4),
    "gemma3-270m": Retrieval(
        "\n\nThe pass key of the {0} is {1}. Remember it. {1} is the pass key of the {0}.\n\n",
        "\n\nWhat is the pass key of the {0}? The pass key of the {0} is",
        2,
    ),
}
WORDS = (
    "anchor basket candle dragon engine falcon garden hammer island jacket kettle ladder magnet "
    "needle orange pencil rocket saddle temple violin window yellow zipper bottle"
).split()
ROWS = "kv_cache_dtype=int8,kv_cache_dtype=int4,kv_read=50%,kv_read=25%,kv_keep=50%,kv_keep=25%"
ANSWER_TOKENS = 7


class Prompt(NamedTuple):
    """Token ids whose answer begins with `value`."""

    token_ids: list[int]
    value: str


def tokens_of(model: FolderModel, text: str) -> tuple[list[int], list[int]]:
    """Return the special tokens that begin a text, and the text's own."""
    first = model.encode("")
    return first, model.encode(text)[len(first) :]


def retrieval_prompts(
    model: FolderModel, haystack: list[int], form: Retrieval, length: int, seed: str
) -> list[Prompt]:
    """Return questions about one text of `length` tokens; each line has a stretch of its own."""
    draw = random.Random(seed)
    names = draw.sample(WORDS, form.keys)
    values = [str(draw.randrange(10_000, 100_000)) for _ in names]
    pairs = zip(names, values, strict=True)
    lines = [tokens_of(model, form.line.format(*pair))[1] for pair in pairs]
    questions = [tokens_of(model, form.question.format(name))[1] for name in names]
    first, _ = tokens_of(model, "")
    room = length - len(first) - sum(map(len, lines)) - max(map(len, questions))
    begin = draw.randrange(len(haystack) - room)
    places = [int((index + draw.random()) * room / form.keys) for index in range(form.keys)]
    found = first + haystack[begin : begin + places[0]]
    for line, (place, end) in zip(lines, itertools.pairwise([*places, room]), strict=True):
        found += line + haystack[begin + place : begin + end]
    return [Prompt(found + each, value) for each, value in zip(questions, values, strict=True)]


def num_retrieved(model: FolderModel, prompts: list[Prompt]) -> int:
    """Return how many answers begin with their value; the first prompt fills the prefix cache."""
    greedy = SamplingParams(temperature=0, max_tokens=ANSWER_TOKENS, ignore_eos=True)
    found = 0
    for batch in (prompts[:1], prompts[1:]):
        asked = [{"prompt_token_ids": prompt.token_ids} for prompt in batch]
        outputs = model.llm.generate(asked, greedy, use_tqdm=False)
        for prompt, output in zip(batch, outputs, strict=True):
            found += output.outputs[0].text.strip().startswith(prompt.value)
    return found


def nats_by_window(model: FolderModel, text: list[int], count: int, size: int) -> list[float]:
    """Return nats a token of the second half of windows that are spread over a text."""
    first, _ = tokens_of(model, "")
    begins = [index * (len(text) - size) // count for index in range(count)]
    rows = [[*first, *text[begin : begin + size - len(first)]] for begin in begins]
    scored = model.score_ids(rows)
    return [-math.fsum(score.logprobs[size // 2 :]) / (size - size // 2) for score in scored]


def measured(name: str, given: str, chosen: argparse.Namespace) -> dict[str, list[Any]]:
    """Return nats by window and lines retrieved by text (rows: lengths) of one row."""
    options = dict([given.split("=", 1)]) if given else {}
    folder = folder_of(MODELS[name])
    model = FolderModel(folder, kv_memory="1GiB", max_model_len=8192, **options)
    form, right = RETRIEVALS[name], []
    _, text = tokens_of(model, read_text(DATA, "wikitext-2"))
    for length in chosen.lengths:
        seeds = [f"{length} {number}" for number in range(-(-chosen.prompts // form.keys))]
        asked = [retrieval_prompts(model, text, form, length, seed) for seed in seeds]
        right.append([num_retrieved(model, prompts) for prompts in asked])
    return {"nats": nats_by_window(model, text, chosen.windows, chosen.window), "right": right}


def ratio_cells(found: dict[str, list[Any]], whole: dict[str, list[Any]]) -> list[str]:
    """Return the cells of a row: ratios with their 95% intervals."""
    more = np.subtract(found["nats"], whole["nats"])
    low, high = (math.exp(bound) for bound in interval(paired_bootstrap(more)))
    right, of_whole = (np.array(each["right"], dtype=float).ravel() for each in (found, whole))
    bounds = interval(paired_bootstrap(right, of_whole))
    return [
        f"{math.exp(more.mean()):.3f} ({low:.3f} … {high:.3f})",
        ", ".join(str(sum(row)) for row in found["right"]),
        f"{right.sum() / of_whole.sum():.2f} ({bounds[0]:.2f} … {bounds[1]:.2f})",
    ]


def measure(chosen: argparse.Namespace) -> None:
    """Measure the rows that are not known yet, and print the table."""
    name = chosen.model
    known = json.loads(chosen.json.read_text()) if chosen.json and chosen.json.exists() else {}
    rows = ["", *filter(None, chosen.rows.split(","))]
    for given in rows:
        if given not in known:
            known[given] = measured(name, given, chosen)
            write_json(chosen.json, known)
            print(given or "whole", ratio_cells(known[given], known[""]), flush=True)
    form = RETRIEVALS[name]
    asked = form.keys * len(known[""]["right"][0])
    lengths = ", ".join(map(str, chosen.lengths))
    columns = [name, "perplexity, ratio", f"right of {asked} at {lengths} tokens", "ratio"]
    table = [[given or "whole", *ratio_cells(known[given], known[""])] for given in rows]
    print(markdown(columns, table))


def lengths_of(text: str) -> Sequence[int]:
    """Return the numbers of "1024,2048"."""
    return [int(word) for word in text.split(",")]


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=RETRIEVALS)
    parser.add_argument("--rows", default=ROWS, help="engine options")
    parser.add_argument("--windows", type=int, default=24)
    parser.add_argument("--lengths", type=lengths_of, default=[1024, 2048, 4096, 6144])
    parser.add_argument("--prompts", type=int, default=24, help="of each length")
    parser.add_argument("--window", type=int, default=2048, help="tokens of a window")
    parser.add_argument("--json", type=Path, help="what was measured")
    chosen = parser.parse_args()
    measure(chosen)


if __name__ == "__main__":
    main()
