"""How many guesses of a source are kept: `python benchmarks/kept_by_depth.py FOLDER`.

Held-out chats of every skill are answered greedily, one row a skill. In each step the drafter, the
Medusa heads beside the model or with `--draft` a drafting model, guesses all it may, and all is
verified, whether that pays or not. With `--source` lookahead, or another that is no model, guesses;
it remembers what it saw of all skills. Told are tokens a step and sequence, and by depth the share
of steps in which a guess was reached and kept: its chance, which never rises with the depth.
"""

import argparse
from itertools import islice
from pathlib import Path

from headway import LLM
from headway.core.plan import Sample, StepResult
from headway.core.records import StepRecord
from headway.core.request import Request, SamplingParams
from headway.engine.sequence import Sequence
from headway.engine.speculation import Drafts
from headway.engine.speculation.backoff import NoBackoff
from headway.engine.speculation.drafts import fitting
from headway.engine.speculation.speculation import Speculation
from headway.evals.skills.suite import LEVELS, SKILLS, TEST_SEED, examples
from headway.perf.model import Prior, StepModel, Work

MAX_TOKENS = 200


GUESSES_PAY = Prior(weights_s=1.0, token_s=1e-9, any_sampled_s=1e-9, sampled_s=1e-9, read_s=1e-9)
"""A machine on which a step takes a second whatever it does: there all guesses are verified."""


class AskedAlways:
    """A speculator that asks for `most` guesses in every step, and verifies all of them; of the
    runtime's drafter, or of `source`."""

    jumps, failure, drafting_s = False, "", 0.0

    def __init__(self, most: int, source: Speculation | None = None) -> None:
        self.most, self.source = most, source
        self.rows = self.tokens = 0
        self.tried, self.kept = [0] * most, [0] * most
        self._next: dict[int, list[int]] = {}

    def is_due(self, num_decodes: int) -> bool:
        return self.source is None or self.source.is_due(num_decodes)

    def plan(
        self,
        decodes: list[Sequence],
        beside: Work,
        budget: int,
        max_s: float,
        *,
        prompts_wait: bool = False,
    ) -> dict[int, Drafts]:
        if self.source is not None:
            return self.source.plan(decodes, beside, budget, max_s)
        found = {}
        for sequence in decodes:
            guesses = fitting(sequence, self._next.pop(sequence.sequence_id, []), budget)
            budget -= len(guesses)
            room = sequence.max_len - len(sequence.tokens) - len(guesses) - 2
            most = max(min(self.most, room), 0)
            found[sequence.sequence_id] = Drafts(guesses, "asked", propose=most)
        return found

    def num_after_prompt(self, sequence: Sequence, start: int) -> int:
        return 0

    def observe(self, sequence: Sequence, drafts: Drafts, sample: Sample) -> None:
        num_kept = len(sample.token_ids) - 1
        self._next[sequence.sequence_id] = sample.drafts
        for depth in range(len(drafts.token_ids)):
            self.tried[depth] += 1
            self.kept[depth] += num_kept > depth
        self.rows += 1
        self.tokens += 1 + num_kept
        if self.source is not None:
            self.source.observe(sequence, drafts, sample)

    def end_step(self, result: StepResult) -> None:
        pass

    def learn(self, record: StepRecord) -> None:
        pass

    def forget(self, sequence: Sequence) -> None:
        self._next.pop(sequence.sequence_id, None)
        if self.source is not None:
            self.source.forget(sequence)


def row(name: str, asked: list[AskedAlways]) -> str:
    """One row of the table, of all these together."""
    tokens, rows = (sum(getattr(a, field) for a in asked) for field in ("tokens", "rows"))
    shares = [
        f"{sum(a.kept[depth] for a in asked) / max(sum(a.tried[depth] for a in asked), 1):.2f}"
        for depth in range(asked[0].most)
    ]
    return f"| {name} | {tokens} | {tokens / rows:.2f} | {' | '.join(shares)} |"


def main() -> None:
    """Ask and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--draft", type=Path, help="a drafting model in place of heads")
    parser.add_argument("--drafter", choices=("medusa", "eagle"), default="medusa")
    parser.add_argument("--source", help="lookup, suffixes or lookahead in place of a drafter")
    parser.add_argument("--max-drafts", type=int, default=8)
    parser.add_argument("--questions", type=int, default=10, help="of each skill and level")
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--max-num-seqs", type=int, default=32, help="chats at once")
    chosen = parser.parse_args()
    drafter = (
        {"speculate": "draft", "draft_model": str(chosen.draft)}
        if chosen.draft
        else {"speculate": chosen.source or chosen.drafter}
    )
    llm = LLM(
        chosen.folder,
        kv_memory="96MiB",
        max_num_seqs=chosen.max_num_seqs,
        quantization=chosen.quantization,
        max_drafts=chosen.max_drafts,
        **drafter,
    )
    most, tokenizer = llm.settings.speculation.max_proposed, llm.needs_tokenizer()
    print(f"| skill | tokens | a step | {' | '.join(str(1 + depth) for depth in range(most))} |")
    print("| --- | --- | --- |" + " --- |" * most)
    everything = []
    config = llm.settings.speculation
    source = Speculation(config, StepModel(GUESSES_PAY)) if chosen.source else None
    if source is not None:
        source.backoff = NoBackoff()
    for skill in SKILLS:
        asked = AskedAlways(most, source)
        llm.engine.scheduler.drafts.speculator = asked
        prompts = [
            tokenizer.chat_ids(example.messages)
            for level in LEVELS
            for example in islice(examples(skill, level, TEST_SEED), chosen.questions)
        ]
        greedy = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
        for number, ids in enumerate(prompts):
            if len(ids) + MAX_TOKENS < llm.settings.max_model_len:
                llm.engine.add(Request(len(everything) * 10_000 + number, ids, greedy))
        while llm.engine.wait_for_work():
            llm.engine.step()
        print(row(skill, [asked]), flush=True)
        everything.append(asked)
    print(row("all", everything))


if __name__ == "__main__":
    main()
