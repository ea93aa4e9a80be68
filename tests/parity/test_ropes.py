"""Ropes that depend on the served context: dynamic NTK against transformers.

transformers stretches theta with each prompt's own length; here it is fixed for `max_model_len`,
so the two agree where a prompt has that length, and within the original context when no more is
served.
"""

import pytest
import torch
from torch.testing import assert_close

from drive import engine_for
from headway.core.model_spec import RopeSpec
from headway.runtime.rope import RopeTable, dynamic_theta
from parity.logits import our_logits, their_logits
from parity.tiny import prompts, save, spell_as_transformers_4, tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

ORIGINAL, FACTOR = 64, 3.0
ROPE = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": FACTOR}


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """(transformers' model, its folder); Qwen3's is spelled as by transformers 4."""
    reference = tiny_model(
        request.param, max_position_embeddings=ORIGINAL, rope_parameters=ROPE, head_dim=16
    )
    folder = save(reference, tmp_path_factory.mktemp(request.param))
    if request.param == "qwen3":
        spell_as_transformers_4(folder)
    return reference, folder


def test_within_the_original_context_nothing_is_stretched(model):
    reference, folder = model
    executor = engine_for(folder, max_model_len=ORIGINAL).executor
    for prompt in prompts([1, 17, ORIGINAL]):
        theirs = their_logits(reference, prompt)
        assert_close(our_logits(executor, prompt), theirs, rtol=0, atol=1e-4)


@pytest.mark.parametrize("length", [ORIGINAL + 1, 100, int(ORIGINAL * FACTOR)])
def test_a_prompt_of_the_whole_served_context_is_stretched_as_theirs(model, length: int):
    reference, folder = model
    executor = engine_for(folder, max_model_len=length).executor
    (prompt,) = prompts([length])
    theirs = their_logits(reference, prompt)
    assert_close(our_logits(executor, prompt), theirs, rtol=0, atol=1e-4)
    their_logits(reference, prompt[:1])  # theirs remembers the longest until a short one comes


def test_all_of_the_stretched_context_is_served_by_default(model):
    _, folder = model
    assert engine_for(folder).settings.max_model_len == int(ORIGINAL * FACTOR)


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


SHORT, LONG = [1.0, 1.1, 1.5, 2.0], [1.0, 2.0, 4.0, 7.5]


@pytest.mark.parametrize(("length", "served"), [(ORIGINAL, ORIGINAL), (ORIGINAL + 30, 320)])
def test_two_lists_of_factors_as_theirs(length: int, served: int, tmp_path):
    """LongRoPE: transformers chooses by a prompt's length, here the served context does."""
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": SHORT,
        "long_factor": LONG,
        "original_max_position_embeddings": ORIGINAL,
    }
    reference = tiny_model("phi3", rope_parameters=rope, original_max_position_embeddings=ORIGINAL)
    executor = engine_for(save(reference, tmp_path), max_model_len=served).executor
    (prompt,) = prompts([length])
    theirs = their_logits(reference, prompt)
    assert_close(our_logits(executor, prompt), theirs, rtol=0, atol=1e-4)
