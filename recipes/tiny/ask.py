"""Asks a model held-out chats as frameworks write them, and counts the right answers of each kind.

It is given the folder of the training run and the exported folder, and writes `varied.json`.
It promises that none of these chats was trained on; an answer counts when the whole of it is right.
"""

import argparse
import json
import random
from itertools import islice
from pathlib import Path

from headway import LLM, SamplingParams
from headway.evals.skills.example import Example, normal
from headway.evals.skills.varied import VARIED, held_out, unseen
from headway.evals.statistics import wilson

SEED = 1_000_003
MEMORY = 256 * 2**20


def is_right(kind: str, example: Example, reply: str) -> bool:
    """The same text or JSON; without a schema in the prompt, JSON of the same values."""
    if kind != unseen.__name__:
        return example.accepts(reply)
    told, right = normal(reply), normal(example.answer)
    values = [list(x[1].values()) for x in (told, right) if isinstance(x, tuple)]
    return len(values) == 2 and values[0] == values[1]


def ask(llm: LLM, count: int) -> dict[str, list[int]]:
    """[right, asked] of each kind, answered greedily."""
    found = {}
    for kind, _ in VARIED:
        rng = random.Random(f"{SEED} {kind.__name__}")
        examples = list(islice(held_out(rng, kind), count))
        params = SamplingParams(temperature=0, max_tokens=250)
        outputs = llm.chat([e.messages for e in examples], params, use_tqdm=False)
        right = [
            is_right(kind.__name__, example, output.outputs[0].text)
            for example, output in zip(examples, outputs, strict=True)
        ]
        found[kind.__name__] = [sum(right), len(right)]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of the training run")
    parser.add_argument("--model", type=Path, required=True, help="exported folder")
    parser.add_argument("--count", type=int, default=100)
    args = parser.parse_args()
    found = ask(LLM(args.model, kv_memory=MEMORY), args.count)
    (args.out / args.model.name / "varied.json").write_text(json.dumps(found, indent=2) + "\n")
    for kind, (right, asked) in found.items():
        low, high = wilson(right, asked)
        print(f"{kind:12} {right:4} of {asked} ({100 * low:.0f}–{100 * high:.0f}%)")


if __name__ == "__main__":
    main()
