"""What guesses are worth that cost no model: `python benchmarks/guesses.py FILE …`.

Replays answers token by token against `engine.speculation`, without a model: how many tokens a step
would bring, what share of the guesses would be kept, by length of the match, and what guessing
takes. A FILE has one answer a line, {"name": …, "prompt": [ids], "answer": [ids]}, or is ShareGPT's
trace with token ids. `--write FILE MODEL` makes one of a model's greedy answers to held-out
questions of every skill, and of what it is told with `--text`: passages as they are, and "edits",
each passage asked for again with one word in twenty replaced (made by this script, by no model).

    python benchmarks/guesses.py --write skills.jsonl headway-tiny --text book.txt
    python benchmarks/guesses.py skills.jsonl sharegpt.jsonl

Past answers are those before it among all files, in one shuffled order, all of one salt.
"""

import argparse
import json
import math
import random
import time
from collections import defaultdict
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from headway import SamplingParams
from headway.engine.speculation.acceptance import Acceptance, SequenceOdds
from headway.engine.speculation.proposers.ngram import NGramIndex
from headway.engine.speculation.proposers.proposal import Proposal
from headway.engine.speculation.proposers.suffix import TAIL, PastAnswers
from headway.evals.skills.suite import LEVELS, SKILLS, TEST_SEED, examples
from headway.whole_model import FolderModel

MAX_TOKENS = 200
SOURCES = ("lookup", "suffixes")
LENGTHS = (1, 2, 3, 4, 5, 8, 16, 32)


class Answer(NamedTuple):
    """Token ids of one request."""

    name: str
    prompt: list[int]
    answer: list[int]


class Tally:
    """What was guessed and kept over some steps."""

    def __init__(self) -> None:
        self.steps = self.tokens = self.guessed = self.kept = self.hits = 0

    def add(self, guessed: int, kept: int) -> None:
        self.steps += 1
        self.tokens += kept + 1
        self.guessed += guessed
        self.kept += kept
        self.hits += kept > 0

    @property
    def cells(self) -> str:
        """Tokens a step, guesses a step, share of the guesses kept."""
        share = f"{self.kept / self.guessed:.2f}" if self.guessed else "–"
        return f"{self.tokens / self.steps:.2f} | {self.guessed / self.steps:.1f} | {share}"


class Replay:
    """All answers in their order; what came of each source's guesses."""

    def __init__(self, most: int, worth: float) -> None:
        self.most, self.worth = most, worth
        self.past = PastAnswers()
        self.acceptance = Acceptance()
        self.tallies: dict[tuple[str, str], Tally] = defaultdict(Tally)
        self.by_length: dict[tuple[str, int], list[int]] = defaultdict(lambda: [0, 0, 0, 0])
        self.nats = self.expected = 0.0
        self.reached = self.kept = 0
        self.guess_s: dict[str, float] = defaultdict(float)
        self.num_guesses: dict[str, int] = defaultdict(int)

    def run(self, answer: Answer) -> None:
        """Every source alone with all its guesses verified, then the best of them where it pays."""
        own = SequenceOdds()
        for source in SOURCES:
            self.verify_all(answer, source, own)
        self.verify_worthy(answer)
        self.past.add("", answer.prompt[-TAIL:], answer.answer)

    def guess(self, source: str, lookup: NGramIndex, tokens: list[int], left: int) -> Proposal:
        """The guess of a source, no longer than the answer has tokens left."""
        begun = time.process_time()
        guess = (
            lookup.propose(self.most)
            if source == "lookup"
            else self.past.propose("", tokens, self.most)
        )
        self.guess_s[source] += time.process_time() - begun
        self.num_guesses[source] += 1
        return guess._replace(token_ids=guess.token_ids[:left])

    def verify_all(self, answer: Answer, source: str, own: SequenceOdds) -> None:
        """As many tokens a step as this source alone gives."""
        tokens, written, at = list(answer.prompt), answer.answer, 0
        lookup = NGramIndex(tokens)
        while at < len(written):
            guess = self.guess(source, lookup, tokens, len(written) - at - 1)
            kept = agreeing(guess.token_ids, written[at:])
            count = len(guess.token_ids)
            self.tallies[answer.name, source].add(count, kept)
            if count:
                self.score(source, guess, kept, own)
            tokens += written[at : at + kept + 1]
            at += kept + 1

    def score(self, source: str, guess: Proposal, kept: int, own: SequenceOdds) -> None:
        """What was expected of a guess, and what became of it."""
        count = len(guess.token_ids)
        row = self.by_length[source, max(n for n in LENGTHS if n <= guess.match)]
        for at, more in enumerate((1, kept > 0, count, kept)):
            row[at] += more
        before = 1.0
        chances = self.acceptance.probabilities(source, guess.match, count, own)
        for depth, chance in enumerate(chances[: kept + 1]):
            share = chance / before
            self.nats -= math.log(share if depth < kept else 1 - share)
            self.reached += 1
            before = chance
        self.expected += sum(chances)
        self.kept += kept
        self.acceptance.observe(source, guess.match, count, kept, own)

    def verify_worthy(self, answer: Answer) -> None:
        """Only guesses whose chance is at least `worth`, of the source that promises most."""
        tokens, written, at = list(answer.prompt), answer.answer, 0
        lookup, own = NGramIndex(tokens), SequenceOdds()
        while at < len(written):
            best: list[int] = []
            promised = 0.0
            for source in SOURCES:
                guess = self.guess(source, lookup, tokens, len(written) - at - 1)
                count = len(guess.token_ids)
                if not count:
                    continue
                chances = self.acceptance.probabilities(source, guess.match, count, own)
                if sum(chances) > promised:
                    promised = sum(chances)
                    best = guess.token_ids[: sum(chance >= self.worth for chance in chances)]
                kept = agreeing(guess.token_ids, written[at:])
                self.acceptance.observe(source, guess.match, count, kept, own)
            kept = agreeing(best, written[at:])
            self.tallies[answer.name, "worthy"].add(len(best), kept)
            tokens += written[at : at + kept + 1]
            at += kept + 1


def agreeing(guessed: list[int], came: list[int]) -> int:
    """How many of the first guesses are what came."""
    pairs = enumerate(zip(guessed, came))
    return next((at for at, (a, b) in pairs if a != b), min(len(guessed), len(came)))


def read(path: Path) -> list[Answer]:
    """The answers of a file, of either form."""
    answers = []
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if "input_tok_ids" in row:
            row = {
                "name": "sharegpt",
                "prompt": row["input_tok_ids"],
                "answer": row["output_tok_ids"],
            }
        if row["answer"]:
            answers.append(Answer(row["name"], row["prompt"], row["answer"]))
    return answers


def write(path: Path, folder: str, text: Path | None, each: int) -> None:
    """A model's greedy answers to held-out questions, and passages of a text."""
    model = FolderModel(folder, kv_memory="96MiB")
    greedy = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
    answers = []
    for skill in SKILLS:
        asked = [
            model.tokenizer.chat_ids(example.messages)
            for level in LEVELS
            for example in islice(examples(skill, level, TEST_SEED), each)
        ]
        asked = [ids for ids in asked if len(ids) + MAX_TOKENS < model.max_model_len]
        outputs = model.llm.generate(
            [{"prompt_token_ids": ids} for ids in asked], greedy, use_tqdm=False
        )
        answers += [
            Answer(skill, ids, list(output.outputs[0].token_ids))
            for ids, output in zip(asked, outputs, strict=True)
        ]
    if text is not None:
        answers += passages(model, text.read_text(encoding="utf-8"), each)
    with path.open("w", encoding="utf-8") as file:
        for answer in answers:
            file.write(json.dumps(answer._asdict()) + "\n")
    print(f"{len(answers)} answers in {path}")


def passages(model: FolderModel, text: str, count: int) -> list[Answer]:
    """Passages of 200 words: the second half behind the first, and each behind itself, edited."""
    words, rng = text.split(" "), random.Random(TEST_SEED)
    found = []
    for _ in range(count):
        begin = rng.randrange(len(words) - 400)
        passage = words[begin : begin + 200]
        edited = [rng.choice(words) if rng.random() < 0.05 else word for word in passage]
        found.append(Answer("edits", *(model.encode(" ".join(w)) for w in (passage, edited))))
        halves = passage, words[begin + 200 : begin + 400]
        found.append(Answer("books", *(model.encode(" ".join(half)) for half in halves)))
    return found


def show(replay: Replay, names: list[str]) -> None:
    """The tables."""
    columns = "tokens a step | guesses | kept"
    heads = [*SOURCES, f"chance ≥ {replay.worth}"]
    print(f"| answers | {' | '.join(f'{head}: {columns}' for head in heads)} |")
    print("|" + " --- |" * 10)
    for name in names:
        cells = [replay.tallies[name, kind].cells for kind in (*SOURCES, "worthy")]
        print(f"| {name} | {' | '.join(cells)} |")
    print(
        "\n| match | " + " | ".join(f"{s}: guesses | first kept | of all" for s in SOURCES) + " |"
    )
    print("|" + " --- |" * 7)
    for length in LENGTHS:
        cells = []
        for source in SOURCES:
            times, first, guessed, kept = replay.by_length[source, length]
            cells.append(
                f"{times} | {first / times:.2f} | {kept / guessed:.2f}" if times else "0 | – | –"
            )
        print(f"| {length} | {' | '.join(cells)} |")
    nats, expected = replay.nats / replay.reached, replay.expected / replay.kept
    print(f"\nacceptance: {nats:.3f} nats a guess; {expected:.2f} expected for each guess kept")
    for source in SOURCES:
        each_us = 1e6 * replay.guess_s[source] / replay.num_guesses[source]
        print(f"{source}: {each_us:.1f} µs a guess")


def long_contexts(num_tokens: int) -> None:
    """What lookup takes in a long context, by kind of tokens."""
    rng = random.Random(TEST_SEED)
    kinds = {
        "one token": [5] * num_tokens,
        "all different": list(range(num_tokens)),
        "as words": [min(int(rng.paretovariate(0.7)), 60_000) for _ in range(num_tokens)],
    }
    for name, tokens in kinds.items():
        come = [rng.choice(tokens) for _ in range(2000)]
        lookup = NGramIndex(tokens)
        begun = time.process_time()
        lookup.take_in(num_tokens)
        taken_s = time.process_time() - begun
        begun = time.process_time()
        for token in come:
            tokens.append(token)
            lookup.propose(8)
        guess_us = 1e6 * (time.process_time() - begun) / len(come)
        build_us = 1e6 * taken_s / num_tokens
        took = f"{build_us:.2f} µs to index a token, {guess_us:.1f} µs a guess"
        print(f"{name}, {num_tokens} tokens: {took}")


def main() -> None:
    """Write a file of answers, or replay some."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", help="of answers; with --write: the model")
    parser.add_argument("--write", type=Path, help="the file to write")
    parser.add_argument("--text", type=Path, help="with --write: passages of this text as well")
    parser.add_argument("--each", type=int, default=20, help="questions of each skill and level")
    parser.add_argument("--most", type=int, default=8, help="guesses a step")
    parser.add_argument("--worth", type=float, default=0.3, help="least chance of a guess verified")
    chosen = parser.parse_args()
    if chosen.write:
        write(chosen.write, chosen.files[0], chosen.text, chosen.each)
        return
    answers = [answer for path in chosen.files for answer in read(Path(path))]
    random.Random(TEST_SEED).shuffle(answers)
    replay = Replay(chosen.most, chosen.worth)
    for answer in answers:
        replay.run(answer)
    show(replay, sorted({answer.name for answer in answers}))
    long_contexts(100_000)


if __name__ == "__main__":
    main()
