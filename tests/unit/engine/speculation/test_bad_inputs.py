"""What guesses from text must bear: a prompt that is one token, answers that fill the memory.

The rest of the bad inputs is drawn in `test_engine.test_guesses_change_no_token` (several
sequences, end tokens, `min_tokens`, `max_tokens`, windows shorter than the guesses, aborts).
"""

from fakes import make_settings
from headway.config.speculation_config import SpeculationConfig
from headway.core.plan import Description, GrammarMasks, Sample, StepPlan, StepResult
from headway.core.request import Request, SamplingParams
from headway.engine.build import build_engine
from headway.engine.sequence import FINISHED, Sequence
from headway.engine.speculation.adaptive import AdaptiveSpeculator
from headway.engine.speculation.backoff import NoBackoff
from headway.engine.speculation.proposers.ngram import NGramProposer
from headway.engine.speculation.proposers.suffix import (
    MAX_ANSWER_TOKENS,
    MAX_ENDED,
    PastAnswers,
    SuffixProposer,
)
from headway.perf.model import Prior, StepModel

LENGTH, TOKEN = 100_000, 7
GUESSES_PAY = Prior(weights_s=1.0, token_s=1e-9, any_sampled_s=1e-9, sampled_s=1e-9, read_s=1e-9)


class Parrot:
    """An executor whose model says one token for ever."""

    def submit(self, plan: StepPlan) -> None:
        self.plan = plan

    def sample(self, step: int, masks: GrammarMasks) -> None:
        pass

    def collect(self) -> StepResult:
        samples = []
        for row in self.plan.scheduled:
            if row.sample:
                right = next((i for i, d in enumerate(row.drafts) if d != TOKEN), row.num_drafts)
                samples.append(Sample(row.sequence_id, [TOKEN] * (right + 1)))
        return StepResult(self.plan.step, samples)

    def describe(self) -> Description:
        return Description(device="parrot")

    def probe(self, budget_s: float) -> None:
        pass


def test_a_prompt_of_one_token_a_hundred_thousand_times():
    """Both indexes stay as large as for any text, and each guess is right: 9 tokens a step."""
    settings = make_settings(
        num_blocks=(2 * LENGTH // 64,), block_size=64, budget=8192, max_model_len=LENGTH + 1000
    )
    engine = build_engine(Parrot(), settings, vocab_size=100, eos_token_ids=(0,))
    config = SpeculationConfig(sources=("lookup", "suffixes"), num_speculative_tokens=8)
    speculation = AdaptiveSpeculator(config, StepModel(GUESSES_PAY))
    speculation.backoff = NoBackoff()
    engine.scheduler.drafts.speculator = speculation
    itself, past = speculation.proposers
    assert isinstance(itself, NGramProposer) and isinstance(past, SuffixProposer)
    for number in range(2):
        engine.add(Request(number, [TOKEN] * LENGTH, SamplingParams(max_tokens=900)))
        told: list[int] = []
        while engine.has_work:
            for update in engine.step()[0]:
                told += [len(update.token_ids)]
            for lookup in itself._indexes.values():
                held = lookup._pairs, lookup._latest, lookup._previous
                assert sum(len(part) * part.itemsize for part in held) <= 20 * LENGTH
        engine.check_integrity()
        assert sum(told) == 900 and max(told) == 9 and len(told) < 120
        assert not itself._indexes, "nothing is kept of a sequence that is over"
    past.add_ended()
    assert past.past.num_bytes <= 16 << 20
    past.past.check_integrity()


def test_answers_that_wait_to_be_taken_in_are_few_short_and_found_by_the_next_guess():
    past = SuffixProposer()

    def sequence(number: int, answer: list[int]) -> Sequence:
        request = Request(number, [7, 8], SamplingParams())
        found = Sequence(
            number, request, 0, num_groups=1, stop_ids=frozenset(), max_len=9999, seed=0
        )
        found.tokens += answer
        return found

    for number in range(MAX_ENDED + 3):
        ended = sequence(number, [100 + number, *range(200, 200 + 2 * MAX_ANSWER_TOKENS)])
        ended.state = FINISHED
        past.forget(ended)
        assert len(past._ended) < MAX_ENDED
        assert all(len(answer) <= MAX_ANSWER_TOKENS for _, _, answer, _ in past._ended)
    assert len(past._ended) == 3
    assert past.propose(sequence(99, [100 + MAX_ENDED + 2]), 2).token_ids == [200, 201]
    assert not past._ended
    past.past.check_integrity()


def test_who_fills_the_memory_of_answers_forgets_his_own():
    """One user's ten thousand answers leave the three of another; nobody is told another's."""
    past = PastAnswers(1 << 20)
    kept = [[100 + 10 * i + j for j in range(8)] for i in range(3)]
    for answer in kept:
        past.add("quiet", [1, 2], answer)
    for number in range(10_000):
        past.add("loud", [3, 4], [1000 + (number * 40 + j) % 30_000 for j in range(40)])
    past.check_integrity()
    for answer in kept:
        assert past.propose("quiet", [1, 2, *answer[:2]], 6).token_ids == answer[2:]
        assert past.propose("loud", [1, 2, *answer[:2]], 6).token_ids == []
    last = [1000 + (9999 * 40 + j) % 30_000 for j in range(40)]
    assert past.propose("loud", last[:3], 9).token_ids == last[3:12]
    assert past.propose("quiet", last[:3], 9).token_ids == []


def test_many_who_give_little_share_the_memory():
    """Of 300 users who each have room for their share the latest answer of each stays, whatever one
    more does; one who is alone has it all."""
    past = PastAnswers(24 << 14)
    assert past.size == 1 << 14
    for number in range(300):
        past.add(f"user {number}", [1], [number + 5] * 3 + [number + 6] * 8)
    for number in range(3000):
        past.add("loud", [1], [1000 + number] * 20)
    found = [past.propose(f"user {n}", [n + 5] * 3, 2).token_ids for n in range(300)]
    assert found == [[n + 6, n + 6] for n in range(300)]
    past.check_integrity()
    alone = PastAnswers(24 << 14)
    for number in range(600):
        alone.add("one", [1], [1000 + number] * 20)
    assert sum(alone.propose("one", [1000 + n] * 3, 1).token_ids != [] for n in range(600)) == 600
