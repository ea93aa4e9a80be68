"""States of sequences: the same bits in any chunks and company, and after what failed."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from drive import Answers, engine_for, finish, greedy
from headway.core.plan import StepPlan
from headway.core.request import Request, SamplingParams
from headway.engine.engine import Engine
from headway.engine.kv import BlockPool
from headway.runtime.kernels import reference
from parity.tiny import prompts, save, tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")
NUM_TOKENS = 24
FAMILIES = ("granitehybrid", "qwen3next", "qwen35", "lfm2")


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny hybrid of each family."""
    return save(tiny_model(request.param, eos_token_id=None), tmp_path_factory.mktemp("hybrid"))


def every(engine: Engine, blocks: int) -> Engine:
    """The engine with a checkpoint each so many blocks."""
    assert engine.kv.states is not None
    engine.kv.states.every = blocks
    return engine


def asked(request_id: int, prompt: list[int], **more: object) -> Request:
    """A greedy request that tells the likeliest tokens' log-probabilities."""
    given = {"temperature": 0, "max_tokens": NUM_TOKENS, "logprobs": 2} | more
    return Request(request_id, prompt, SamplingParams(**given))  # type: ignore[arg-type]


def told(answers: Answers) -> dict[tuple[int, int], object]:
    """Tokens and log-probabilities, exactly."""
    return {key: (one.token_ids, one.logprobs) for key, one in answers.items()}


def solo(folder: Path, prompt: list[int], **more: object) -> Answers:
    """What a prompt gets alone, in one piece, by a fresh engine without a prefix cache."""
    return finish(engine_for(folder, prefix_cache=False), [asked(0, prompt, **more)])


def test_bits_do_not_depend_on_chunks_nor_on_company(folder: Path):
    """Chunks of 1, 7 and 64 and four prompts at once, beside each prompt alone in one piece."""
    several = prompts([5, 33, 70, 18])
    alone = {(i, 0): told(solo(folder, prompt))[0, 0] for i, prompt in enumerate(several)}
    for tokens, rows in ((7, 3), (64, 4), (512, 4)):
        engine = engine_for(folder, max_num_batched_tokens=tokens, max_num_seqs=rows, block_size=4)
        found = finish(engine, [asked(i, prompt) for i, prompt in enumerate(several)])
        assert told(found) == alone, tokens


def test_siblings_share_the_state_of_their_prompt(folder: Path):
    """n = 3, seeded: as three requests that were sampled with the same seeds, from any chunks."""
    (prompt,) = prompts([41])
    wanted = {"n": 3, "temperature": 0.8, "seed": 5}
    first = told(finish(engine_for(folder, block_size=4), [asked(0, prompt, **wanted)]))
    again = engine_for(folder, block_size=16, max_num_batched_tokens=16, max_num_seqs=2)
    assert told(finish(again, [asked(0, prompt, **wanted)])) == first
    assert len({tuple(tokens) for tokens, _ in first.values()}) > 1  # type: ignore[misc]
    greedy_ones = told(finish(engine_for(folder), [asked(0, prompt, n=3)]))
    assert set(map(str, greedy_ones.values())) == {str(told(solo(folder, prompt))[0, 0])}
    for length in (1, 2, 17):
        (short,) = prompts([length])
        found = told(finish(engine_for(folder, block_size=4), [asked(0, short, n=2)]))
        assert set(map(str, found.values())) == {str(told(solo(folder, short))[0, 0])}


@pytest.mark.parametrize("copied", [False, True], ids=["computed-again", "copied"])
def test_preempted_ones_go_on_with_their_own_state(folder: Path, copied: bool):
    """Five sequences where keys and values of two and a half have room."""
    several = prompts([40, 50, 60, 30, 44])
    options = {"kv_host_memory": 2**24} if copied else {}
    engine = engine_for(
        folder, num_blocks=44, block_size=4, max_num_batched_tokens=32, max_num_seqs=5, **options
    )
    if copied:
        engine.scheduler.transfers.rate.byte_s = engine.scheduler.transfers.rate.prior_s = 0.0
    found = finish(engine, [asked(i, prompt) for i, prompt in enumerate(several)])
    assert engine.scheduler.num_preemptions > 0
    for i, prompt in enumerate(several):
        assert told(found)[i, 0] == told(solo(folder, prompt))[0, 0]


def test_a_prompt_begins_at_the_deepest_checkpoint(folder: Path):
    """Each 2 blocks of 4 one, behind the prompt's last full block, and where prompts part."""
    engine = every(engine_for(folder, block_size=4, max_num_batched_tokens=16), 5)
    head, tail, other = prompts([43, 6, 9])
    cached = []
    for i, prompt in enumerate((head, head, head + tail, head[:30] + other, head[:30] + tail)):
        answer = finish(engine, [asked(i, prompt)])[i, 0]
        assert told({(0, 0): answer}) == told(solo(folder, prompt))
        cached.append(answer.num_cached_tokens)
    assert cached == [0, 40, 40, 20, 28]


def test_a_checkpoint_is_never_written_to(folder: Path):
    """Two answers from one beginning, at once: each has a state of its own."""
    engine = every(engine_for(folder, block_size=4), 3)
    head, one, other = prompts([36, 7, 5])
    finish(engine, [asked(0, head)])
    several = [head + one, head + other, head + one[:3]]
    found = finish(engine, [asked(i, prompt) for i, prompt in enumerate(several, 1)])
    for i, prompt in enumerate(several, 1):
        assert found[i, 0].num_cached_tokens >= 24
        assert told(found)[i, 0] == told(solo(folder, prompt))[0, 0]


def test_little_memory_leaves_checkpoints_out(folder: Path):
    """Three states for two sequences: all come to an end, with the tokens of their solo runs."""
    engine = every(engine_for(folder, block_size=4, max_num_seqs=2), 1)
    pool = BlockPool(4, engine.settings.cache.prefix_cache, chained=False)
    assert pool.index is not None
    engine.kv.pools[-1], engine.kv.indexes[-1] = pool, pool.index
    several = prompts([33, 21, 40])
    found = finish(engine, [asked(i, prompt) for i, prompt in enumerate(several)])
    for i, prompt in enumerate(several):
        assert told(found)[i, 0] == told(solo(folder, prompt))[0, 0]


def fail_once(engine: Engine, at_step: int) -> None:
    """Let a step's forward raise when it is through, so that its states were written."""
    executor = engine.executor
    forward: Callable[..., torch.Tensor] = executor.forward
    count = 0

    def failing(batch: object) -> torch.Tensor:
        nonlocal count
        count += 1
        hidden = forward(batch)
        if count == at_step:
            raise RuntimeError("a step that was through")
        return hidden

    executor.forward = failing  # type: ignore[method-assign]


@pytest.mark.parametrize("at_step", [2, 4, 12])
def test_a_step_that_raised_advances_no_state_twice(folder: Path, at_step: int):
    """In a chunk and among decodes: the rows are computed from their first token again."""
    several = prompts([30, 45, 12])
    engine = engine_for(folder, block_size=4, max_num_batched_tokens=16)
    fail_once(engine, at_step)
    found = finish(engine, [asked(i, prompt) for i, prompt in enumerate(several)])
    for i, prompt in enumerate(several):
        assert told(found)[i, 0] == told(solo(folder, prompt))[0, 0]


def test_aborted_ones_leave_nothing_behind(folder: Path):
    """Of four, siblings among them, two end early; the others' tokens are their own."""
    several = prompts([30, 45, 12, 26])
    engine = engine_for(folder, block_size=4, max_num_batched_tokens=16, max_num_seqs=3)

    def abort(step: int) -> None:
        if step == 3:
            engine.abort(1)
        if step == 7:
            engine.abort(2)

    requests = [asked(i, p, **({"n": 2} if i == 1 else {})) for i, p in enumerate(several)]
    found = finish(engine, requests, abort)
    for i in (0, 3):
        assert told(found)[i, 0] == told(solo(folder, several[i]))[0, 0]
    assert engine.kv.num_used == 0


def test_one_token_after_the_other_is_the_definition():
    """`scan` in one piece and in cuts, batched and alone: bits; a hand-made step."""
    torch.manual_seed(3)
    heads, groups, keys, values, length, rows = 6, 3, 7, 5, 11, 4
    q, k = (torch.randn(rows, length, groups, keys) for _ in range(2))
    v, state = torch.randn(rows, length, heads, values), torch.randn(rows, heads, keys, values)
    decay, gain = (torch.rand(rows, length, heads) for _ in range(2))
    for is_delta in (False, True):
        whole = state.clone()
        out = reference.scan(whole, q, k, v, decay, gain, is_delta)
        for row in range(rows):
            own, at = state[row : row + 1].clone(), slice(row, row + 1)
            parts = [
                reference.scan(own, *(x[at, begin:end] for x in (q, k, v, decay, gain)), is_delta)
                for begin, end in ((0, 4), (4, 5), (5, 11))
            ]
            assert torch.equal(torch.cat(parts, 1)[0], out[row])
            assert torch.equal(own[0], whole[row])
        matrix = state[1, 4] * decay[1, 0, 4]
        held = matrix.T @ k[1, 0, 2] if is_delta else torch.zeros(values)
        matrix = matrix + torch.outer(k[1, 0, 2], gain[1, 0, 4] * (v[1, 0, 4] - held))
        torch.testing.assert_close(out[1, 0, 4], matrix.T @ q[1, 0, 2])


def test_plans_tell_of_one_block_for_each_state(folder: Path):
    """A decode's plan brings no block, or the one that the state is taken along in."""
    engine = engine_for(folder, block_size=4, prefix_cache=False)
    plans: list[StepPlan] = []
    submit = engine.executor.submit
    engine.executor.submit = lambda plan: (plans.append(plan), submit(plan))[1]  # type: ignore[method-assign]
    finish(engine, [greedy(0, prompts([10])[0], 12)])
    brought = [block for plan in plans for row in plan.scheduled for block in row.new_blocks[-1]]
    assert len(set(brought) - {0}) == 1
    assert replace(engine.settings).cache.windows[-1] == 2
