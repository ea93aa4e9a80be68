"""Ropes whose frequencies follow from a request's lengths, against transformers.

Dynamic NTK scales for the length of the prompt and then for each token of the answer; LongRoPE has
one list of factors for requests that stay within the original length and one for all others.
Whatever runs beside a request, and whatever was computed before it, it gets these numbers.
"""

import random
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from drive import Answer, Answers, engine_for, finish, greedy
from headway.config.options import EngineOptions
from headway.core.errors import UnsupportedModelError
from headway.core.request import Request, TokenLogprobs
from headway.engine.engine import Engine
from headway.planning import plan_settings
from headway.runtime.rope import RopeRows, RopeTable, dynamic_theta
from headway.spec import RopeSpec
from headway.spec.rope import FULL, WINDOW, ropes_from_config
from parity.devices import on_cpu
from parity.logits import their_logits
from parity.tiny import SIZES, prompts, save, spell_as_transformers_4, tiny_model
from ranked import ranks

pytestmark = pytest.mark.usefixtures("one_thread")

ORIGINAL, LONGEST, FACTOR = 64, 192, 3.0
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": FACTOR}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.5, 2.0],
    "long_factor": [1.0, 2.0, 4.0, 7.5],
    "original_max_position_embeddings": ORIGINAL,
}
MODELS = {
    "dynamic": ("llama", {"rope_parameters": DYNAMIC, "head_dim": 16}, ORIGINAL),
    "dynamic-old": ("qwen3", {"rope_parameters": DYNAMIC, "head_dim": 16}, ORIGINAL),
    "longrope": (
        "phi3",
        {"rope_parameters": LONGROPE, "original_max_position_embeddings": ORIGINAL},
        LONGEST,
    ),
}
Model = tuple[torch.nn.Module, Path]
TOP = 3


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Model]:
    """(transformers' model, its folder) by name; one spelled as by transformers 4."""
    found = {}
    for name, (family, sizes, longest) in MODELS.items():
        reference = tiny_model(family, max_position_embeddings=longest, **sizes)
        folder = save(reference, tmp_path_factory.mktemp(name))
        if name.endswith("-old"):
            spell_as_transformers_4(folder)
        found[name] = reference, folder
    return found


def served(folder: Path, **options: object) -> Engine:
    """An engine whose context is the longest."""
    return engine_for(folder, **{"max_model_len": LONGEST, **options})


def theirs_of(reference: torch.nn.Module, tokens: list[int]) -> torch.Tensor:
    """transformers' log-probabilities after each token; it remembers the longest prompt until a
    short one comes."""
    their_logits(reference, tokens[:1])
    return their_logits(reference, tokens).log_softmax(-1)


def assert_like(entry: TokenLogprobs | None, theirs_V: torch.Tensor) -> None:
    """The log-probabilities of a token and of the likeliest are theirs."""
    assert entry is not None
    found = torch.tensor([entry.logprob, *entry.top_logprobs])
    assert_close(found, theirs_V[[entry.token_id, *entry.top_ids]], rtol=0, atol=1e-4)


def assert_prompt_like(answer: Answer, theirs_TV: torch.Tensor) -> None:
    """The same of each token of a prompt but the first, and of the first of the answer."""
    assert answer.prompt_logprobs is not None
    for entry, theirs_V in zip(answer.prompt_logprobs[1:], theirs_TV, strict=False):
        assert_like(entry, theirs_V)
    assert_like(answer.logprobs[0], theirs_TV[len(answer.prompt_logprobs) - 1])


def scored(engine: Engine, prompt: list[int], max_tokens: int = 1) -> Answer:
    """The greedy answer, with the log-probabilities of all tokens."""
    request = greedy(1, prompt, max_tokens, logprobs=TOP, prompt_logprobs=TOP)
    return finish(engine, [request])[1, 0]


@pytest.mark.parametrize("chunk", [2048, 24], ids=["whole", "chunks"])
@pytest.mark.parametrize("name", MODELS)
def test_a_prompt_of_any_length_is_scored_as_theirs(models, name: str, chunk: int):
    """Below, at and above the original length, in whatever context is served."""
    reference, folder = models[name]
    engine = served(folder, max_num_batched_tokens=chunk, max_num_seqs=8)
    for prompt in prompts([1, 20, ORIGINAL - 1, ORIGINAL, ORIGINAL + 1, 100, LONGEST - 1]):
        assert_prompt_like(scored(engine, prompt), theirs_of(reference, prompt))


@pytest.mark.parametrize("attention", ["auto", "reference"])
@pytest.mark.parametrize("length", [5, ORIGINAL - 6, ORIGINAL, ORIGINAL + 30])
def test_answers_beyond_the_original_length_grow_as_theirs(models, length: int, attention: str):
    """Dynamic NTK: each token of an answer is scaled for the tokens up to it."""
    reference, folder = models["dynamic"]
    (prompt,) = prompts([length])
    answer = scored(served(folder, attention_backend=attention), prompt, 24)
    their_logits(reference, prompt[:1])
    ids = torch.tensor([prompt])
    asked = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None}
    theirs = reference.generate(  # type: ignore[operator]
        ids, output_logits=True, return_dict_in_generate=True, attention_mask=ids >= 0, **asked
    )
    for entry, logits_1V in zip(answer.logprobs, theirs.logits, strict=True):
        assert_like(entry, logits_1V[0].float().log_softmax(-1))


def test_longrope_goes_by_what_a_request_may_reach(models):
    """The last token of an answer is never computed: 60 and 5 more are 64, which is short."""
    reference, folder = models["longrope"]
    engine, (prompt, more) = served(folder), prompts([60, 100])
    short, long = theirs_of(reference, prompt), theirs_of(reference, prompt + more)[:60]
    assert (short - long).abs().max() > 0.1
    assert_prompt_like(scored(engine, prompt, 5), short)
    assert_prompt_like(scored(engine, prompt, 6), long)
    answer = scored(engine, prompt, 5)
    for count in range(1, 5):
        row = theirs_of(reference, prompt + answer.token_ids[:count])[-1]
        assert_like(answer.logprobs[count], row)


# ── what is served, and why ─────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("name", "given", "length", "words"),
    [
        ("longrope", None, ORIGINAL, "--max-model-len serves up to 192"),
        ("longrope", 100, 100, "given; LongRoPE's short factors for requests of up to 64 tokens"),
        ("longrope", 40, 40, "given"),
        ("dynamic", None, LONGEST, "a prompt beyond 64 tokens has its rope scaled"),
    ],
)
def test_the_served_context_and_its_reason(models, name, given, length, words):
    options = EngineOptions(device="cpu", kv_memory=2**26, max_model_len=given)
    _, settings, reasons, _ = plan_settings(models[name][1], options)
    (reason,) = [reason for reason in reasons if reason.name == "max_model_len"]
    assert settings.max_model_len == length and words in reason.why
    assert ("LongRoPE" in reason.why or "scaled" in reason.why) == (given != 40)


def test_layers_that_change_at_different_lengths_are_refused():
    config = {"max_position_embeddings": 320, "original_max_position_embeddings": ORIGINAL}
    config["rope_parameters"] = {FULL: LONGROPE, WINDOW: DYNAMIC}
    with pytest.raises(UnsupportedModelError, match="change at different lengths"):
        ropes_from_config(config, 10000.0, None, {})


# ── beside others, after others, again ──────────────────────────────────────────────────────


def mixed(seed: int, count: int = 10) -> list[Request]:
    """Requests that begin alike, of which some stay within the original length."""
    rng = random.Random(seed)
    common = [rng.randrange(3, SIZES["vocab_size"]) for _ in range(LONGEST)]
    return [
        greedy(
            number,
            [*common[: rng.choice([17, 40, 48, 60, 70, 90])], rng.randrange(3, 200)],
            rng.choice([3, 12, 30]),
        )
        for number in range(count)
    ]


def tokens_of(answers: Answers) -> dict[tuple[int, int], list[int]]:
    return {key: answer.token_ids for key, answer in answers.items()}


@pytest.fixture(scope="module", params=["dynamic", "longrope"])
def solo(request: pytest.FixtureRequest, models) -> tuple[Path, list[Request], dict]:
    """(a folder, requests, what each is answered alone, where nothing was computed before)."""
    folder, found = models[request.param][1], {}
    for asked in mixed(3):
        found |= tokens_of(finish(served(folder), [asked]))
    return folder, mixed(3), found


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_seqs": 4, "block_size": 16},
        {"num_blocks": 14, "block_size": 16, "max_num_seqs": 8, "max_num_batched_tokens": 40},
        {"block_size": 8, "speculative_method": "ngram,suffix", "max_num_batched_tokens": 64},
        {"kernels": "torch", "attention_backend": "sdpa"},
        {"kernels": "torch", "attention_backend": "sdpa", "make": on_cpu},
    ],
    ids=["together", "preempted", "guessed", "torch", "device"],
)
def test_short_and_long_requests_side_by_side(solo, options: dict[str, object]):
    """Twice, so that the second time what the first left in blocks is found."""
    folder, asked, wanted = solo
    engine = served(folder, **options)
    assert tokens_of(finish(engine, asked)) == wanted
    assert tokens_of(finish(engine, asked)) == wanted
    assert engine.scheduler.num_preemptions > 0 or "num_blocks" not in options


@pytest.mark.parametrize(
    "cut", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}], ids=str
)
def test_ranks_keep_the_choice(solo, cut: dict[str, int]):
    folder, asked, wanted = solo
    with ranks(folder, max_model_len=LONGEST, **cut) as engine:
        assert tokens_of(finish(engine, asked)) == wanted


@pytest.fixture
def engine(models) -> Engine:
    return served(models["longrope"][1], block_size=16)


def test_blocks_of_short_factors_are_no_use_to_a_long_request(engine):
    """A talk that outgrows the original length is computed once more, and found from then on."""
    (prompt,) = prompts([50])
    found = [
        finish(engine, [greedy(number, prompt, most)])[number, 0].num_cached_tokens
        for number, most in enumerate([8, 8, 90, 90, 8])
    ]
    assert found == [0, 48, 0, 48, 48]


def test_prompts_that_dynamic_scales_share_blocks_by_their_length(models):
    engine, (prompt,) = served(models["dynamic"][1], block_size=16), prompts([120])
    lengths = [40, 60, 64, 100, 100, 120, 60]
    found = [
        finish(engine, [greedy(number, prompt[:length], 4)])[number, 0].num_cached_tokens
        for number, length in enumerate(lengths)
    ]
    assert [count > 0 for count in found] == [False, True, True, False, True, False, True]


@pytest.mark.parametrize("name", ["dynamic", "longrope"])
def test_another_engine_goes_on_with_the_same_choice(models, name: str):
    """A request that another engine had begun, behind tokens of its answer."""
    folder, (prompt,) = models[name][1], prompts([58])
    for request in (greedy(1, prompt, 7), greedy(1, prompt, 40)):
        whole = finish(served(folder), [request])[1, 0].token_ids
        engine = served(folder)
        engine.add(request, [whole[:3]])
        (sequence,) = engine.sequences_of(1)
        came = []
        while engine.wait_for_work():
            came += [token for update in engine.step()[0] for token in update.token_ids]
        assert came == whole[3:], sequence


# ── the tables ──────────────────────────────────────────────────────────────────────────────


def test_theta_of_the_worked_example():
    """8,192 tokens over an original 4,096, factor 2, heads of 64: 10,000 · 3^(64 / 62)."""
    rope = RopeSpec(kind="dynamic", factor=2.0, original_max_len=4096)
    assert dynamic_theta(rope, 64, 8192) == pytest.approx(10000 * 3 ** (64 / 62))
    assert dynamic_theta(rope, 64, 1000) == 10000.0


def test_a_table_holds_the_rotated_dims_alone():
    """Three quarters of 16 dims are 6 pairs; YaRN's gain is in cos and sin."""
    table = RopeTable(RopeSpec(share=0.75, kind="yarn", gain=1.5), 16, 10, "cpu")
    cos, sin = table.at(torch.tensor([0, 9]))
    assert cos.shape == sin.shape == (2, 1, 6)
    assert_close(cos.square() + sin.square(), torch.full((2, 1, 6), 2.25))


def test_a_plain_rope_beside_a_scaled_one_turns_by_positions():
    """Full layers have LongRoPE or dynamic NTK, window layers none: all read the same rows."""
    plain = RopeTable(RopeSpec(), 8, 20, "cpu")
    for kind in ("longrope", "dynamic"):
        scaled = RopeSpec(kind=kind, factor=2.0, original_max_len=6)
        rows = RopeRows(scaled, 20, max_tokens=4)
        table = RopeTable(RopeSpec(), 8, 20, "cpu", rows)
        for length in (0, 7, 19):
            # LongRoPE's rows of requests that are not scaled end at the original length
            last = 4 if kind == "longrope" and length == 0 else 19
            positions = torch.tensor([2, 5, last, 3])
            found, prompt = rows.rows_for(positions.numpy(), torch.full((4,), length).numpy())
            table.fill(prompt)
            for own, expected in zip(
                table.at(torch.from_numpy(found)), plain.at(positions), strict=True
            ):
                assert_close(own, expected, rtol=0, atol=1e-6)
