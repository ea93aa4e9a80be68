"""What goes up to an accelerator: a plan's inputs, and tokens that the host does not know yet."""

import math

import numpy as np
import pytest
import torch

from headway.core.plan import NewSequence, ScheduledSequence, StepPlan
from headway.core.request import SamplingParams
from headway.runtime.attention.cache import KVLayer
from headway.runtime.batch import WorkerState
from headway.runtime.cuda import available
from headway.runtime.cuda.executor import to_token_logprobs, wipe_flagged
from headway.runtime.cuda.sampling import SparseEdits, allowed_words
from headway.runtime.cuda.staging import Staging
from headway.runtime.cuda.state import UNKNOWN, DeviceState
from headway.runtime.executor import failed_sequences
from headway.runtime.sampler import NO_TOKEN

SHAPE = {"max_num_seqs": 4, "max_blocks": 8, "num_groups": 2, "block_size": 4}
GREEDY = SamplingParams(temperature=0)


def new(number: int, length: int) -> NewSequence:
    return NewSequence(number, 0, list(range(10, 10 + length)), length, GREEDY, 1, [])


def row(number: int, start: int, tokens: list[int], blocks: list[int], sample=True, **more):
    return ScheduledSequence(
        number, start, tokens, [blocks, [b + 9 for b in blocks]], sample, **more
    )


def device_state() -> DeviceState:
    return DeviceState(**SHAPE, vocabulary=50, staging=Staging("cpu"))


PROMPTS = StepPlan(
    0,
    [new(7, 6), new(8, 3)],
    [row(7, 0, list(range(10, 16)), [1, 2]), row(8, 0, [10, 11], [3], False)],
    [],
)


def test_inputs_are_those_of_the_host():
    """Ids, positions, slots and tables by group, in one copy, as the CPU's state makes them."""
    ours, theirs = device_state(), WorkerState(**SHAPE)
    for state in (ours, theirs):
        state.apply(PROMPTS)
    found, expected = ours.batch(PROMPTS), theirs.batch(PROMPTS)
    for name in ("token_ids_T", "positions_T"):
        assert torch.equal(getattr(found, name), getattr(expected, name))
    for name in ("slots_GT", "block_tables_GSB"):
        for one, other in zip(getattr(found, name), getattr(expected, name), strict=True):
            assert torch.equal(one, other)
    assert (found.sampled_rows, found.query_lens) == (expected.sampled_rows, expected.query_lens)
    assert expected.lens is None, "the CPU has no use for them"


def test_lengths_are_told_as_kernels_read_them():
    state = device_state()
    state.apply(PROMPTS)
    lens = state.batch(PROMPTS).lens
    assert lens is not None
    assert lens.query_starts_S1.tolist() == [0, 6, 8]
    assert lens.context_lens_S.tolist() == [6, 2]
    assert [table.tolist() for table in lens.tables_GSB] == [[[1, 2], [3, 0]], [[10, 11], [12, 0]]]
    assert lens.rows_T.tolist() == [0] * 6 + [1] * 2
    assert (lens.longest_query, lens.longest_context) == (6, 6)
    narrow = (lens.query_starts_S1, lens.context_lens_S, *lens.tables_GSB)
    assert {tensor.dtype for tensor in narrow} == {torch.int32}
    assert not lens.has_placeholders


@pytest.mark.parametrize("depth", [1, 2])
def test_a_token_may_still_be_on_the_device(depth: int):
    """The draw is that of the next position, and what the host knows stays what it knows."""
    state = device_state()
    state.apply(PROMPTS)
    for ahead in range(1, depth + 1):
        plan = StepPlan(ahead, [], [row(7, 5 + ahead, [-ahead], [])], [])
        state.apply(plan)
        batch = state.batch(plan)
        assert batch.lens is not None and batch.lens.has_placeholders
        assert batch.token_ids_T.tolist() == [-ahead]
        (sequence,) = batch.sampled_sequences
        assert sequence.generated == [UNKNOWN] * ahead, "the draw would be another's"
    assert state.sequences[7].generated == []


def test_known_tokens_and_drafts_are_no_placeholders():
    state = device_state()
    state.apply(PROMPTS)
    state.sequences[7].generated += [50]
    plan = StepPlan(1, [], [row(7, 6, [50, 60, 61], [4], num_drafts=2)], [])
    state.apply(plan)
    batch = state.batch(plan)
    assert batch.lens is not None and not batch.lens.has_placeholders
    assert [sequence.generated for sequence in batch.sampled_sequences] == [
        [50],
        [50, 60],
        [50, 60, 61],
    ]


# ── what comes back ─────────────────────────────────────────────────────────────────────────


def flags(*bad: int, count: int) -> list[bool]:
    return [at in bad for at in range(count)]


def test_who_has_bad_numbers_fails_and_no_other():
    plan = StepPlan(0, [], [row(1, 4, [5], []), row(2, 0, [5, 6, 7], [])], [])
    assert failed_sequences(plan, flags(count=4)) == ({}, {})
    failed, usable = failed_sequences(plan, flags(2, count=4))
    assert (list(failed), usable) == ([2], {})
    assert "not finite" in failed[2]


def test_bad_drafts_cost_the_rows_behind_them_alone():
    """Of token, draft, draft the second draft is bad: two rows are of use."""
    plan = StepPlan(0, [], [row(1, 4, [5, 6, 7], [], num_drafts=2)], [])
    assert failed_sequences(plan, flags(2, count=3)) == ({}, {1: 2})
    with pytest.raises(FloatingPointError, match="draft token"):
        failed_sequences(plan, flags(0, 2, count=3))


def test_bad_tokens_are_wiped_where_they_lie():
    """Slots of good ones keep what they have; block 0 may lose what nobody reads."""
    state = device_state()
    state.apply(PROMPTS)
    batch = state.batch(PROMPTS)
    layers = [KVLayer(*torch.ones(2, 16, 4, 1, 2), group) for group in (0, 1)]
    hidden = torch.ones(8, 3)
    hidden[1, 2], hidden[7, 0] = math.nan, math.inf
    assert wipe_flagged(layers, hidden, batch).tolist() == flags(1, 7, count=8)
    for layer, blocks in zip(layers, ([1, 3], [10, 12]), strict=True):
        for part in layer.parts:
            zeros = part[1:].flatten(1).eq(0).nonzero().tolist()
            assert zeros == [[block - 1, at] for block in blocks for at in (2, 3)]


def test_log_probabilities_are_told_to_who_asked():
    values = torch.tensor([[-1.0, -0.5, -2.0], [-3.0, -0.1, -4.0], [-9.0, -9.0, -9.0]])
    ranks, tops = torch.tensor([2, 3, 1]), torch.tensor([[4, 5], [6, 7], [8, 9]])
    found = to_token_logprobs([5, 9, NO_TOKEN], [1, None, 2], (values, ranks, tops))
    assert found[1:] == [None, None]
    assert found[0] is not None
    (entry,) = found[0]
    assert (entry.token_id, entry.logprob, entry.rank) == (5, -1.0, 2)
    assert (entry.top_ids, entry.top_logprobs) == ([4], [-0.5])


# ── the parts ───────────────────────────────────────────────────────────────────────────────


def test_edits_have_places_in_flat_logits():
    edits = SparseEdits(10)
    assert edits.arrays() is None
    edits.add(0, np.array([3, 9]), np.array([0.5, 1.5], np.float32))
    edits.add(2, np.array([0, 10, -1]), 7.0)
    found = edits.arrays()
    assert found is not None
    assert (found[0].tolist(), found[1].tolist()) == ([3, 9, 20], [0.5, 1.5, 7.0])


def test_nobody_is_masked_where_nothing_is_forbidden():
    from headway.core.plan import GrammarMasks

    state = device_state()
    state.apply(PROMPTS)
    sequences = list(state.sequences.values())
    assert allowed_words(sequences, GrammarMasks(), 40) is None
    masks = GrammarMasks({8: [(5).to_bytes(4, "little")]})
    words = allowed_words(sequences, masks, 40)
    assert words is not None
    assert words.tolist() == [[-1, -1], [5, 0]], "tokens beyond a mask are forbidden"


@pytest.mark.parametrize(
    ("there", "capability", "why"),
    [(False, (9, 0), "no CUDA device"), (True, (7, 5), "7.5 is below 8.0")],
)
def test_own_kernels_say_why_they_do_not_run(monkeypatch, there, capability, why):
    """The driver is asked, not an import."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert available.check_own_kernels()[0] is False
    assert why in available.check_own_kernels()[1]


def test_without_triton_own_kernels_name_the_fix(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(available.importlib.util, "find_spec", lambda name: None)
    assert available.check_own_kernels() == (
        False,
        "Triton is not installed (pip install triton)",
    )
