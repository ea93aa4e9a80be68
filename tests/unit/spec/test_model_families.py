"""What sets the families apart: layers, KV groups, scales, experts, ropes, and bad values named."""

import math

import pytest

from headway.core.errors import ModelError, UnsupportedModelError
from headway.spec import RopeSpec, spec_from_config
from published import MODELS, llama

SMALL = llama(512, 64, 172, 5, 8, 4, True)


def spec(**changes):
    """The spec of a small Llama with keys changed."""
    return spec_from_config({**SMALL, **changes}, {})


def published(name):
    """The spec of a real model."""
    return spec_from_config(MODELS[name][0], {})


def test_interleaved_models_have_two_groups():
    """Gemma 3 1B: every sixth of 26 layers sees everything, the others 512 tokens."""
    window, full = published("Gemma-3-1B").kv_groups
    assert (window.kind, window.window, len(window.layers)) == ("window", 512, 22)
    assert (full.kind, full.window, full.layers) == ("full", 0, (5, 11, 17, 23))
    assert window.bytes_per_token("bfloat16") == 22 * 1024
    assert full.bytes_per_token("bfloat16") == 4 * 1024
    assert (
        window.attended_tokens(100),
        window.attended_tokens(10_000),
        full.attended_tokens(10_000),
    ) == (100, 512, 10_000)
    window, full = published("Gemma-2-2B").kv_groups
    assert (window.window, window.layers, full.layers) == (
        *(4096, tuple(range(0, 26, 2))),
        tuple(range(1, 26, 2)),
    )


def test_window_models_have_one_group():
    (group,) = published("Mistral-7B-v0.1").kv_groups
    assert (group.kind, group.window, len(group.layers)) == ("window", 4096, 32)
    (group,) = published("Phi-3-mini-4k").kv_groups
    assert (group.kind, group.window) == ("window", 2047)


@pytest.mark.parametrize("window", [None, 4096, 100_000])
def test_a_window_as_wide_as_the_context_is_none(window):
    """config.json switches windows off with null; the key left out means the family's own."""
    config = {**MODELS["Mistral-7B-v0.1"][0], "max_position_embeddings": 4096}
    (group,) = spec_from_config({**config, "sliding_window": window}, {}).kv_groups
    assert group.kind == "full"
    del config["sliding_window"]
    (group,) = spec_from_config({**config, "max_position_embeddings": 32768}, {}).kv_groups
    assert group.window == 4096


def test_layers_have_ropes_of_their_own():
    """Gemma 3's window layers turn by 10,000, its full ones by a million; SmolLM3 leaves four."""
    gemma = published("Gemma-3-1B")
    thetas = [gemma.ropes[layer.rope].theta for layer in gemma.layers[:6]]
    assert thetas == [1e4] * 5 + [1e6]
    smollm = published("SmolLM3-3B")
    assert [layer.rope for layer in smollm.layers[:8]] == [0, 0, 0, None] * 2


def test_scales_of_families():
    gemma = published("Gemma-2-2B")
    assert (gemma.embedding_scale, gemma.attention_scale) == (48.0, 1 / 16)
    assert (gemma.attention_softcap, gemma.logits_softcap, gemma.norm_offset) == (50.0, 30.0, 1.0)
    gemma = published("Gemma-3-1B")
    assert (gemma.attention_softcap, gemma.logits_softcap) == (0.0, 0.0)
    granite = published("Granite-3.0-2B")
    assert (granite.embedding_scale, granite.residual_scale) == (12.0, 0.22)
    assert (granite.attention_scale, granite.logits_scale) == (1 / 64, 1 / 8)


def test_flops_of_windows_stop_growing():
    """Gemma 3 1B: beyond 512 tokens only 4 of 26 layers cost more with the context."""
    model = published("Gemma-3-1B")
    a_token_and_layer = 4 * model.q_size
    assert model.flops(1, context=512) - model.flops(1) == 512 * 26 * a_token_and_layer
    assert (
        model.flops(1, context=1512) - model.flops(1, context=512) == 1000 * 4 * a_token_and_layer
    )
    mistral = published("Mistral-7B-v0.1")
    assert mistral.flops(1, context=30_000) == mistral.flops(1, context=4096)


def test_experts():
    """Qwen3-30B-A3B: a token visits 8 of 128 experts in each of 48 layers."""
    model = published("Qwen3-30B-A3B")
    expert = 3 * 2048 * 768
    missed = 48 * 120 * expert
    norms = 48 * (2 * 2048 + 2 * 128) + 2048
    table = 151936 * 2048
    assert model.expert_parameters == expert
    assert model.num_sparse == 48
    assert model.active_parameters == 30_532_122_624 - missed - norms - table == 3_041_656_832
    assert model.flops(1) == 2 * model.active_parameters
    assert model.step_weight_bytes() == 2 * (30_532_122_624 - table)
    one_token = model.step_weight_bytes(experts_read=48 * 8)
    assert model.step_weight_bytes() - one_token == 2 * missed
    assert model.step_weight_bytes("float32", experts_read=48 * 8) == 2 * one_token


def test_some_layers_may_be_dense():
    """decoder_sparse_step 2 makes layers 1, 3, 5, … sparse; mlp_only_layers takes some back."""
    config = MODELS["Qwen3-30B-A3B"][0] | {"decoder_sparse_step": 2, "mlp_only_layers": [3]}
    model = spec_from_config(config, {})
    assert [layer.sparse for layer in model.layers[:6]] == [False, True, False, False, False, True]
    assert model.num_sparse == 23
    dense, sparse = 3 * 2048 * 6144, 2048 * 128 + 128 * model.expert_parameters
    assert 30_532_122_624 - model.num_parameters == 25 * (sparse - dense)
    config |= {"mlp_only_layers": list(range(48))}
    model = spec_from_config(config, {})
    assert (model.experts, model.active_parameters) == (None, model.flops(1) // 2)


def test_experts_as_transformers_5_spells_them():
    config = dict(MODELS["Qwen3-30B-A3B"][0])
    config["num_local_experts"] = config.pop("num_experts")
    assert spec_from_config(config, {}) == published("Qwen3-30B-A3B")


@pytest.mark.parametrize(
    ("scaling", "expected", "longest"),
    [
        (
            {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096},
            RopeSpec(kind="yarn", factor=4.0, original_max_len=4096, gain=0.1 * math.log(4) + 1),
            16384,
        ),
        (
            {"rope_type": "yarn", "factor": 2.0, "attention_factor": 0.5, "beta_fast": 16},
            RopeSpec(kind="yarn", factor=2.0, original_max_len=4096, gain=0.5, beta_fast=16.0),
            8192,
        ),
        (
            {"rope_type": "dynamic", "factor": 3.0},
            RopeSpec(kind="dynamic", factor=3.0, original_max_len=4096),
            12288,
        ),
        ({"rope_type": "linear", "factor": 3.0}, RopeSpec(kind="linear", factor=3.0), 4096),
    ],
)
def test_ropes_that_stretch_the_context(scaling, expected, longest):
    model = spec(rope_scaling=scaling)
    assert (model.ropes, model.max_len) == ((expected,), longest)


# ── refusals ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("key", ["text_config", "vision_config"])
def test_models_of_more_than_text_are_refused_in_words(key):
    with pytest.raises(
        UnsupportedModelError, match="Gemma3ForConditionalGeneration wraps"
    ) as error:
        spec_from_config({"architectures": ["Gemma3ForConditionalGeneration"], key: {}}, {})
    assert "text model alone" in error.value.fix
    assert "Gemma3ForCausalLM" in error.value.fix


def test_models_that_look_ahead_are_refused():
    config = MODELS["Gemma-3-1B"][0] | {"use_bidirectional_attention": True}
    with pytest.raises(UnsupportedModelError, match="use_bidirectional_attention"):
        spec_from_config(config, {})


@pytest.mark.parametrize(
    ("name", "key", "bad"),
    [
        ("Mistral-7B-v0.1", "sliding_window", [0, -1, 1.5, "17", True]),
        ("Qwen3-0.6B", "use_sliding_window", ["yes", 1]),
        ("Gemma-2-2B", "query_pre_attn_scalar", [0, -1, "wide", True]),
        ("Gemma-2-2B", "attn_logit_softcapping", [-1.0, "soft", True]),
        ("Gemma-2-2B", "final_logit_softcapping", [-1.0, [30.0]]),
        ("Gemma-3-1B", "sliding_window_pattern", [0, -6, "6"]),
        ("Gemma-3-1B", "rope_local_base_freq", [-1.0, "local"]),
        ("Granite-3.0-2B", "embedding_multiplier", [-1, "big"]),
        ("Granite-3.0-2B", "attention_multiplier", [0, True]),
        ("Granite-3.0-2B", "residual_multiplier", [0, [1]]),
        ("Granite-3.0-2B", "logits_scaling", [0, "8"]),
        ("SmolLM3-3B", "no_rope_layers", [[1, 0], 4, [2] * 36, [[]] * 36]),
        ("SmolLM3-3B", "no_rope_layer_interval", [0, -4, 1.5]),
        ("Qwen3-30B-A3B", "num_experts", [0, 1.5, "128"]),
        ("Qwen3-30B-A3B", "num_experts_per_tok", [0, 129, "8"]),
        ("Qwen3-30B-A3B", "moe_intermediate_size", [0, -768]),
        ("Qwen3-30B-A3B", "norm_topk_prob", ["true", 1]),
        ("Qwen3-30B-A3B", "decoder_sparse_step", [0, -1]),
        ("Qwen3-30B-A3B", "mlp_only_layers", [3, "all"]),
    ],
)
def test_bad_values_of_families_are_named(name, key, bad):
    for value in bad:
        with pytest.raises(ModelError, match=f"{key} must be"):
            spec_from_config(MODELS[name][0] | {key: value}, {})


def test_more_rope_than_head_is_refused():
    with pytest.raises(ModelError, match="partial_rotary_factor"):
        spec(partial_rotary_factor=1.5)


def test_a_bad_first_window_layer_is_named():
    for value in (-1, "all", True):
        with pytest.raises(ModelError, match="max_window_layers must be"):
            spec(
                **{"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True},
                max_window_layers=value,
            )


@pytest.mark.parametrize(
    ("scaling", "key"),
    [
        ({"type": "yarn", "factor": -4.0}, "factor"),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 0}, "original_max"),
        ({"type": "yarn", "factor": 4.0, "beta_fast": "fast"}, "beta_fast"),
        ({"type": "yarn", "factor": 4.0, "attention_factor": -1}, "attention_factor"),
        ({"type": "yarn", "factor": 4.0, "truncate": 1}, "truncate"),
        ({"type": "dynamic"}, "factor"),
        ({"type": "linear", "factor": 2.0, "partial_rotary_factor": 0}, "partial_rotary_factor"),
    ],
)
def test_bad_ropes_are_named(scaling, key):
    with pytest.raises(ModelError, match=f"{key}.* must be"):
        spec(rope_scaling=scaling)
