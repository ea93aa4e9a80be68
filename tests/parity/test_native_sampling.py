"""Native sampling chooses, token for token, what the definition in torch chooses."""

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.core.plan import GrammarMasks, NewSequence
from headway.core.request import SamplingParams
from headway.runtime.batch import WorkerSequence
from headway.runtime.native.sampling import NativeSampling
from headway.runtime.sampler import (
    NO_TOKEN,
    Sampler,
    choose,
    choose_natively,
    row_parameters,
    token_logprobs,
)
from parity.native_sets import each_instruction_set

pytestmark = pytest.mark.usefixtures("one_thread")

VOCABULARIES = st.one_of(
    st.integers(1, 40), st.sampled_from([127, 128, 129, 255, 256, 257, 4096, 9000, 70_000])
)
TYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
NAN, INF = float("nan"), float("inf")


def logits_of(kind: str, rows: int, vocabulary: int, seed: int) -> torch.Tensor:
    """Logits of one shape: smooth, tied, flat, mostly forbidden, one token above all."""
    draw = torch.Generator().manual_seed(seed)
    logits_RV = torch.randn(rows, vocabulary, generator=draw)
    if kind == "tied":
        return (logits_RV * 3).round()
    if kind == "flat":
        return logits_RV * 1e-3
    if kind == "equal":
        return torch.full_like(logits_RV, 2.5)
    if kind == "peaked":
        logits_RV[:, vocabulary // 2] += 60
        return logits_RV * 4
    if kind == "forbidden":
        kept = torch.rand(rows, vocabulary, generator=draw) < 0.1
        kept[:, vocabulary - 1] = True
        return logits_RV.masked_fill(~kept, -INF)
    return logits_RV * 3


def random_params(rng: random.Random, vocabulary: int) -> SamplingParams:
    """Filters at their neutral values half of the time, edits in one row of five."""
    edits: dict = {}
    if rng.random() < 0.2:
        some = rng.sample(range(vocabulary), min(vocabulary, 7))
        edits = {
            "logit_bias": {token: rng.uniform(-9, 9) for token in some[:3]},
            "allowed_token_ids": rng.choice([[], some]),
            "presence_penalty": rng.choice([0.0, 1.5]),
            "repetition_penalty": rng.choice([1.0, 1.7]),
        }
    return SamplingParams(
        temperature=rng.choice([0.0, 1.0, 1.0, rng.uniform(0.05, 2)]),
        top_k=rng.choice([0, 0, 1, rng.randint(1, 60), rng.randint(1, 5000), 10**6]),
        top_p=rng.choice([1.0, 1.0, 0.0, rng.uniform(0.01, 0.999), 0.95]),
        min_p=rng.choice([0.0, 0.0, 1.0, rng.uniform(0.001, 0.5)]),
        logprobs=rng.choice([None, None, 0, 5, 20]),
        max_tokens=9,
        **edits,
    )


def sequences_of(rng: random.Random, rows: int, vocabulary: int) -> list[WorkerSequence]:
    """Rows with parameters and histories of their own."""
    found = []
    for i in range(rows):
        generated = [rng.randrange(vocabulary) for _ in range(rng.randint(0, 5))]
        new = NewSequence(
            *(10 + i, rng.randrange(3), [0, *generated], 1),
            *(random_params(rng, vocabulary), rng.randrange(2**64), []),
        )
        found.append(WorkerSequence(new, 0, 1))
    return found


def masks_of(rng: random.Random, rows: int, vocabulary: int) -> GrammarMasks:
    """A mask for some rows: any bits, one bit, or none."""
    words = -(-vocabulary // 32)
    masks = {}
    for i in range(rows):
        if rng.random() < 0.3:
            bits = np.frombuffer(rng.randbytes(4 * words), np.uint32).copy()
            if rng.random() < 0.5:
                bits[:] = 0
                token = rng.randrange(vocabulary)
                bits[token // 32] = 1 << token % 32
            masks[10 + i] = [bits.tobytes()]
    return GrammarMasks(masks)


@each_instruction_set
@settings(max_examples=250, deadline=None)
@given(
    rows=st.integers(1, 9),
    vocabulary=VOCABULARIES,
    kind=st.sampled_from(["smooth", "tied", "flat", "equal", "peaked", "forbidden"]),
    dtype=TYPES,
    seed=st.integers(0, 2**32),
)
def test_tokens_are_those_of_the_definition(library, rows, vocabulary, kind, dtype, seed):
    """Any mix of filters, edits and masks, ties at every floor; twice, as histories grow."""
    rng = random.Random(seed)
    logits_RV = logits_of(kind, rows, vocabulary, seed).to(dtype)
    before = logits_RV.clone()
    sequences = sequences_of(rng, rows, vocabulary)
    native, plain = Sampler(NativeSampling(library)), Sampler()
    for _ in range(2):
        masks = masks_of(rng, rows, vocabulary)
        found, logprobs = native.sample(logits_RV, sequences, masks)
        wanted, wanted_logprobs = plain.sample(logits_RV, sequences, masks)
        assert found == wanted
        assert [each is None for each in logprobs] == [each is None for each in wanted_logprobs]
        for sequence, token in zip(sequences, found, strict=True):
            sequence.generated.append(max(token, 0))
    assert torch.equal(logits_RV, before)


@each_instruction_set
def test_rows_are_settled_without_torch(library):
    """The definition is asked only where a logit is no number, infinite, or nothing is left."""
    rng = random.Random(0)
    native = NativeSampling(library)
    for kind in ("smooth", "tied", "flat", "equal", "peaked"):
        logits_RV = logits_of(kind, 8, 3001, 5)
        sequences = sequences_of(rng, 8, 3001)
        rows = row_parameters(sequences, logits_RV.device)
        assert choose_natively(native, logits_RV, rows, sequences, GrammarMasks()) is not None


@each_instruction_set
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("temperature", [0, 1])
def test_what_is_not_finite_is_left_to_the_definition(library, bad, temperature):
    """A NaN, an infinity, a row of nothing but -inf: the same tokens, whatever they are."""
    params = SamplingParams(temperature=temperature, seed=1)
    sequences = [
        WorkerSequence(NewSequence(10 + i, 0, [1], 1, params, 5, []), 0, 1) for i in range(3)
    ]
    logits_RV = torch.randn(3, 300)
    logits_RV[1, 17] = bad
    logits_RV[2, :] = bad
    found, _ = Sampler(NativeSampling(library)).sample(logits_RV, sequences, GrammarMasks())
    assert found == Sampler().sample(logits_RV, sequences, GrammarMasks())[0]
    nothing = GrammarMasks({i: [bytes(40)] for i in (10, 11, 12)})
    found, _ = Sampler(NativeSampling(library)).sample(logits_RV, sequences, nothing)
    assert found == [NO_TOKEN] * 3


@each_instruction_set
def test_a_row_does_not_depend_on_the_rows_beside_it(library):
    rng = random.Random(3)
    logits_RV = logits_of("smooth", 40, 4096, 1)
    sequences = sequences_of(rng, 40, 4096)
    native = NativeSampling(library)
    together, _ = Sampler(native).sample(logits_RV, sequences, GrammarMasks())
    for row in range(40):
        alone = Sampler(native).sample(logits_RV[row, None], [sequences[row]], GrammarMasks())
        assert alone[0] == [together[row]]


@each_instruction_set
def test_a_thousand_draws_of_a_large_vocabulary(library):
    """152,064 tokens, flat enough that each draw is among thousands."""
    logits_RV = torch.randn(4, 152_064, generator=torch.Generator().manual_seed(0)) * 2
    for params in (
        SamplingParams(),
        SamplingParams(temperature=1.7, top_p=0.9),
        SamplingParams(top_k=50, top_p=0.95),
        SamplingParams(min_p=0.02),
    ):
        for seed in range(0, 64, 4):
            sequences = [
                WorkerSequence(NewSequence(i, 0, [1], 1, params, seed + i, []), 0, 1)
                for i in range(4)
            ]
            rows = row_parameters(sequences, logits_RV.device)
            wanted = choose(logits_RV, rows, sequences, GrammarMasks())
            native = NativeSampling(library)
            assert choose_natively(native, logits_RV, rows, sequences, GrammarMasks()) == wanted


@each_instruction_set
@settings(max_examples=100, deadline=None)
@given(
    rows=st.integers(1, 70),
    vocabulary=VOCABULARIES,
    kind=st.sampled_from(["smooth", "tied", "equal", "peaked", "forbidden"]),
    count=st.integers(0, 20),
    dtype=TYPES,
    seed=st.integers(0, 2**32),
)
def test_logprobs_are_those_of_log_softmax(library, rows, vocabulary, kind, count, dtype, seed):
    """Equal to 1e-6, exact ranks, the likeliest in order and of equal ones the lower id."""
    if rows * vocabulary > 500_000:
        rows = 2
    logits_RV = logits_of(kind, rows, vocabulary, seed).to(dtype)
    tokens = torch.randint(0, vocabulary, (rows,)).tolist()
    found = Sampler(NativeSampling(library)).logprobs(logits_RV, tokens, count)
    exact_RV = logits_RV.double().log_softmax(-1)
    order_RV = logits_RV.sort(dim=-1, descending=True, stable=True).indices
    for row, entry in enumerate(found):
        best = order_RV[row, :count].tolist()
        assert entry.token_id == tokens[row] and entry.top_ids == best
        rank = int((logits_RV[row] > logits_RV[row, tokens[row]]).sum()) + 1
        assert entry.rank == rank
        ours = torch.tensor([entry.logprob, *entry.top_logprobs], dtype=torch.float64)
        torch.testing.assert_close(ours, exact_RV[row, [tokens[row], *best]], rtol=1e-6, atol=1e-6)
    wanted = token_logprobs(logits_RV, tokens, count)
    assert [entry.rank for entry in found] == [entry.rank for entry in wanted]


@each_instruction_set
def test_logprobs_of_what_is_not_finite_are_those_of_the_definition(library):
    logits_RV = torch.tensor([[0.0, NAN, 1.0], [0.0, 1.0, 2.0]])
    found = Sampler(NativeSampling(library)).logprobs(logits_RV, [0, 1], 0)
    wanted = token_logprobs(logits_RV, [0, 1], 0)
    assert found[0].logprob != found[0].logprob
    assert found[1] == wanted[1]
