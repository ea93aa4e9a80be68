"""What it costs to read or to keep fewer keys: `python benchmarks/kept_keys.py [FOLDER]`.

The model reads everything, and with `--kv-read` the best blocks alone, once with the layers of
`--whole-layers` whole and once without any; or with `--option kv-keep` it keeps that much of a
prompt. Each row answers lookups whose question stands so many characters behind the list, and is
compared with the whole model on windows of text, every token of which is read as if it had been
generated; of prompts that are kept in part, those of the second half. Shares of KV are those of
`--context` tokens, over all layers; bounds of keys count as held and as read.

`--published smollm2` (or gemma3-270m) measures published weights of 16 bits instead: the ratio of
perplexities on wikitext-2, scored behind the first half of windows of `--window` tokens, and how
many key-value lines in texts of `--lengths` tokens are retrieved. `--rows` are engine options, one
row each. What `--json` holds is not measured again, so that a table can be made in parts.
"""

import argparse
import itertools
import json
import math
import os
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from common import heading, markdown, write_json  # noqa: E402
from headway.cli.common import model_folder  # noqa: E402
from headway.config.kv_keep import tokens_kept  # noqa: E402
from headway.config.kv_read import blocks_read  # noqa: E402
from headway.core.request import SamplingParams  # noqa: E402
from headway.evals.divergence import compare  # noqa: E402
from headway.evals.questions import ask  # noqa: E402
from headway.evals.statistics import interval, paired_bootstrap  # noqa: E402
from headway.evals.text import TEXTS, read_text, windows  # noqa: E402
from headway.whole_model import FolderModel  # noqa: E402
from published_weights import MODELS, folder_of  # noqa: E402

DATA = Path(os.environ.get("HEADWAY_SHARED") or ROOT / ".." / "shared") / "data"
SEED = 1_000_003


def shares(model: FolderModel, context: int) -> tuple[float, float]:
    """(KV held, KV read by a decode) of a context, as shares of the whole model's."""
    settings, spec = model.llm.settings, model.llm.spec
    size, dtype = settings.cache.block_size, settings.cache.dtype
    held = read = whole = 0.0
    for group in spec.kv_groups:
        keys = group.bytes_per_token(dtype) * context
        bounds = keys - keys * size / (size + 1) if group.bounds and dtype == "bfloat16" else 0.0
        num_blocks = -(-context // size)
        part = blocks_read(settings.cache.read, num_blocks) / num_blocks if group.bounds else 1.0
        whole += keys - bounds
        if group.chooses:
            part = tokens_kept(settings.cache.keep, context, size) / context
            keys *= part
        held += keys
        read += (keys - bounds) * part + bounds if group.bounds else keys
    return held / whole, read / whole


def row(name: str, model: FolderModel, whole: FolderModel, chosen: argparse.Namespace) -> str:
    """One row of the table."""
    asked = ask(model, skills=(), questions=chosen.questions, seed=SEED, distances=chosen.distance)
    right = [share for share in asked.shares if share.skill and share.level == 0]
    held, read = shares(model, chosen.context)
    cells = [f"{held:.3f}", f"{read:.3f}", ", ".join(f"{one.right}" for one in right)]
    cells.append(f"{right[0].asked}" if right else "–")
    if model is whole:
        cells += ["0", "–"]
    else:
        text = read_text(chosen.data, chosen.text)
        found = compare(whole, model, windows(text, limit=chosen.windows))
        cells += [f"{found.kl:.4f}", f"{found.agreement:.1%}"]
    return f"| {name} | {' | '.join(cells)} |"


# ── published weights ───────────────────────────────────────────────────────────────────────


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


def published(name: str, chosen: argparse.Namespace) -> None:
    """Measure the rows that are not known yet, and print the table."""
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
    """Judge and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", default=None)
    parser.add_argument("--keep", default="50,25,12.5", help="percent that is read or kept")
    parser.add_argument("--option", choices=("kv-read", "kv-keep"), default="kv-read")
    parser.add_argument("--whole-layers", default="1,2")
    parser.add_argument("--distance", default="0,300,800", help="characters before the question")
    parser.add_argument("--questions", type=int, default=10, help="a third of the lookups")
    parser.add_argument("--data", type=Path, default=DATA, help="folder that holds eval/ and text/")
    parser.add_argument("--text", choices=TEXTS, default="books")
    parser.add_argument("--windows", type=int, default=24)
    parser.add_argument("--context", type=int, default=2048, help="whose shares are told")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument(
        "--published", choices=RETRIEVALS, help="weights of 16 bits, in place of FOLDER"
    )
    parser.add_argument("--rows", default=ROWS, help="engine options, with --published")
    parser.add_argument("--lengths", type=lengths_of, default=[1024, 2048, 4096, 6144])
    parser.add_argument("--prompts", type=int, default=24, help="of each length")
    parser.add_argument("--window", type=int, default=2048, help="tokens of a window")
    parser.add_argument("--json", type=Path, help="what was measured")
    chosen = parser.parse_args()
    if chosen.published:
        published(chosen.published, chosen)
        return
    chosen.distance = [int(word) for word in chosen.distance.split(",")]
    folder = model_folder(chosen.folder)
    options: dict[str, Any] = {"kv_memory": "1GiB", "kv_cache_dtype": chosen.kv_cache_dtype}
    whole = FolderModel(folder, **options)
    apart = ", ".join(map(str, chosen.distance))
    print(
        heading(
            [chosen.option, "KV held", "KV read", f"right at {apart}", "of", "KL, nats", "top-1"]
        )
    )
    print(row("everything", whole, whole, chosen), flush=True)
    with tempfile.TemporaryDirectory() as place:
        path = Path(place, "whole.yaml")
        rows = ", ".join(f"{layer}: whole" for layer in chosen.whole_layers.split(","))
        path.write_text(f"layers: {{{rows}}}\n")
        for percent, file in itertools.product(chosen.keep.split(","), ("", str(path))):
            share = {chosen.option.replace("-", "_"): f"{percent}%", "kv_layers": file}
            name = f"{percent}%" + (f", layers {chosen.whole_layers} whole" if file else "")
            model = FolderModel(folder, **options, **share)
            print(row(name, model, whole, chosen), flush=True)


if __name__ == "__main__":
    main()
