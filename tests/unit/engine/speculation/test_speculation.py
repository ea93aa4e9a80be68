"""The speculator as a whole: what it does over many steps."""

from dataclasses import replace
from math import inf

from guessing import ask
from headway.config.speculation_config import MedusaSpec, SpeculationConfig
from headway.core.plan import Sample
from headway.core.request import Request, SamplingParams
from headway.engine.sequence import FINISHED, Sequence
from headway.engine.speculation.acceptance import SequenceOdds
from headway.engine.speculation.adaptive import (
    PLAIN_INTERVAL,
    PROBE_TOKENS,
    AdaptiveSpeculator,
    DraftCandidate,
)
from headway.engine.speculation.backoff import NoBackoff
from headway.engine.speculation.controller import PlainStep
from headway.engine.speculation.drafts import NO_DRAFTS, Drafts
from headway.perf.model import Prior, StepModel, work_of


def copying_sequence() -> Sequence:
    """One that repeats itself, so that each guess of it is right."""
    request = Request(1, [1, 2, 3, 4, 5] * 8, SamplingParams(temperature=0))
    return Sequence(1, request, 0, num_groups=1, stop_ids=frozenset(), max_len=100_000, seed=0)


def test_rows_that_seemed_dear_are_tried_again():
    """Their price is learned only from steps that have them, so a few are spent on it."""
    prior = Prior(weights_s=0.01, token_s=0.01)
    cost, machine = StepModel(prior), StepModel(Prior(weights_s=0.01, token_s=1e-5))
    speculation = AdaptiveSpeculator(SpeculationConfig(sources=("lookup",)), cost)
    sequence = copying_sequence()
    sequence.computed = len(sequence.tokens) - 1
    counts = []
    for _ in range(3000):
        beside = work_of([sequence.computed], (0,))
        found = ask(speculation, [sequence], beside, 512, float("inf"))
        drafts = found.get(1)
        count = len(drafts.token_ids) if drafts else 0
        work = cost.with_drafts(beside, sequence.computed + 1, count) if count else beside
        cost.learn(work, machine.seconds(work))
        counts.append(count)
        kept = [1 + (len(sequence.tokens) + at) % 5 for at in range(count + 1)]
        sequence.take(Sample(1, kept), 0.0)
        sequence.computed = len(sequence.tokens) - 1
        if drafts:
            speculation.observe(sequence, drafts, Sample(1, kept))
        if count > 3:
            break
    assert counts[-1] > 3, "it never learned that rows are cheap"


DRAFTING = SpeculationConfig(
    sources=("lookup", "draft"), num_speculative_tokens=4, draft_share=0.01
)
CHEAP = Prior(weights_s=1.0, token_s=1e-6, sampled_s=1e-6)
"""A machine on which guesses cost nothing."""


def test_what_the_drafter_contradicts_does_not_ride():
    """Behind 1 2 3 4 5 came 1 all through the prompt; in the answer comes another token each time,
    and the drafter knows. Its one or two guesses promise less than four behind a long match."""
    speculation = AdaptiveSpeculator(DRAFTING, StepModel(CHEAP))
    sequence = copying_sequence()
    truth = [token for new in range(100, 160) for token in (new, 1, 2, 3, 4, 5)]
    sources = []
    while sequence.num_generated < len(truth) - 10:
        at = sequence.num_generated
        sequence.computed = len(sequence.tokens) - 1
        beside = work_of([sequence.computed], (0,))
        drafts = ask(speculation, [sequence], beside, 512, inf).get(1, NO_DRAFTS)
        guessed, came = drafts.token_ids, truth[at:]
        kept = next((n for n, token in enumerate(guessed) if token != came[n]), len(guessed))
        if came[0] >= 100:
            sources.append(drafts.source)
        sample = Sample(1, came[: kept + 1], drafts=came[kept + 1 : kept + 2 + at % 2])
        sequence.take(sample, 0.0)
        speculation.observe(sequence, drafts, sample)
    assert set(sources[-8:]) == {"draft"}


def test_a_drafter_that_knows_where_answers_end_is_believed():
    """The token behind one that ends an answer is drawn, and told to nobody: `9 2` was right."""
    speculation = AdaptiveSpeculator(replace(DRAFTING, sources=("draft",)), StepModel(CHEAP))
    for number in range(20):
        request = Request(number, [7, 8], SamplingParams(temperature=0))
        stops = frozenset([2])
        sequence = Sequence(number, request, 0, num_groups=1, stop_ids=stops, max_len=99, seed=0)
        sequence.take(Sample(number, [5]), 0.0)
        for kept, drafted in (([6], [9, 2]), ([9, 2, 30], [])):
            sequence.computed = len(sequence.tokens) - 1
            beside = work_of([sequence.computed], (0,))
            drafts = ask(speculation, [sequence], beside, 512, inf).get(number, NO_DRAFTS)
            assert drafts.token_ids == kept[:-1]
            sample = Sample(number, kept, drafts=drafted)
            sequence.take(sample, 0.0)
            speculation.observe(sequence, drafts, sample)
        assert sequence.tokens[-1] == 2
        speculation.forget(sequence)
    assert speculation.acceptance.rates("draft", 0)[0] > 0.95


def test_a_doubtful_match_does_not_keep_the_drafter_from_being_asked():
    """One token was found again: that a guess behind it may be right is no reason to wait."""
    speculation = AdaptiveSpeculator(DRAFTING, StepModel(CHEAP))
    request = Request(1, [7, 8, 9, 5, 6, 3, 4, 7], SamplingParams(temperature=0))
    sequence = Sequence(1, request, 0, num_groups=1, stop_ids=frozenset(), max_len=500, seed=0)
    sequence.computed = len(sequence.tokens) - 1
    riding = ask(speculation, [sequence], work_of([sequence.computed], (0,)), 512, inf)[1]
    assert riding.source == "lookup" and riding.propose == DRAFTING.num_speculative_tokens


def test_a_probe_asks_for_one_guess_of_every_sequence():
    """What a pass costs is paid once: each sequence in it tells as much as the first."""
    bound = Prior(weights_s=1.0, token_s=0.1)
    slow = replace(DRAFTING, sources=("draft",), draft_share=2.0)
    speculation = AdaptiveSpeculator(slow, StepModel(bound))
    request = Request(1, [7, 8, 9], SamplingParams(temperature=0))
    decodes = [
        Sequence(n, request, 0, num_groups=1, stop_ids=frozenset(), max_len=500, seed=0)
        for n in range(4)
    ]
    for sequence in decodes:
        sequence.computed = len(sequence.tokens) - 1
    for _ in range(1500):
        found = ask(speculation, decodes, work_of([2] * 4, (0,)), 512, inf)
        if found:
            break
    assert [drafts.propose for drafts in found.values()] == [1, 1, 1, 1]


def test_a_probe_verifies_a_few_draft_tokens_that_do_not_seem_to_pay():
    """After 16 steps, 32, 64 …: what their rows take is learned from steps that have them."""
    dear = StepModel(Prior(weights_s=1e-4, token_s=1.0))
    speculation = AdaptiveSpeculator(SpeculationConfig(sources=("lookup",)), dear)
    speculation.backoff = NoBackoff()
    sequence, verified = copying_sequence(), []
    for step in range(1, 300):
        sequence.computed = len(sequence.tokens) - 1
        work = work_of([sequence.computed], (0,))
        drafts = ask(speculation, [sequence], work, 512, inf).get(1, NO_DRAFTS)
        if drafts.token_ids:
            verified.append((step, len(drafts.token_ids)))
        sample = Sample(1, [1 + (step - 1) % 5])
        sequence.take(sample, 0.0)
        speculation.observe(sequence, drafts, sample)
    assert verified == [(17, PROBE_TOKENS), (50, PROBE_TOKENS), (115, PROBE_TOKENS), (244, 3)]


def varied(chance: float, num_steps: int, saved: float = 2.0) -> list[int]:
    """Step by step how many of two draft tokens of one sequence are verified, where asking saves so
    many plain steps."""
    speculation = AdaptiveSpeculator(SpeculationConfig(sources=("lookup",)), StepModel(CHEAP))
    speculation._saved = saved
    chances = [chance, chance]
    decodes, candidate = work_of([100], (0,)), DraftCandidate(Drafts([1, 2]), chances, chances)
    plain = PlainStep([101], decodes, decodes, 8)
    return [speculation._choose([candidate], plain)[0] for _ in range(num_steps)]


def test_where_draft_tokens_gain_little_a_step_now_and_then_has_none():
    """What a step without takes is learned from steps without; what is measured rests on that."""
    assert varied(0.1, 3 * PLAIN_INTERVAL).count(0) == 3
    assert 0 not in varied(0.9, 3 * PLAIN_INTERVAL), "where they gain much all steps have them"
    assert varied(0.9, 3 * PLAIN_INTERVAL, saved=0.5).count(0) == 3, "that was predicted alone"
    assert not any(varied(0.02, 10)), "and where it is less than a step is predicted by, none"


def test_what_goes_on_is_found_without_the_drafter():
    """A long match of which all is mostly right: what the drafter says is not needed beside it."""
    config = replace(DRAFTING, draft_share=0.2)
    speculation = AdaptiveSpeculator(config, StepModel(Prior(weights_s=0.01, token_s=1e-4)))
    sequence, drafted = copying_sequence(), []
    for _ in range(100):
        sequence.computed = len(sequence.tokens) - 1
        beside = work_of([sequence.computed], (0,))
        drafts = ask(speculation, [sequence], beside, 512, inf).get(1, NO_DRAFTS)
        drafted.append(drafts.propose)
        came = [1 + (len(sequence.tokens) + at) % 5 for at in range(len(drafts.token_ids) + 1)]
        sample = Sample(1, came, drafts=[1 + (came[-1] + at) % 5 for at in range(drafts.propose)])
        sequence.take(sample, 0.0)
        speculation.observe(sequence, drafts, sample)
    assert drafted[0] == 4 and sum(drafted[50:]) <= 2, "but for a probe"


def test_where_prompts_wait_nothing_is_verified_nor_drafted():
    """There a token saves no more than its row takes, and a draft token is less sure."""
    speculation = AdaptiveSpeculator(DRAFTING, StepModel(CHEAP))
    sequence = copying_sequence()
    sequence.computed = len(sequence.tokens) - 1
    beside = work_of([sequence.computed], (0,))
    assert ask(speculation, [sequence], beside, 512, inf, prompts_wait=True) == {}
    assert ask(speculation, [sequence], beside, 512, inf)


HEADS = MedusaSpec(num_heads=3, num_layers=1, shares_head=True, num_parameters=1)


def test_drafters_guess_behind_a_prompt_where_that_pays():
    """Once, and as many as there are heads; a drafting model computes the prompt before, for which
    the first token may wait a thirtieth longer."""
    memory_binds = Prior(weights_s=0.01, token_s=1e-5)
    each_row_is_dear = Prior(weights_s=1e-6, token_s=0.01)
    for source, share, medusa, prior, most in (
        ("medusa", 0.1, HEADS, memory_binds, 3),
        ("medusa", 0.1, HEADS, each_row_is_dear, 0),
        ("draft", 0.02, None, memory_binds, 8),
        ("draft", 0.02, None, each_row_is_dear, 0),
        ("draft", 0.1, None, memory_binds, 0),
        ("lookup", 0.0, None, memory_binds, 0),
    ):
        config = SpeculationConfig(sources=(source,), draft_share=share, medusa=medusa)
        speculation = AdaptiveSpeculator(config, StepModel(prior))
        sequence = copying_sequence()
        assert speculation.num_after_prompt(sequence, 0) == most
        sequence.take(Sample(1, [1]), 0.0)
        assert speculation.num_after_prompt(sequence, 0) == 0, "it decodes by now"


def test_a_drafter_does_not_guess_behind_a_prompt_of_which_the_model_found_most():
    """It would compute what the model does not: of 1,000 tokens with 950 found 0.4% are 4 tokens,
    and the model computes 50."""
    cost = StepModel(Prior(weights_s=1e-4, token_s=1e-3))
    config = SpeculationConfig(sources=("draft",), draft_share=0.004)
    speculation = AdaptiveSpeculator(config, cost)
    request = Request(1, [*range(10, 1010)], SamplingParams())
    sequence = Sequence(1, request, 0, num_groups=1, stop_ids=frozenset(), max_len=2000, seed=0)
    assert not speculation._delays_first_token(sequence, 0)
    assert speculation._delays_first_token(sequence, 950)
    sequence.first_scheduled_s, sequence.num_cached = 1.0, 0
    assert not speculation._delays_first_token(sequence, 950), "a step before has computed them"


def test_nothing_is_drafted_behind_a_prompt_where_the_next_step_would_not_verify_it():
    """Beside 32 decodes whose rows take what a token takes; alone it is. Nor while backed off."""
    dear = Prior(weights_s=1e-4, token_s=0.01, any_sampled_s=1e-4, sampled_s=0.0)
    config = SpeculationConfig(sources=("medusa",), draft_share=1e-3, medusa=HEADS)
    speculation = AdaptiveSpeculator(config, StepModel(dear))
    decodes = [copying_sequence() for _ in range(32)]
    for number, sequence in enumerate(decodes):
        sequence.sequence_id = number
        sequence.take(Sample(number, [1]), 0.0)
        sequence.computed = len(sequence.tokens) - 1
    beside = work_of([each.computed for each in decodes], (0,))
    assert not ask(speculation, decodes, beside, 512, inf)
    newcomer = copying_sequence()
    assert speculation.num_after_prompt(newcomer, 0) == 0
    speculation.cost = StepModel(Prior(weights_s=0.01, token_s=1e-5))
    assert speculation.num_after_prompt(newcomer, 0) == 3
    for _ in range(16):
        speculation.backoff.record(paid=False)
    assert speculation.num_after_prompt(newcomer, 0) == 0


def test_what_heads_guess_behind_a_prompt_is_verified_in_the_next_step():
    config = SpeculationConfig(sources=("medusa",), draft_share=0.1, medusa=HEADS)
    cost = StepModel(Prior(weights_s=0.01, token_s=1e-5))
    speculation, sequence = AdaptiveSpeculator(config, cost), copying_sequence()
    speculation.num_after_prompt(sequence, 0)
    sample = Sample(1, [1], drafts=[2, 3, 4])
    sequence.take(sample, 0.0)
    speculation.observe(sequence, NO_DRAFTS, sample)
    sequence.computed = len(sequence.tokens) - 1
    beside = work_of([sequence.computed], (0,))
    found = ask(speculation, [sequence], beside, 512, float("inf"))
    assert found[1].token_ids == [2, 3, 4] and found[1].propose


def test_how_every_prompt_ends_tells_nothing_of_the_answer():
    """Answers differ from their first token on; behind the 8 tokens that end each prompt the last
    answer is found again, a long match, and no row is spent on it, which is a quarter of a token.
    Nor does that spoil what a match within an answer is worth."""
    cost = StepModel(Prior(weights_s=1e-4, token_s=0.01, any_sampled_s=0.03, sampled_s=0.0))
    speculation = AdaptiveSpeculator(SpeculationConfig(sources=("suffixes",)), cost)
    counts = []
    for number in range(40):
        request = Request(number, [50 + number, *range(8)], SamplingParams(temperature=0))
        sequence = Sequence(
            number, request, 0, num_groups=1, stop_ids=frozenset([2]), max_len=99, seed=0
        )
        for came in (100 + number, 200 + number, 300 + number, 2):
            sequence.computed = len(sequence.tokens) - 1
            beside = work_of([sequence.computed], (0,))
            drafts = ask(speculation, [sequence], beside, 512, inf).get(number, NO_DRAFTS)
            if came == 100 + number:
                counts.append(len(drafts.token_ids))
            sample = Sample(number, [came])
            sequence.take(sample, 0.0)
            speculation.observe(sequence, drafts, sample)
        sequence.state = FINISHED
        speculation.forget(sequence)
    assert len(counts) == 40 and sum(counts) <= 9, "but for three probes of three"
    assert speculation.acceptance.probabilities("suffixes", 9, 1, SequenceOdds())[0] > 0.7
