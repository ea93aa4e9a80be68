"""How often would a draft be right: `python benchmarks/acceptance.py TARGET DRAFT`.

Held-out chats of every skill are answered by the target, greedily, and at each position of its
answers both models' distributions are compared: greedy agreement, the share of positions with the
same likeliest token, and acceptance, the mean of Σ min(p, q), which is the share of drafted tokens
that speculative sampling keeps (Leviathan et al. 2023). The same on books as they are, and on what
the target samples after `--prompt`. Both folders must share a tokenizer. Intervals are of 95%, over
answers drawn again.
"""

import argparse
import os
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import numpy as np

from common import heading
from headway import SamplingParams
from headway.evals.divergence import Compared, compare, compare_tokens
from headway.evals.skills.suite import LEVELS, SKILLS, TEST_SEED, examples
from headway.evals.statistics import interval, paired_bootstrap
from headway.evals.text import read_text, windows
from headway.whole_model import FolderModel

ROOT = Path(__file__).resolve().parents[1]
DATA = Path(os.environ.get("HEADWAY_SHARED") or ROOT / ".." / "shared") / "data"
MAX_TOKENS = 200


def compare_written(
    target: FolderModel, draft: FolderModel, prompts: list[list[int]], sampling: SamplingParams
) -> list[Compared]:
    """Both models on what the target writes after each prompt, its end token included."""
    outputs = target.llm.generate(
        [{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False
    )
    limit = min(target.max_model_len, draft.max_model_len)
    return [
        compare_tokens(target, draft, (ids + output.outputs[0].token_ids)[: limit - 1], len(ids))
        for ids, output in zip(prompts, outputs, strict=True)
    ]


def skill_prompts(target: FolderModel, skill: str, each: int) -> list[list[int]]:
    """Held-out questions of all levels as token ids, those that leave room for an answer."""
    found = [
        target.tokenizer.chat_ids(example.messages)
        for level in LEVELS
        for example in islice(examples(skill, level, TEST_SEED), each)
    ]
    return [ids for ids in found if len(ids) + MAX_TOKENS < target.max_model_len]


def share(values: Sequence[float], counts: Sequence[int]) -> str:
    """0.812 (0.790 … 0.834)."""
    weights = np.array(counts, dtype=float)
    low, high = interval(paired_bootstrap(np.array(values, dtype=float), weights))
    return f"{sum(values) / sum(counts):.3f} ({low:.3f} … {high:.3f})"


def row(name: str, found: Sequence[Compared]) -> str:
    """One row of the table."""
    counts = [each.num_tokens for each in found]
    agreed = share([each.agreed for each in found], counts)
    accepted = share([each.overlap or 0.0 for each in found], counts)
    kl = sum(each.kl for each in found) / sum(counts)
    return f"| {name} | {sum(counts)} | {agreed} | {accepted} | {kl:.3f} |"


def main() -> None:
    """Compare and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", type=Path)
    parser.add_argument("draft", type=Path)
    parser.add_argument("--data", type=Path, default=DATA, help="folder that holds eval/ and text/")
    parser.add_argument("--questions", type=int, default=10, help="of each skill and level")
    parser.add_argument("--windows", type=int, default=100, help="of books; 0 for none")
    parser.add_argument("--prompt", default="", help="sampled from by the target at temperature 1")
    parser.add_argument("--samples", type=int, default=20, help="with --prompt")
    chosen = parser.parse_args()

    target, draft = (
        FolderModel(folder, kv_memory="96MiB") for folder in (chosen.target, chosen.draft)
    )
    columns = ("positions", "greedy agreement", "acceptance Σ min(p, q)", "KL, nats")
    print(heading(["written by", *columns]))
    everything: list[Compared] = []
    if target.tokenizer.template is not None and chosen.questions:
        greedy = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
        for skill in SKILLS:
            prompts = skill_prompts(target, skill, chosen.questions)
            found = compare_written(target, draft, prompts, greedy)
            print(row(f"target, {skill}", found), flush=True)
            everything += found
        print(row("target, all skills", everything), flush=True)
    if chosen.prompt:
        prompts = [target.encode(chosen.prompt)] * chosen.samples
        sampled = SamplingParams(temperature=1, max_tokens=MAX_TOKENS)
        found = compare_written(target, draft, prompts, sampled)
        print(row(f"target, sampled after {chosen.prompt!r}", found), flush=True)
    if chosen.windows:
        cut = windows(read_text(chosen.data, "books"), limit=chosen.windows)
        print(row("people, books", compare(target, draft, cut).passages))


if __name__ == "__main__":
    main()
