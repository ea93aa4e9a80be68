"""Claims about guesses that are verified together: by source, and by requests at once.

One engine answers without guesses and one with each source in turn, the same held-out questions;
the tokens must be the same. Time is that of steps which only decode. Tokens a step and sequence
need no clock: they say what guesses would bring where a step takes as long for several rows as for
one, which is what a large model at batch 1 is; what time says is this model's.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import numpy as np

from headway.core.errors import HeadwayError
from headway.core.request import Request, SamplingParams
from headway.engine.speculation.adaptive import AdaptiveSpeculator
from headway.engine.speculation.backoff import NoBackoff
from headway.evals.skills.suite import LEVELS, TEST_SEED, examples
from headway.llm import LLM
from headway.measure.plot import Plot
from headway.perf.model import Prior, StepModel
from headway.spec import read_model_spec
from headway.spec.embedded import model_folder
from literature.claim import (
    Claim,
    Figure,
    Finding,
    NotThereError,
    Promise,
    bootstrap,
)
from literature.pictures import lines
from literature.subject import Subject

BATCHES = (1, 4, 16)
MAX_TOKENS, DRAFTS = 64, 4
OFF = "off"
DRAFT = "headway-draft"
ALWAYS = Prior(weights_s=1.0, token_s=1e-9, any_sampled_s=1e-9, sampled_s=1e-9, read_s=1e-9)
"""A machine on which a step takes a second whatever it does: there all guesses are verified."""
CHATS = ("arithmetic", "lookup", "recall", "extract", "tool", "story")
KINDS = {"chats": CHATS, "copies": ("copy",)}
TWENTIETH = 0.06
PICTURED = ("draft", "lookup")
"""Sources whose claims show a picture; it has all the others of the same questions in it."""


@dataclass(slots=True)
class Run:
    """What some requests took over the steps that only decode."""

    tokens: int = 0
    rows: int = 0
    seconds: float = 0.0

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds if self.seconds else 0.0

    def add(self, other: "Run") -> None:
        """Count another with this."""
        self.tokens += other.tokens
        self.rows += other.rows
        self.seconds += other.seconds


@dataclass(slots=True)
class Guessed:
    """All runs by (source, kind, batch), one a repeat; whether the tokens were those without."""

    runs: dict[tuple[str, str, int], list[Run]] = field(default_factory=dict)
    same: bool = True
    missing: dict[str, str] = field(default_factory=dict)
    """Source → why this model has none."""
    share: float = 0.0
    """The draft's parameters over the model's."""

    def times(self, source: str, kind: str, batch: int, name: str = "") -> Figure:
        """Tokens a second over those without guesses, paired by repeat."""
        pairs = zip(self.runs[source, kind, batch], self.runs[OFF, kind, batch], strict=True)
        ratios = [one.rate / off.rate for one, off in pairs]
        name = name or f"{source}, {batch} at once"
        return bootstrap(name, "x", [ratios], lambda p: float(np.median(p[0])))

    def a_step(self, source: str, kind: str, batch: int = 1) -> Figure:
        """Tokens a step and sequence."""
        runs = self.runs[source, kind, batch]
        value = sum(run.tokens for run in runs) / max(sum(run.rows for run in runs), 1)
        return Figure(name="tokens a step", value=value)


def answer(llm: LLM, prompts: Sequence[list[int]], first: int) -> tuple[Run, list[list[int]]]:
    """All of them at once: what it took, and the tokens of each."""
    run = Run()
    answers: dict[int, list[int]] = {first + i: [] for i in range(len(prompts))}
    for number, ids in zip(answers, prompts, strict=True):
        sampling = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
        llm.engine.add(Request(number, ids, sampling))
    llm.engine.flush()
    while llm.engine.wait_for_work():
        updates, record = llm.engine.step()
        for update in updates:
            answers[update.request_id].extend(update.token_ids)
        if record.num_tokens and not record.num_prefill_tokens:
            run.tokens += sum(len(update.token_ids) for update in updates)
            run.rows += record.num_sampled - record.num_drafts
            run.seconds += record.duration_s
    return run, list(answers.values())


def questions(llm: LLM, skills: Sequence[str], count: int) -> list[list[int]]:
    """Held-out questions of some skills that fit, as token ids."""
    each = -(-count // (len(skills) * len(LEVELS)))
    found = [
        llm.needs_tokenizer().chat_ids(example.messages)
        for skill in skills
        for level in LEVELS
        for example in islice(examples(skill, level, TEST_SEED), each)
    ]
    order = np.random.default_rng(0).permutation(len(found))
    return [found[at] for at in order][:count]


def engines(subject: Subject) -> tuple[dict[str, LLM], Guessed]:
    """By source the engine that has it, and `off` without any; what this model has no source of."""
    folder, spec = subject.model()
    given: dict[str, Any] = {"max_num_seqs": max(BATCHES), "kv_memory": "256MiB"}
    given |= subject.options
    found, plain = Guessed(), LLM(folder, **given)
    given |= {"num_speculative_tokens": DRAFTS}
    free = LLM(folder, speculative_method="ngram,lookahead", **given)
    made = {OFF: plain, "lookup": free, "lookahead": free}
    drafting: tuple[tuple[str, dict[str, Any]], ...] = (
        ("draft", {"draft_model": DRAFT}),
        ("medusa", {}),
    )
    for source, more in drafting:
        try:
            made[source] = LLM(folder, speculative_method=source, **more, **given)
        except HeadwayError as error:
            found.missing[source] = error.cause
    draft = read_model_spec(model_folder(DRAFT))
    found.share = draft.num_parameters / spec.num_parameters
    return made, found


def guessed(subject: Subject) -> Guessed:
    """Every source, kind and batch, in turns within a repeat."""
    made, found = engines(subject)
    repeats, first, most = max(3, subject.repeats), 1, max(BATCHES)
    for kind, skills in KINDS.items():
        prompts = questions(made[OFF], skills, repeats * most)
        for batch in BATCHES:
            subject.watch(f"guesses: {kind}, {batch} at once")
            for number in range(repeats):
                part = prompts[number * most :][: max(batch, 4)]
                expected: list[list[int]] = []
                for source, llm in made.items():
                    set_source(llm, source)
                    total, told = together(llm, part, batch, first)
                    first += len(part) + batch
                    found.runs.setdefault((source, kind, batch), []).append(total)
                    expected = expected or told
                    found.same = found.same and told == expected
    return found


def together(
    llm: LLM, prompts: list[list[int]], batch: int, first: int
) -> tuple[Run, list[list[int]]]:
    """All prompts, `batch` at once."""
    total, told = Run(), list[list[int]]()
    for at in range(0, len(prompts), batch):
        run, answers = answer(llm, prompts[at : at + batch], first + at)
        total.add(run)
        told += answers
    return total, told


def set_source(llm: LLM, source: str) -> None:
    """From now on this source guesses in every step, and remembers nothing of what was before."""
    config = llm.settings.speculation
    one = replace(config, sources=(source,), num_speculative_tokens=DRAFTS)
    speculation = None
    if source != OFF:
        speculation = AdaptiveSpeculator(one, StepModel(ALWAYS))
        speculation.backoff = NoBackoff()
    llm.engine.scheduler.drafts.speculator = speculation


def finding(subject: Subject, source: str, kind: str, promised: float, why: str) -> Finding:
    """One source on one kind of question: at batch 1, and where it stops paying."""
    found = subject.once(guessed)
    if source in found.missing:
        raise NotThereError(f"this model has no {source}: {found.missing[source]}")
    times = [found.times(source, kind, batch) for batch in BATCHES]
    pays = [batch for batch, each in zip(BATCHES, times, strict=True) if (each.low or 0) > 1]
    stops = f"It pays at {', '.join(map(str, pays))} at once." if pays else "It pays nowhere here."
    same = "The tokens were the same." if found.same else "SOME TOKENS DIFFERED."
    unchanged = Figure(
        name="answers unchanged", value=found.same, promise=Promise(low=1.0, exact=True)
    )
    return Finding(
        figures=[times[0], found.a_step(source, kind), *times[1:], unchanged],
        promise=Promise(low=promised),
        why=f"{why} {stops} {same}",
        picture=by_batch(found, kind) if source in PICTURED else None,
    )


def by_batch(found: Guessed, kind: str) -> Plot:
    """All sources on one kind of question."""
    names = dict.fromkeys(name for name, _, _ in found.runs)
    rows = {name: [found.times(name, kind, batch).value for batch in BATCHES] for name in names}
    return lines(list(BATCHES), rows, "requests at once", "times as fast")


def draft(subject: Subject) -> Finding:
    share = subject.once(guessed).share
    return finding(
        subject,
        "draft",
        "chats",
        2.0,
        f"The draft has {share:.2g} of the model's parameters"
        + (", where a twentieth was claimed: " if share > TWENTIETH else ": ")
        + "what four of its passes take must be less than the steps that they spare, and a small "
        "model's step is mostly the fixed time of a step.",
    )


def copies(subject: Subject) -> Finding:
    return finding(
        subject,
        "lookup",
        "copies",
        2.0,
        "A copy is guessed from the prompt at no model's cost, so it gains what tokens a step "
        "gain, less the rows that are verified.",
    )


def medusa(subject: Subject) -> Finding:
    return finding(
        subject, "medusa", "chats", 1.9, "The heads are read beside the model, in its own step."
    )


def lookahead(subject: Subject) -> Finding:
    return finding(
        subject,
        "lookahead",
        "chats",
        1.5,
        "Its window of guesses takes rows in each step, which are dear on a CPU.",
    )


HOW = (
    "Held-out questions to one engine with four guesses in each step and one without, in turns, "
    "at 1, 4 and 16 at once."
)
CLAIMS = (
    Claim(
        key="guess-draft",
        family="AdaptiveSpeculator",
        says="A draft of a twentieth of the cost halves latency, the output unchanged.",
        source="Chen et al., Speculative Sampling (2023): a 4B draft of Chinchilla 70B",
        measure=draft,
        needs="folder",
        how=HOW,
    ),
    Claim(
        key="guess-copies",
        family="AdaptiveSpeculator",
        says="Where the answer copies from the input, guesses from the input double the speed.",
        source="Yang et al., Inference with Reference (2023)",
        measure=copies,
        needs="folder",
        how=HOW,
    ),
    Claim(
        key="guess-medusa",
        family="AdaptiveSpeculator",
        says="Medusa heads give 1.9 times the tokens a second.",
        source="NVIDIA, Low Latency Inference Chapter 1 (2024): Llama 3.1 405B; Cai et al., Medusa "
        "(2024): 2.2",
        measure=medusa,
        needs="folder",
        how=HOW,
    ),
    Claim(
        key="guess-lookahead",
        family="AdaptiveSpeculator",
        says="Lookahead decoding speeds up 1.5 times and more without any draft.",
        source="Fu et al., Lookahead Decoding (2024): 1.5 to 2.3",
        measure=lookahead,
        needs="folder",
        how=HOW,
    ),
)
