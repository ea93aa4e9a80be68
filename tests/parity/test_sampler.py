"""The sampler against known answers, a naive row-by-row reference, and the probabilities it claims.

V vocabulary, R rows.
"""

import math
import random

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from headway.core.plan import GrammarMasks, NewSequence
from headway.core.request import SamplingParams
from headway.runtime.batch import WorkerSequence
from headway.runtime.philox import philox, uniforms
from headway.runtime.sampler import (
    NEVER,
    Sampler,
    edit_row,
    keep_likely,
    row_parameters,
    token_logprobs,
)

pytestmark = pytest.mark.usefixtures("one_thread")

KNOWN_ANSWERS = [  # Random123's kat_vectors for philox4x32, 10 rounds
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    (
        [0xFFFFFFFF] * 4,
        [0xFFFFFFFF] * 2,
        [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD],
    ),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]
STOP_IDS = [0, 3]
# 0.999 quantiles of chi-square by degrees of freedom (NIST/SEMATECH e-Handbook, 1.3.6.7.4)
CHI_SQUARE_999 = {1: 10.828, 2: 13.816, 3: 16.266, 4: 18.467, 5: 20.515, 6: 22.458, 7: 24.322}


def row(
    sequence_id: int,
    sampling: SamplingParams,
    *,
    prompt: list[int] | None = None,
    generated: list[int] | None = None,
    seed: int = 0,
    index: int = 0,
) -> WorkerSequence:
    """A sequence as the runtime remembers it."""
    prompt = prompt or [1]
    new = NewSequence(
        sequence_id, index, prompt + (generated or []), len(prompt), sampling, seed, STOP_IDS
    )
    return WorkerSequence(new, 0, 1)


def sample(logits_RV: torch.Tensor, rows: list[WorkerSequence], masks: GrammarMasks | None = None):
    """Token ids and log-probabilities of `rows`, by a sampler without memory."""
    return Sampler().sample(logits_RV, rows, masks or GrammarMasks())


# ── the generator ───────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS)
def test_philox_gives_the_known_answers(counter: list[int], key: list[int], answer: list[int]):
    """Alone, and as any row of several."""
    assert philox(np.array([counter]), np.array([key])).tolist() == [answer]
    counters, keys, answers = (np.array(column) for column in zip(*KNOWN_ANSWERS, strict=True))
    assert philox(counters, keys).tolist() == answers.tolist()


def test_uniforms_are_functions_of_seed_index_and_position():
    """Within [0, 1), flat, and different as soon as one of the three differs."""
    names = [
        (seed, i, at) for seed in (0, 7, 2**40, 2**64 - 1) for i in range(5) for at in range(500)
    ]
    seeds, indices, positions = zip(*names, strict=True)
    drawn = uniforms(np.array(seeds, np.uint64), np.array(indices), np.array(positions))
    assert drawn.min() >= 0
    assert drawn.max() < 1
    assert len(set(drawn.tolist())) == len(names)
    expected = len(names) / 8
    counts = np.bincount((drawn * 8).astype(int), minlength=8)
    assert ((counts - expected) ** 2 / expected).sum() < CHI_SQUARE_999[7]
    again = uniforms(np.array([7], np.uint64), np.array([3]), np.array([250]))
    assert again[0] == drawn[names.index((7, 3, 250))]


# ── draws follow the probabilities ──────────────────────────────────────────────────────────

LOGITS_8 = torch.tensor([0.3, -1.0, 1.2, 0.0, 2.0, -0.5, 0.9, -3.0])
SHAPES = [
    {},
    {"temperature": 0.7},
    {"temperature": 1.9},
    {"top_k": 3},
    {"top_p": 0.8},
    {"min_p": 0.15},
    {"temperature": 0.8, "top_k": 5, "top_p": 0.9, "min_p": 0.05},
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_draws_have_the_frequencies_of_their_probabilities(shape: dict):
    """20,000 draws: chi-square below its 0.999 quantile, and nothing outside is drawn."""
    draws = 20_000
    rows = [row(i, SamplingParams(**shape), seed=11) for i in range(draws)]
    for position, sequence in enumerate(rows):
        sequence.generated = range(position)
    token_ids, _ = sample(LOGITS_8.expand(draws, -1), rows)
    counts = np.bincount(token_ids, minlength=8)
    probabilities = naive_filter(LOGITS_8.tolist(), SamplingParams(**shape))
    assert all(counts[t] == 0 for t, p in enumerate(probabilities) if p == 0)
    likely = [t for t, p in enumerate(probabilities) if p > 0]
    found = sum(
        (counts[t] - draws * probabilities[t]) ** 2 / (draws * probabilities[t]) for t in likely
    )
    assert len(likely) > 1
    assert found < CHI_SQUARE_999[len(likely) - 1]


# ── filters ─────────────────────────────────────────────────────────────────────────────────


def naive_filter(logits: list[float], params: SamplingParams) -> list[float]:
    """Probabilities after temperature, min_p, top_k and top_p, token by token."""
    scaled = [value / params.temperature for value in logits]
    best = max(scaled)
    weights = [math.exp(value - best) for value in scaled]
    weights = [w if w >= params.min_p else 0.0 for w in weights]
    if params.top_k:
        floor = sorted(weights, reverse=True)[min(params.top_k, len(weights)) - 1]
        weights = [w if w >= floor else 0.0 for w in weights]
    if params.top_p < 1:
        mass, floor = 0.0, 0.0
        for floor in sorted(weights, reverse=True):
            mass += floor
            if mass / sum(weights) >= params.top_p:
                break
        weights = [w if w >= floor else 0.0 for w in weights]
    total = sum(weights)
    return [w / total for w in weights]


def random_filters(rng: random.Random) -> SamplingParams:
    """Any mix of temperature and filters, at their neutral values half of the time."""
    return SamplingParams(
        temperature=rng.choice([1.0, rng.uniform(0.05, 2)]),
        top_k=rng.choice([0, 1, rng.randint(1, 50), 10**6]),
        top_p=rng.choice([1.0, 0.0, rng.uniform(0.01, 0.999)]),
        min_p=rng.choice([0.0, 1.0, rng.uniform(0.001, 0.5)]),
        seed=rng.randrange(2**40),
    )


@pytest.mark.parametrize("vocabulary", [11, 700, 3001])
def test_filters_keep_what_a_naive_row_by_row_reference_keeps(vocabulary: int):
    """Rows with different parameters in one batch; flat rows need more than the likeliest 512."""
    rng = random.Random(vocabulary)
    torch.manual_seed(vocabulary)
    for _ in range(20):
        params = [random_filters(rng) for _ in range(6)]
        logits_RV = torch.randn(6, vocabulary) * torch.tensor([[0.01], [1], [3], [8], [1], [0.1]])
        rows = row_parameters([row(i, p) for i, p in enumerate(params)], logits_RV.device)
        scaled = logits_RV / torch.tensor([[p.temperature] for p in params])
        ours = keep_likely(scaled, rows).softmax(-1).tolist()
        for found, logits, p in zip(ours, logits_RV.tolist(), params, strict=True):
            expected = naive_filter(logits, p)
            wrong = [t for t in range(vocabulary) if (found[t] > 0) != (expected[t] > 0)]
            # a token whose mass ends within rounding of top_p, or at the floor, may go either way
            assert len(wrong) <= 1, (p, wrong)
            if not wrong:
                assert found == pytest.approx(expected, abs=1e-5)


def test_ties_at_the_threshold_are_kept_together():
    """Four equal logits stay four under top_k 2, under top_p 0.3 and under min_p 1."""
    logits_RV = torch.tensor([[1.0, 5.0, 5.0, 2.0, 5.0, 5.0]])
    for params in (
        SamplingParams(top_k=2),
        SamplingParams(top_p=0.3),
        SamplingParams(min_p=1.0),
    ):
        kept = keep_likely(logits_RV, row_parameters([row(0, params)], logits_RV.device))
        assert (kept > NEVER).tolist() == [[False, True, True, False, True, True]]


def test_a_row_that_filters_nothing_keeps_everything_beside_rows_that_filter():
    """Even a token of probability 1e-12, beyond where an fp32 sum of the likelier ones is 1."""
    logits_RV = torch.tensor([[0.0, -1.0, -27.0, -80.0]]).repeat(4, 1)
    params = [SamplingParams(), SamplingParams(top_p=0.5), SamplingParams(top_k=1)]
    params.append(SamplingParams(min_p=0.9))
    rows = row_parameters([row(i, p) for i, p in enumerate(params)], logits_RV.device)
    kept = keep_likely(logits_RV, rows) > NEVER
    assert kept[0].all()
    assert kept[1:].sum(-1).tolist() == [1, 1, 1]


@pytest.mark.parametrize("top_k", [1, 10**6, 2**31 - 1])
def test_a_huge_top_k_keeps_everything(top_k: int):
    """Whatever is accepted can be sampled with."""
    token_ids, _ = sample(torch.zeros(1, 5), [row(0, SamplingParams(top_k=top_k))])
    assert 0 <= token_ids[0] < 5


# ── edits ───────────────────────────────────────────────────────────────────────────────────


def naive_edit(
    logits: list[float], params: SamplingParams, prompt: list[int], generated: list[int]
) -> list[float]:
    """Allowed tokens, bias, min_tokens, then the three penalties, token by token."""
    edited = []
    for token, value in enumerate(logits):
        if params.allowed_token_ids and token not in params.allowed_token_ids:
            value = NEVER
        value += params.logit_bias.get(token, 0.0)
        if len(generated) < params.min_tokens and token in STOP_IDS:
            value = NEVER
        if token in prompt or token in generated:
            factor = params.repetition_penalty
            value = value / factor if value > 0 else value * factor
        count = generated.count(token)
        value -= params.frequency_penalty * count
        value -= params.presence_penalty * (count > 0)
        edited.append(value)
    return edited


def random_edits(rng: random.Random, vocabulary: int) -> SamplingParams:
    """Any mix of what changes logits before the filters."""

    def some(count: int) -> list[int]:
        return rng.sample(range(vocabulary), count)

    return SamplingParams(
        temperature=rng.choice([0, 1]),
        max_tokens=100,
        presence_penalty=rng.choice([0.0, rng.uniform(-2, 2)]),
        frequency_penalty=rng.choice([0.0, rng.uniform(-2, 2)]),
        repetition_penalty=rng.choice([1.0, rng.uniform(0.5, 2)]),
        min_tokens=rng.choice([0, 4, 8]),
        logit_bias=rng.choice([{}, {t: rng.uniform(-100, 100) for t in some(5)}]),
        allowed_token_ids=rng.choice([[], some(9)]),
    )


def test_edits_equal_a_naive_reference():
    """300 random mixes over prompts and answers that repeat tokens."""
    rng = random.Random(5)
    torch.manual_seed(5)
    for _ in range(300):
        params = random_edits(rng, 23)
        prompt = [rng.randrange(23) for _ in range(rng.randint(1, 9))]
        generated = [rng.randrange(23) for _ in range(rng.randint(0, 9))]
        logits_V = torch.randn(23) * 3
        expected = naive_edit(logits_V.tolist(), params, prompt, generated)
        edit_row(logits_V, row(0, params, prompt=prompt, generated=generated))
        assert_close(logits_V, torch.tensor(expected), rtol=1e-5, atol=1e-5)


def test_a_greedy_row_takes_the_likeliest_of_the_edited_logits():
    """Each edit moves the choice; the caller's logits stay as they were."""
    logits_RV = torch.tensor([[4.0, 3.0, 2.0, 5.0, 1.0]]).repeat(6, 1)
    before = logits_RV.clone()
    rows = [
        row(0, SamplingParams(temperature=0)),
        row(1, SamplingParams(temperature=0, logit_bias={2: 10})),
        row(2, SamplingParams(temperature=0, allowed_token_ids=[4, 2])),
        row(3, SamplingParams(temperature=0, min_tokens=2), generated=[9]),
        row(4, SamplingParams(temperature=0, min_tokens=2), generated=[9, 9]),
        row(5, SamplingParams(temperature=0, frequency_penalty=1), generated=[3, 3]),
    ]
    assert sample(logits_RV, rows)[0] == [3, 2, 2, 1, 3, 0]
    assert torch.equal(logits_RV, before)


def test_parameters_follow_the_rows_when_the_rows_change():
    """One sampler over changing batches gives what fresh samplers give."""
    rng = random.Random(2)
    torch.manual_seed(2)
    everybody = [row(i, random_filters(rng), seed=i) for i in range(12)]
    sampler = Sampler()
    for _ in range(60):
        rows = rng.sample(everybody, rng.randint(1, 6))
        for _ in range(2):
            logits_RV = torch.randn(len(rows), 40)
            assert sampler.sample(logits_RV, rows, GrammarMasks())[0] == sample(logits_RV, rows)[0]


def test_a_row_samples_the_same_token_alone_and_beside_any_others():
    """The same logits row, bit for bit: the token depends on nothing else in the batch."""
    rng = random.Random(9)
    torch.manual_seed(9)
    for _ in range(60):
        size = rng.randint(2, 9)
        logits_RV = torch.randn(size, 600) * rng.choice([0.05, 1, 4])
        rows = [row(i, random_filters(rng), seed=rng.randrange(2**64)) for i in range(size)]
        together, _ = sample(logits_RV, rows)
        alone = [sample(logits_RV[i, None], [rows[i]])[0][0] for i in range(size)]
        assert together == alone


# ── masks and log-probabilities ────────────────────────────────────────────────────────


def packed(allowed: set[int], vocabulary: int) -> bytes:
    """One bit a token in little-endian int32 words, as the plan's `GrammarMasks` says."""
    words = [0] * -(-vocabulary // 32)
    for token in allowed:
        words[token // 32] |= 1 << token % 32
    return np.array(words, "<u4").tobytes()


@pytest.mark.parametrize("vocabulary", [31, 32, 33, 211])
def test_late_masks_forbid_what_they_do_not_allow(vocabulary: int):
    """Greedy and drawn rows obey their masks; a row without one is left alone."""
    rng = random.Random(vocabulary)
    torch.manual_seed(vocabulary)
    for _ in range(30):
        logits_RV = torch.randn(4, vocabulary)
        params = [SamplingParams(temperature=t, seed=1) for t in (0, 1, 0, 1)]
        rows = [row(10 + i, p, seed=rng.randrange(2**20)) for i, p in enumerate(params)]
        allowed = {i: set(rng.sample(range(vocabulary), rng.randint(1, 5))) for i in (0, 1)}
        masks = {10 + i: [packed(tokens, vocabulary)] for i, tokens in allowed.items()}
        token_ids, _ = sample(logits_RV, rows, GrammarMasks(masks))
        assert token_ids[0] == max(allowed[0], key=lambda token: logits_RV[0, token].item())
        assert token_ids[1] in allowed[1]
        assert token_ids[2:] == sample(logits_RV, rows)[0][2:]


def test_logprobs_are_those_of_log_softmax():
    """Chosen token, rank and alternatives, of the logits before any edit or filter."""
    torch.manual_seed(4)
    logits_RV = torch.randn(5, 97) * 2
    exact_RV = logits_RV.double().log_softmax(-1)
    params = [
        SamplingParams(temperature=0, logprobs=0),
        SamplingParams(temperature=0.5, top_k=5, logprobs=5),
        SamplingParams(temperature=0),
        SamplingParams(temperature=0, logit_bias={3: 100}, logprobs=20),
        SamplingParams(temperature=0, allowed_token_ids=[8], logprobs=1),
    ]
    token_ids, logprobs = sample(logits_RV, [row(i, p, seed=3) for i, p in enumerate(params)])
    assert token_ids[3:] == [3, 8]
    assert logprobs[2] is None
    for i in (0, 1, 3, 4):
        (entry,) = logprobs[i]
        best_ids = exact_RV[i].argsort(descending=True).tolist()
        count = params[i].logprobs
        assert entry.token_id == token_ids[i]
        assert entry.logprob == pytest.approx(exact_RV[i, token_ids[i]].item(), abs=1e-5)
        assert entry.rank == best_ids.index(token_ids[i]) + 1
        assert entry.top_ids == best_ids[:count]
        assert entry.top_logprobs == pytest.approx(exact_RV[i, best_ids[:count]].tolist(), abs=1e-5)


def test_logprobs_of_a_vocabulary_smaller_than_asked_for():
    """Twenty alternatives of a vocabulary of three are three."""
    (entry,) = token_logprobs(torch.zeros(1, 3), [2], 20)
    assert sorted(entry.top_ids) == [0, 1, 2]
    assert entry.rank == 1
