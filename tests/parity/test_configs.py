"""Configs as transformers reads them: what one leaves out, how many parameters it asks for."""

import json

import pytest
import torch

from headway.spec import FAMILIES, spec_from_config
from parity import tiny
from parity.tiny import num_elements
from published import MODELS

SIZES = {
    "vocab_size": 211,
    "hidden_size": 64,
    "intermediate_size": 52,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 8192,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
NEEDED = {
    "deepseekv2": {"num_key_value_heads": 8, "num_experts_per_tok": 6},
    "deepseekv3": {"num_key_value_heads": 8},
    "gemma3n": {"num_kv_shared_layers": 3},
    "granitehybrid": {"layer_types": ["linear_attention"] * 6 + ["full_attention"] * 2},
}
"""Family → sizes that have no default, or must be other ones."""
KEYS = {
    "sizes-alone": {},
    "theta": {"rope_theta": 5e5},
    "linear": {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    "window-of-17": {"sliding_window": 17},
    "window-of-null": {"sliding_window": None},
    "window-switched-on": {"use_sliding_window": True},
    "window-switched-on-for-some": {
        "use_sliding_window": True,
        "sliding_window": 17,
        "max_window_layers": 3,
    },
    "window-by-layer-but-off": {
        "use_sliding_window": False,
        "sliding_window": 17,
        "layer_types": ["sliding_attention", "full_attention"] * 4,
    },
    "period-of-4": {"sliding_window": 17, "sliding_window_pattern": 4, "no_rope_layer_interval": 3},
    "local-theta": {"rope_local_base_freq": 50.0},
    "nested-ropes": {
        "rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8.0}},
        "layer_types": ["full_attention"] * 8,
    },
}
"""What a config says beyond its sizes."""
NOT_THEIRS = {
    ("gemma2", "period-of-4"): "transformers has a period of 2 whatever the config says",
    ("mistral", "window-by-layer-but-off"): "transformers gives every layer the window",
    ("phi3", "window-by-layer-but-off"): "transformers gives every layer the window",
    ("gemma3n", "window-of-null"): "transformers wants a number here",
    ("phi3", "linear"): "transformers knows longrope alone here",
    ("granitehybrid", "window-by-layer-but-off"): "neither knows a window here",
    ("qwen3next", "window-by-layer-but-off"): "neither knows a window here",
    ("qwen35", "window-by-layer-but-off"): "neither knows a window here",
    ("qwen35moe", "window-by-layer-but-off"): "neither knows a window here",
    ("lfm2", "window-by-layer-but-off"): "neither knows a window here",
    ("lfm2moe", "window-by-layer-but-off"): "neither knows a window here",
}
ONLY_FULL = ("llama", "olmo2", "granite", "deepseekv2", "deepseekv3")
ALIKE = (*ONLY_FULL, "mistral", "mixtral", "ministral3", "phi3", "qwen3moe")
CASES = [
    (family, case)
    for family in tiny.FAMILIES
    for case in KEYS
    if (family, case) not in NOT_THEIRS
    and not (family in ONLY_FULL and "window-" in case)
    and not (family in ALIKE and case == "nested-ropes")
]


def test_every_family_is_compared():
    ours = {model_class.__name__ for model_class, _ in tiny.FAMILIES.values()}
    assert ours == set(FAMILIES)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("family", "case"), CASES)
def test_missing_keys_mean_what_they_mean_to_transformers(family: str, case: str):
    """The config as given, and as transformers fills it in: one spec."""
    model_class, _ = tiny.FAMILIES[family]
    sizes = SIZES | NEEDED.get(family, {})
    given = {**sizes, **KEYS[case], "architectures": [model_class.__name__]}
    config = model_class.config_class(**json.loads(json.dumps(given)))
    filled = json.loads(config.to_json_string(use_diff=False))
    assert spec_from_config(given, {}) == spec_from_config(filled, {})


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MODELS)
def test_real_models_have_as_many_parameters_in_transformers(name: str):
    """Built on the meta device, without memory; a tied head is counted once."""
    config, num_parameters, _ = MODELS[name]
    classes = {model_class.__name__: model_class for model_class, _ in tiny.FAMILIES.values()}
    model_class = classes[config["architectures"][0]]
    with torch.device("meta"):
        model = model_class(model_class.config_class(**json.loads(json.dumps(config))))
    assert num_elements(model) == num_parameters
