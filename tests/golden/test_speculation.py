"""Guesses of every source change how many steps an answer takes, and no token of it."""

import pytest
from tokenizers import Tokenizer

from drive import engine_for, finish, greedy
from headway.core import grammar as grammars
from headway.core.request import Request, SamplingParams
from headway.engine.speculation import Drafts
from headway.engine.speculation.adaptive import AdaptiveSpeculator
from headway.engine.speculation.backoff import NoBackoff
from headway.engine.speculation.drafts import fitting
from headway.perf.model import Prior, StepModel
from headway.spec.embedded import model_folder

TEXTS = (
    "Tell me a story about a dog.",
    "What is 12 + 30?",
    "Once upon a time",
    "Repeat: the red fox ran over the hill and back again.",
    "One two three one two three one two",
)
GUESSES_PAY = Prior(weights_s=1.0, token_s=1e-9, any_sampled_s=1e-9, sampled_s=1e-9, read_s=1e-9)
"""A machine on which a step takes a second, whatever it does."""
SHAPE = grammars.json_schema(
    {
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    },
    "schema",
)


def some_requests(first: int) -> list[Request]:
    """Greedy and seeded, with penalties, log-probabilities, bias, siblings and a grammar."""
    tokenizer = Tokenizer.from_file(str(model_folder(None) / "tokenizer.json"))
    kinds = (
        SamplingParams(temperature=0, max_tokens=40),
        SamplingParams(temperature=1.0, seed=5, max_tokens=40, logprobs=2, n=2),
        SamplingParams(temperature=0.7, seed=6, top_p=0.9, frequency_penalty=0.5, max_tokens=30),
        SamplingParams(temperature=0, min_tokens=20, max_tokens=30, logit_bias={17: 2.0}),
        SamplingParams(temperature=0.5, seed=7, max_tokens=60, grammar=SHAPE),
        SamplingParams(temperature=0.5, seed=8, max_tokens=60, grammar=SHAPE, logprobs=0),
    )
    found = []
    for text in TEXTS:
        for sampling in kinds:
            prompt = tokenizer.encode(text).ids
            found.append(Request(first + len(found), prompt, sampling))
    return found


@pytest.fixture(scope="module")
def expected() -> list[tuple[list[int], str | None]]:
    """Without guesses."""
    answers = finish(engine_for(model_folder(None), max_model_len=256), some_requests(0))
    return [(a.token_ids, a.finish_reason) for a in answers.values()]


@pytest.mark.parametrize(
    "method", ["ngram", "suffix", "grammar", "lookahead", "draft", "medusa", "auto"]
)
def test_the_tokens_are_the_same(method: str, expected: list[tuple[list[int], str | None]]):
    options: dict[str, object] = {"speculative_method": method, "max_model_len": 256}
    if method in ("draft", "auto"):
        options["draft_model"] = "headway-draft"
    engine = engine_for(model_folder(None), **options)
    speculation = AdaptiveSpeculator(engine.settings.speculation, StepModel(GUESSES_PAY))
    speculation.backoff = NoBackoff()  # when a grammar is ready is a matter of time
    engine.scheduler.drafts.speculator = speculation
    drafts, forced = engine.scheduler.drafts, list[int]()
    for again in range(3):
        requests = some_requests(1000 * again)
        answers = finish(engine, requests, lambda _: forced.append(drafts.num_forced))
        assert [(a.token_ids, a.finish_reason) for a in answers.values()] == expected
        for answer in answers.values():
            assert not answer.logprobs or [e.token_id for e in answer.logprobs] == answer.token_ids
    for source, (guessed, kept) in speculation.counts.items():
        assert guessed >= kept > 5, (source, speculation.counts)
    assert (sum(forced) > 10) == ("forced" in speculation.counts)


class Wrong:
    """Guesses three tokens that never come, and keeps what was said behind them."""

    jumps, failure, drafting_s = False, "", 0.0

    def __init__(self) -> None:
        self.told: list[tuple[list[int], int]] = []

    def is_due(self, num_decodes):
        return True

    def plan(self, decodes, beside, budget, max_s, *, prompts_wait=False):
        return {
            each.sequence_id: Drafts(fitting(each, [600, 601, 602], 3), "wrong") for each in decodes
        }

    def num_after_prompt(self, sequence, start):
        return 0

    def observe(self, sequence, drafts, sample):
        if drafts.token_ids and len(sample.token_ids) == 1:
            before = sequence.tokens[:-1]
            for at, token_id in enumerate(sample.behind, 1):
                self.told.append(([*before, *drafts.token_ids[:at]], token_id))
            assert len(sample.behind) == len(drafts.token_ids)

    def end_step(self, result):
        pass

    def learn(self, record):
        pass

    def forget(self, sequence):
        pass


def test_what_is_told_behind_wrong_guesses_is_what_the_model_says_there():
    engine = engine_for(model_folder(None), max_model_len=256)
    engine.scheduler.drafts.speculator = wrong = Wrong()
    finish(engine, [greedy(1, [5, 6, 7], 20), greedy(2, [300, 301], 20)])
    engine.scheduler.drafts.speculator = None
    assert len(wrong.told) > 50 and len({token_id for _, token_id in wrong.told}) > 3
    one = SamplingParams(temperature=0, max_tokens=1)
    answers = finish(engine, [Request(10 + i, ids, one) for i, (ids, _) in enumerate(wrong.told)])
    assert [a.token_ids for a in answers.values()] == [[token_id] for _, token_id in wrong.told]
