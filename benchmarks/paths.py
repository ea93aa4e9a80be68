"""What a second path of guesses brings: `python benchmarks/paths.py FILE …`.

Replays answers (files as in `guesses.py`, which writes some) with the speculator that serves, no
model beside: one stream, lookup and past answers, with one path and with two. A step takes 1, and
each row more takes what `--rows` say of that. Told are tokens for the time of a step without
guesses, thus times off; tokens a step; how often a second path rode, and was adopted of that.
"""

import argparse
import random
from dataclasses import dataclass
from math import inf
from pathlib import Path

from guesses import Answer, read
from headway.core.plan import Sample
from headway.core.request import Request, SamplingParams
from headway.core.speculation_config import SpeculationConfig
from headway.engine.cost import Prior, StepCost, Work, work_of
from headway.engine.sequence import FINISHED, Sequence
from headway.engine.speculation import Drafts
from headway.engine.speculation.drafts import NO_DRAFTS, num_alike, outcomes
from headway.engine.speculation.paths import COPY_S
from headway.engine.speculation.speculation import Speculation
from headway.evals.skills.suite import TEST_SEED

STEP_S = 0.015
"""Of a step without guesses: a model of 0.5B parameters in int4."""
MOST_TOKENS = 512


class Priced(StepCost):
    """Each row but the first takes this share of a step."""

    def __init__(self, share: float) -> None:
        super().__init__(Prior(attended_s=1e-15))
        self.share = share

    def seconds(self, work: Work) -> float:
        """Whatever else the step does."""
        return STEP_S * (1 + self.share * (work.num_tokens - 1))


@dataclass(slots=True)
class Run:
    """What the replay of all answers took."""

    tokens: int = 0
    steps: int = 0
    seconds: float = 0.0
    paths: int = 0
    adopted: int = 0


def replay(answers: list[Answer], share: float, max_paths: int) -> Run:
    """Answer after answer, each step with what the speculator takes."""
    cost, run = Priced(share), Run()
    config = SpeculationConfig(sources=("lookup", "suffixes"), max_paths=max_paths)
    speculation = Speculation(config, cost)
    for number, answer in enumerate(answers):
        sampling = SamplingParams(temperature=0)
        sequence = Sequence(
            number,
            Request(number, list(answer.prompt), sampling),
            0,
            num_groups=1,
            stop_ids=frozenset(),
            max_len=len(answer.prompt) + len(answer.answer),
            seed=0,
        )
        while len(sequence.tokens) < sequence.max_len:
            sequence.computed = len(sequence.tokens) - 1
            step(speculation, sequence, answer.answer[sequence.num_generated :], run)
        sequence.state = FINISHED
        speculation.left(sequence)
    return run


def step(speculation: Speculation, sequence: Sequence, following: list[int], run: Run) -> None:
    """Verify what the speculator says against what follows."""
    plain = work_of([sequence.computed], (0,))
    looks = speculation.looks(1)
    found = speculation.plan([sequence], plain, MOST_TOKENS, inf) if looks else {}
    drafts: Drafts = found.get(sequence.sequence_id, NO_DRAFTS)
    paths = [drafts.token_ids, *(other.token_ids for other in drafts.others)]
    num_kept = max(num_alike(path, following[:-1]) for path in paths)
    rows = 1 + len(drafts.token_ids) + sum(1 + len(path) for path in paths[1:])
    run.seconds += STEP_S * (1 + speculation.cost.share * (rows - 1))
    run.seconds += COPY_S * len(drafts.others)
    run.steps += 1
    run.tokens += num_kept + 1
    run.paths += len(drafts.others)
    run.adopted += any(kept for _, _, kept in outcomes(drafts, following[:num_kept])[1:])
    best = next(at for at, path in enumerate(paths) if path[:num_kept] == following[:num_kept])
    sample = Sample(0, following[: num_kept + 1], path=best)
    sequence.take(sample, 0.0)
    speculation.came(sequence, drafts, sample)


def main() -> None:
    """Replay and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", help="of answers")
    parser.add_argument("--rows", type=float, nargs="+", default=[0.1, 0.075, 0.03, 0.0125])
    chosen = parser.parse_args()
    answers = [answer for path in chosen.files for answer in read(Path(path))]
    random.Random(TEST_SEED).shuffle(answers)
    print("| a row | one path: x off | tokens a step | two: x off | gain | rode | adopted |")
    print("|" + " --- |" * 7)
    for share in chosen.rows:
        one, two = (replay(answers, share, max_paths) for max_paths in (1, 2))
        rates = [STEP_S * run.tokens / run.seconds for run in (one, two)]
        print(
            f"| {share} | {rates[0]:.3f} | {one.tokens / one.steps:.2f} | {rates[1]:.3f} | "
            f"{rates[1] / rates[0] - 1:+.1%} | {two.paths / two.steps:.1%} of steps | "
            f"{two.adopted / max(two.paths, 1):.0%} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
