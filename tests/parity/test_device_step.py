"""What an accelerator's executor does: the tokens of the CPU's, and nothing read back in a step.

It is plain torch on any device, so it runs here on the CPU, and over `meta`, memory without data:
there whatever needs a number of the device raises, as it would wait on a GPU.
"""

import math
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from drive import engine_for, finish, greedy
from headway.core.plan import GrammarMasks, NewSequence, ScheduledSequence, StepPlan
from headway.core.request import Request, SamplingParams
from headway.engine.engine import Engine
from headway.runtime.batch import WorkerSequence
from headway.runtime.cuda import sampling
from headway.runtime.cuda.executor import CudaExecutor
from headway.runtime.cuda.staging import Staging
from headway.runtime.sampler import NEVER, Sampler, token_logprobs
from headway.spec.embedded import model_folder
from parity.cobatch import (
    ENGINES,
    VOCABULARY,
    random_request,
    random_sampling,
    same,
)
from parity.devices import NoReadBacks, gathered, on_cpu, on_meta, small_model
from parity.drafting import Proposals, some_requests
from parity.tiny import save, tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_model(tmp_path_factory.mktemp("device"))


# ── the sampler ─────────────────────────────────────────────────────────────────────────────


def random_row(rng: random.Random, number: int) -> WorkerSequence:
    """A sequence in the middle of its answer, with parameters of any kind."""
    params = random_sampling(rng)
    prompt = [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 9))]
    generated = [rng.randrange(VOCABULARY) for _ in range(rng.randint(0, 9))]
    seed = rng.randrange(2**64)
    new = NewSequence(number, 0, prompt + generated, len(prompt), params, seed, [1, 5])
    return WorkerSequence(new, number, 1)


def random_masks(rng: random.Random, rows: list[WorkerSequence]) -> GrammarMasks:
    """Masks for some of the rows, in whole words, a few of them empty."""
    words = -(-VOCABULARY // 32)
    found = {}
    for row in rows:
        if rng.random() < 0.3:
            bits = rng.getrandbits(32 * words) & rng.getrandbits(32 * words)
            bits = 0 if rng.random() < 0.1 else bits
            found[row.new.sequence_id] = [bits.to_bytes(4 * words, "little")]
    return GrammarMasks(found)


@pytest.mark.parametrize("seed", range(60))
def test_it_chooses_what_the_reference_chooses(seed: int):
    """Every parameter in any mix, ties among the logits, rows with nothing allowed."""
    rng, draw = random.Random(seed), torch.Generator().manual_seed(seed)
    rows = [random_row(rng, number) for number in range(rng.randint(1, 12))]
    masks = random_masks(rng, rows)
    logits = torch.randn(len(rows), VOCABULARY, generator=draw) * rng.choice([0.1, 2, 9])
    if seed % 3 == 0:
        logits = (logits * 2).round() / 2
    kept = logits.clone()
    inputs = sampling.row_inputs([0] * len(rows), rows, masks, VOCABULARY, Staging("cpu"))
    expected, _ = Sampler().sample(logits, rows, masks)
    assert sampling.choose(logits, inputs).tolist() == expected
    assert torch.equal(logits, kept), "the logits are the caller's"


@pytest.mark.parametrize("temperature", [1e-30, 1.0, 2.0])
@pytest.mark.parametrize("shape", [{"top_k": 10**6}, {"top_p": 1e-9}, {"min_p": 1.0}], ids=str)
def test_extremes_leave_a_token(temperature: float, shape: dict):
    """Nobody gets an id beyond the vocabulary, whatever is asked."""
    params = SamplingParams(temperature=temperature, **shape)
    rows = [WorkerSequence(NewSequence(i, 0, [1], 1, params, i, []), i, 1) for i in range(8)]
    logits = torch.randn(8, VOCABULARY, generator=torch.Generator().manual_seed(1))
    inputs = sampling.row_inputs([0] * 8, rows, GrammarMasks(), VOCABULARY, Staging("cpu"))
    chosen = sampling.choose(logits, inputs)
    assert ((chosen >= 0) & (chosen < VOCABULARY)).all()


def test_edits_beyond_the_head_have_no_place():
    """A bias for a token that the head does not have edits no other row's memory."""
    params = SamplingParams(temperature=0, logit_bias={VOCABULARY: 100.0, 3: 50.0})
    rows = [WorkerSequence(NewSequence(i, 0, [1], 1, params, 0, []), i, 1) for i in range(2)]
    logits = torch.zeros(2, VOCABULARY)
    inputs = sampling.row_inputs([0, 1], rows, GrammarMasks(), VOCABULARY, Staging("cpu"))
    assert sampling.choose(logits, inputs).tolist() == [3, 3]


def test_keys_are_ordered_as_the_numbers_are():
    values = torch.tensor([NEVER, -3e38, -1.5, -1e-40, 0.0, 1e-40, 1.0, 3e38, math.inf])
    keys = sampling.key_of(values)
    assert (keys[1:] > keys[:-1]).all()
    assert torch.equal(sampling.float_of(keys), values)


def test_log_probabilities_are_the_references():
    logits = torch.randn(5, 61, generator=torch.Generator().manual_seed(4))
    chosen = [3, 60, 0, 7, 9]
    values, ranks, tops = sampling.top_logprobs(logits, torch.tensor(chosen), 4)
    for row, entry in enumerate(token_logprobs(logits, chosen, 4)):
        assert values[row].tolist() == [entry.logprob, *entry.top_logprobs]
        assert (ranks[row], tops[row].tolist()) == (entry.rank, entry.top_ids)


def test_staged_arrays_come_out_as_they_went_in():
    """Any types and shapes, empty ones too, through buffers that are used again."""
    staging, rng = Staging("cpu"), np.random.default_rng(1)
    kept = []
    for _ in range(40):
        arrays = [
            rng.integers(0, 99, shape).astype(dtype)
            for shape, dtype in (((3,), np.int64), ((0,), np.int32), ((2, 5), np.float32))
        ] + [np.array([True, False])]
        kept.append((arrays, staging.send(arrays)))
    for arrays, sent in kept:
        for array, tensor in zip(arrays, sent, strict=True):
            assert_close(tensor.numpy(), array)


# ── the engine over it ──────────────────────────────────────────────────────────────────────


def engines(folder: Path, room: dict[str, object]) -> tuple[Engine, Engine]:
    """One with the CPU's executor and one with the accelerator's, both in plain torch."""
    options = {"attention_backend": "sdpa", **room, "kernels": "torch"}
    return engine_for(folder, **options), engine_for(folder, **options, make=on_cpu)


@pytest.mark.parametrize("number", range(len(ENGINES)))
def test_random_requests_get_the_same_tokens(folder: Path, number: int):
    """Grammars, penalties, log-probabilities, several sequences each, preemptions."""
    rng = random.Random(number)
    host, device = engines(folder, ENGINES[number])
    requests = [random_request(rng, i) for i in range(12)]
    expected, found = finish(host, requests), finish(device, requests)
    assert expected.keys() == found.keys()
    for key, answer in found.items():
        same(answer, expected[key])


DEPTHS = (1, 2)


@pytest.mark.parametrize("overlap", DEPTHS)
@pytest.mark.parametrize("number", range(len(ENGINES)))
def test_steps_ahead_give_the_same_tokens(folder: Path, number: int, overlap: int):
    """The same requests where each step is submitted before the last is known, swaps among them."""
    rng = random.Random(100 + number)
    room = {**ENGINES[number], "attention_backend": "sdpa", "kernels": "torch"}
    swaps = {"kv_host_memory": 2**22} if number % 2 else {}
    requests = [random_request(rng, i) for i in range(10)]
    expected = finish(engine_for(folder, **room), requests)
    device = engine_for(folder, **room, **swaps, overlap=overlap, make=on_cpu)
    ahead = list[int]()
    found = finish(device, requests, lambda _: ahead.append(len(device.scheduler.overlap.steps)))
    assert max(ahead) == overlap
    for key, answer in found.items():
        same(answer, expected[key])
    executor = device.executor
    assert isinstance(executor, CudaExecutor) and not executor.state.sequences


def step_all(engine: Engine, *waves: list[Request]) -> dict[int, tuple[list[int], str | None]]:
    """(tokens, reason) of each request, one wave behind the other."""
    found = {}
    for wave in waves:
        for request in wave:
            engine.add(request)
            found[request.request_id] = ([], None)
        while engine.has_work:
            for update in engine.step()[0]:
                tokens, _ = found[update.request_id]
                found[update.request_id] = (tokens + update.token_ids, update.finish_reason)
            engine.check_integrity()
    return found


def test_an_overflow_fails_its_request_and_no_other(folder: Path):
    """What it wrote is wiped without being looked for; who gets its blocks reads no NaN."""
    room: dict[str, object] = {"num_blocks": 12, "block_size": 4}
    host, device = engines(folder, room)
    options = {"attention_backend": "sdpa", **room, "kernels": "torch"}
    ahead = [engine_for(folder, **options, overlap=depth, make=on_cpu) for depth in DEPTHS]
    for engine in (host, device, *ahead):
        engine.executor.model.embedding.weight.data[7] = math.inf  # type: ignore[attr-defined]
    requests = [greedy(0, [3, 4], 9), greedy(1, [4, 7, 6, 3, 7], 8), greedy(2, [6] * 9, 7)]
    later = [greedy(3, [9, 8, 9, 2, 4, 4, 4, 4, 5], 9), greedy(4, [5] * 12, 9)]
    expected, found = (step_all(engine, requests, later) for engine in (host, device))
    assert found == expected
    assert [reason for _, reason in found.values()].count("error") == 1
    assert [step_all(engine, requests, later) for engine in ahead] == [expected] * len(ahead)
    for engine in (device, *ahead):
        for layer in engine.executor.kv:  # type: ignore[attr-defined]
            assert torch.isfinite(layer.k).all() and torch.isfinite(layer.v).all()


@pytest.mark.parametrize("overlap", [0, 1])
def test_a_drafting_model_guesses_over_it(overlap: int):
    """Its guesses are verified, and the tokens are those of an engine without."""
    options = {"dtype": "float32", "kernels": "torch"}
    requests = some_requests(random.Random(3), 6, kernels="torch")
    expected = finish(engine_for(model_folder(None), **options), requests)
    engine = engine_for(
        model_folder(None),
        draft_model="headway-draft",
        speculative_method="draft",
        make=on_cpu,
        overlap=overlap,
        **options,
    )
    proposals = Proposals()
    engine.scheduler.drafts.speculator = proposals
    assert finish(engine, requests) == expected
    assert proposals.num_kept > 10, "the guesses are too bad to prove much"


# ── nothing is read back ────────────────────────────────────────────────────────────────────

SAMPLING = {
    "greedy": SamplingParams(temperature=0),
    "filters": SamplingParams(temperature=0.7, top_k=5, top_p=0.9, min_p=0.1, seed=3),
    "edits": SamplingParams(
        repetition_penalty=1.2,
        presence_penalty=0.5,
        frequency_penalty=0.1,
        logit_bias={4: 1.0},
        min_tokens=5,
        allowed_token_ids=[3, 4, 5],
    ),
    "logprobs": SamplingParams(logprobs=3, prompt_logprobs=2),
}


def mixed_step(sampling_of: dict[int, SamplingParams]) -> list[StepPlan]:
    """A step of a prompt, then one with that sequence's decode and another's chunk."""

    def new(number: int) -> NewSequence:
        return NewSequence(number, 0, [5] * 9, 9, sampling_of[number], 1, [2])

    first = StepPlan(0, [new(0)], [ScheduledSequence(0, 0, [5] * 9, [[1, 2, 3]], True)], [])
    rows = [
        ScheduledSequence(0, 9, [-1], [[]], True),
        ScheduledSequence(1, 0, [5] * 6, [[4, 5]], False),
    ]
    decode = StepPlan(2, [], [ScheduledSequence(0, 10, [-2], [[]], True)], [])
    return [first, StepPlan(1, [new(1)], rows, []), decode]


@pytest.mark.parametrize("name", SAMPLING)
def test_a_step_without_data_passes(folder: Path, name: str):
    """A prompt, a mixed step and a decode, whose inputs are still on the device."""
    executor = on_meta(folder, block_size=4, max_num_seqs=4)
    masks = GrammarMasks({0: [bytes([255] * 8)]})
    with NoReadBacks("meta", may_send=True) as mode:
        for plan in mixed_step(dict.fromkeys((0, 1), SAMPLING[name])):
            executor.submit(plan)
            executor.sample(plan.step, masks if plan.step else GrammarMasks())
    assert mode.num_calls > 100
    assert [pending.chosen_R.shape for pending in executor._steps] == [(1,)] * 3


@pytest.mark.parametrize("family", ["qwen3moe", "gptoss", "deepseekv2", "deepseekv3"])
def test_experts_and_latent_rows_without_data(family: str, tmp_path: Path):
    """Routers, tiles of experts and latent attention of prompts, mixed steps and decodes."""
    executor = on_meta(save(tiny_model(family), tmp_path), block_size=4, max_num_seqs=4)
    with NoReadBacks("meta", may_send=True) as mode:
        for plan in mixed_step(dict.fromkeys((0, 1), SAMPLING["filters"])):
            executor.submit(plan)
            executor.sample(plan.step, GrammarMasks())
    assert mode.num_calls > 100
    read = [pending.experts_read for pending in executor._steps]
    assert all(isinstance(number, torch.Tensor) and number.dim() == 0 for number in read)


def test_experts_are_counted_on_the_device(tmp_path: Path):
    """As many as the host counts, step by step, and their tokens."""
    folder = save(tiny_model("qwen3moe", vocab_size=VOCABULARY), tmp_path)
    host = engine_for(folder, kernels="torch", attention_backend="sdpa")
    with gathered():
        device = engine_for(folder, kernels="torch", attention_backend="sdpa", make=on_cpu)
    found = []
    for engine in (host, device):
        for i in range(3):
            engine.add(greedy(i, [5 + i, 9, 3], 4))
        steps = []
        while engine.has_work:
            updates, record = engine.step()
            tokens = sorted((u.request_id, *u.token_ids) for u in updates)
            steps.append((tokens, record and record.experts_read))
        found.append(steps)
    assert found[0] == found[1] and any(read for _, read in found[0])


def test_the_mode_sees_a_read_back(folder: Path):
    """The CPU's way of sampling asks for numbers, and the mode says so."""
    executor = on_meta(folder, block_size=4, max_num_seqs=4)
    (first, *_) = mixed_step(dict.fromkeys((0, 1), SAMPLING["greedy"]))
    executor.submit(first)
    with NoReadBacks("meta", may_send=True), pytest.raises((AssertionError, RuntimeError)):
        super(CudaExecutor, executor).sample(0, GrammarMasks())
    flags = torch.ones(3, dtype=torch.bool)
    with NoReadBacks("meta", may_send=False), pytest.raises(AssertionError):
        torch.ones(3)[flags]
    with NoReadBacks("meta", may_send=False), pytest.raises(AssertionError):
        torch.ones(3).to("meta")
