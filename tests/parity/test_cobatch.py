"""Whatever runs beside it, a greedy or seeded request gets the tokens it gets alone.

A mix is a dozen random requests over a tiny fp32 model: every sampling parameter (masks of allowed
tokens, bias, penalties), grammars, one to three sequences each, a KV pool so small that some are
preempted, and some aborted on the way.
"""

import shutil
from pathlib import Path

import pytest

from drive import engine_for, finish
from headway.config.speculation_config import SpeculationConfig
from headway.core.request import Request, SamplingParams
from headway.engine.engine import Engine
from headway.engine.speculation.adaptive import AdaptiveSpeculator
from headway.engine.speculation.backoff import NoBackoff
from headway.perf.model import Prior, StepModel
from parity.cobatch import ALONE, ENGINES, MAX_LEN, VOCABULARY, check_mix, write_letters
from parity.tiny import edit_config, save, tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

WINDOWS = {
    "num_hidden_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"],
    "use_sliding_window": True,
    "sliding_window": 5,
}
GUESSES_PAY = Prior(weights_s=1.0, token_s=1e-9, any_sampled_s=1e-9, sampled_s=1e-9, read_s=1e-9)
"""A machine on which a step takes a second, whatever it does."""
FAMILIES = {"llama": {"head_dim": 32}, "qwen3": WINDOWS}
"""One full group, whose memory matrix tiles read as it lies, and two of which one soon forgets."""


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose choices are neither certain nor flat."""
    shape = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 1,
        "max_position_embeddings": MAX_LEN,
    }
    model = tiny_model(request.param, **shape | FAMILIES[request.param])
    folder = save(model, tmp_path_factory.mktemp("cobatch"))
    write_letters(folder)
    return folder


@pytest.fixture(scope="module")
def alone(folder: Path) -> Engine:
    """An engine with room for everything, which gets one request at a time."""
    return engine_for(folder, **ALONE)


@pytest.fixture(scope="module")
def engines(folder: Path) -> list[Engine]:
    """Engines with little room, each set up in another way."""
    return [engine_for(folder, **options) for options in ENGINES]


def test_tokens_do_not_depend_on_what_runs_beside_them(alone: Engine, engines: list[Engine]):
    """30 mixes of each model."""
    preemptions = [check_mix(number, alone, engines) for number in range(30)]
    assert sum(count > 0 for count in preemptions) > 7, "the pools are too large to prove much"


def test_tokens_do_not_depend_on_guesses(alone: Engine, engines: list[Engine]):
    """14 mixes of each model, most tokens guessed beforehand; two on each engine."""
    kept: list[int] = []
    for number in range(14):
        check_mix(number, alone, engines, kept)
    assert sum(kept) > 150, "the guesses are too bad to prove much"


@pytest.fixture
def lookahead() -> AdaptiveSpeculator:
    """All guesses are verified, as a step takes no longer with them."""
    speculation = AdaptiveSpeculator(
        SpeculationConfig(sources=("lookahead",)), StepModel(GUESSES_PAY)
    )
    speculation.backoff = NoBackoff()
    return speculation


def test_tokens_do_not_depend_on_windows(
    alone: Engine, engines: list[Engine], lookahead: AdaptiveSpeculator
):
    """14 mixes of each model; what one mix left is guessed in the next."""
    for number in range(20, 34):
        check_mix(number, alone, engines, speculator=lookahead)
    guessed, kept = lookahead.counts["lookahead"]
    assert guessed > kept > 150, "the guesses are too bad to prove much"


@pytest.mark.hardening
@pytest.mark.parametrize("first", range(60, 1060, 50))
def test_tokens_do_not_depend_on_windows_at_length(
    alone: Engine, engines: list[Engine], lookahead: AdaptiveSpeculator, first: int
):
    """1,000 more of each model."""
    for number in range(first, first + 50):
        check_mix(number, alone, engines, speculator=lookahead)
    guessed, kept = lookahead.counts["lookahead"]
    assert guessed > kept > 500, "the guesses are too bad to prove much"


@pytest.mark.hardening
@pytest.mark.parametrize("first", range(60, 1060, 50))
def test_tokens_do_not_depend_on_guesses_at_length(
    alone: Engine, engines: list[Engine], first: int
):
    """1,000 more of each model."""
    kept: list[int] = []
    for number in range(first, first + 50):
        check_mix(number, alone, engines, kept)
    assert sum(kept) > 500, "the guesses are too bad to prove much"


@pytest.mark.hardening
@pytest.mark.parametrize("first", range(60, 1060, 50))
def test_tokens_do_not_depend_on_what_runs_beside_them_at_length(
    alone: Engine, engines: list[Engine], first: int
):
    """1,000 more mixes of each of the two models, fifty at a time."""
    for number in range(first, first + 50):
        check_mix(number, alone, engines)


def test_the_sequences_of_one_request_differ_and_the_seed_decides(alone: Engine):
    """n = 3 gives three answers; the same seed the same three, another seed others."""

    def answers(request_id: int, seed: int) -> list[list[int]]:
        sampling = SamplingParams(n=3, temperature=1.5, seed=seed, max_tokens=20, ignore_eos=True)
        found = finish(alone, [Request(request_id, [3, 4, 5], sampling)])
        return [found[request_id, index].token_ids for index in range(3)]

    first, again, other = answers(1, 7), answers(2, 7), answers(3, 8)
    assert first == again
    assert len({*map(tuple, first), *map(tuple, other)}) == 6


def test_an_end_token_beyond_the_logits_is_never_met(folder: Path, tmp_path: Path):
    """A config that names one too many: `min_tokens` holds back only what can be sampled."""
    copy = Path(shutil.copytree(folder, tmp_path / "model"))
    (copy / "generation_config.json").unlink()
    edit_config(copy, eos_token_id=[2, VOCABULARY, 5000])
    requests = [
        Request(0, [3], SamplingParams(min_tokens=5, max_tokens=9, seed=1)),
        Request(1, [3], SamplingParams(max_tokens=9, seed=1)),
    ]
    answers = finish(engine_for(copy), requests)
    assert len(answers[0, 0].token_ids) >= 5
