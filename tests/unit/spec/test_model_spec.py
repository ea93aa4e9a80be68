"""Dimensions against the published figures of real models, and each refusal in words."""

import json

import pytest

from headway.core.errors import ModelError, UnsupportedModelError
from headway.spec import (
    FAMILIES,
    KVGroupSpec,
    RopeSpec,
    read_json,
    read_model_spec,
    spec_from_config,
)
from published import LLAMA3_ROPE, MODELS, llama

SMALL = llama(512, 64, 172, 5, 8, 4, True)


def small(**changes) -> dict:
    """The small config with keys changed; None takes a key out."""
    config = {**SMALL, **changes}
    return {key: value for key, value in config.items() if value is not None}


def spec(**changes):
    return spec_from_config(small(**changes), {})


@pytest.mark.parametrize("name", MODELS)
def test_parameters_and_kv_bytes(name):
    config, parameters, kv_bytes = MODELS[name]
    model = spec_from_config(config, {})
    assert model.num_parameters == parameters
    assert model.weight_bytes() == 2 * parameters
    assert model.weight_bytes("float32") == 4 * parameters
    assert model.kv_bytes_per_token() == kv_bytes
    assert model.kv_bytes_per_token("float32") == 2 * kv_bytes


def test_kv_of_a_batch():
    """Llama-2-13B, 32 requests of 2,048 tokens in fp16: 53.7 GB, twice the weights."""
    model = spec_from_config(MODELS["Llama-2-13B"][0], {})
    assert 32 * 2048 * model.kv_bytes_per_token("float16") == 53_687_091_200
    assert model.dtype == "float16"


def test_step_reads_all_but_the_looked_up_rows():
    """A tied table is read by the head; an untied one only row by row."""
    untied = spec_from_config(MODELS["Llama-3.1-8B"][0], {})
    assert untied.step_weight_bytes() == 2 * (8_030_261_248 - 128256 * 4096)
    tied = spec_from_config(MODELS["Llama-3.2-1B"][0], {})
    assert tied.step_weight_bytes() == tied.weight_bytes()


def test_flops():
    """Llama-3.1-8B: 15.0 GFLOP a token, and 524,288 more per token of context."""
    model = spec_from_config(MODELS["Llama-3.1-8B"][0], {})
    weights_multiplied = 8_030_261_248 - 128256 * 4096 - 65 * 4096
    assert model.flops(1) == 2 * weights_multiplied == 15_009_316_864
    assert model.flops(1, context=1000) - model.flops(1) == 524_288_000
    assert model.flops(100, context=50) == 100 * model.flops(1, context=50)
    head = 2 * 128256 * 4096
    assert model.flops(512, num_sampled=1) == 512 * (model.flops(1) - head) + head
    assert model.flops(512, num_sampled=0) == 512 * (model.flops(1) - head)


def test_tied_model_multiplies_by_its_table_once():
    model = spec_from_config(MODELS["Llama-3.2-1B"][0], {})
    assert model.flops(1) == 2 * (1_235_814_400 - 33 * 2048)


def test_biases():
    """Qwen2 has biases on q, k, v alone; attention_bias of Llama has one on o too."""
    plain, qwen2 = spec(), spec(architectures=["Qwen2ForCausalLM"])
    assert (qwen2.qkv_bias, qwen2.o_bias) == (True, False)
    assert qwen2.num_parameters - plain.num_parameters == 5 * (64 + 2 * 32)
    biased = spec(attention_bias=True)
    assert (biased.qkv_bias, biased.o_bias) == (True, True)
    assert biased.num_parameters - plain.num_parameters == 5 * (64 + 2 * 32 + 64)
    assert spec(mlp_bias=True).num_parameters - plain.num_parameters == 5 * (2 * 172 + 64)


def test_one_kv_group_of_all_layers():
    (group,) = spec().kv_groups
    assert group == KVGroupSpec(layers=(0, 1, 2, 3, 4), num_kv_heads=4, head_dim=8)
    assert group.bytes_per_token("float32") == 2 * 5 * 4 * 8 * 4


def test_defaults():
    """head_dim is hidden / heads, KV heads are the heads, the context 2,048, the type fp32."""
    keys = ("num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "torch_dtype")
    model = spec(**dict.fromkeys(keys))
    assert (model.head_dim, model.num_kv_heads, model.max_len) == (8, 8, 2048)
    assert (model.rms_norm_eps, model.dtype) == (1e-6, "float32")
    assert spec(tie_word_embeddings=None).tied is False
    assert (model.bos_token_id, model.eos_token_ids) == (None, ())


def test_head_dim_of_its_own():
    model = spec(head_dim=16)
    assert (model.q_size, model.kv_size) == (128, 64)
    assert model.attention_parameters - spec().attention_parameters == 64 * (2 * 64 + 2 * 32)


@pytest.mark.parametrize(
    ("changes", "dtype"),
    [
        ({"torch_dtype": "float16"}, "float16"),
        ({"torch_dtype": None, "dtype": "bfloat16"}, "bfloat16"),
        ({"torch_dtype": "float16", "dtype": "float32"}, "float32"),
        ({"torch_dtype": "torch.bfloat16"}, "bfloat16"),
    ],
)
def test_dtype_spellings(changes, dtype):
    assert spec(**changes).dtype == dtype


@pytest.mark.parametrize(
    ("changes", "rope"),
    [
        ({}, RopeSpec(theta=10000.0)),
        ({"rope_theta": 5e5}, RopeSpec(theta=5e5)),
        ({"rope_theta": 500000, "rope_scaling": None}, RopeSpec(theta=5e5)),
        ({"rope_parameters": {"rope_theta": 1e5, "rope_type": "default"}}, RopeSpec(theta=1e5)),
        (
            {"rope_theta": 5.0, "rope_parameters": {"rope_theta": 1e6}},
            RopeSpec(theta=1e6),
        ),
        (
            {"rope_scaling": {"type": "linear", "factor": 2}},
            RopeSpec(kind="linear", factor=2.0),
        ),
        (
            {"rope_theta": 5e5, "rope_scaling": LLAMA3_ROPE},
            RopeSpec(theta=5e5, kind="llama3", factor=8.0),
        ),
        (
            {"rope_parameters": {**LLAMA3_ROPE, "rope_theta": 5e5, "factor": 32.0}},
            RopeSpec(theta=5e5, kind="llama3", factor=32.0),
        ),
    ],
)
def test_rope_spellings(changes, rope):
    assert spec(**changes).ropes[0] == rope


def test_end_tokens():
    """generation_config.json first, with all of its ids; config.json when it has none."""
    config = small(eos_token_id=2, bos_token_id=1)
    assert spec_from_config(config, {"eos_token_id": [1, 2, 9]}).eos_token_ids == (1, 2, 9)
    assert spec_from_config(config, {"eos_token_id": 0}).eos_token_ids == (0,)
    assert spec_from_config(config, {}).eos_token_ids == (2,)
    assert spec_from_config(config, {"eos_token_id": []}).eos_token_ids == (2,)
    assert spec_from_config(small(eos_token_id=[4, 5]), {}).eos_token_ids == (4, 5)
    assert spec_from_config(config, {}).bos_token_id == 1


# ── refusals ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "names", [["GPT2LMHeadModel"], ["MambaForCausalLM"], [], None, "LlamaForCausalLM", [7], [[]]]
)
def test_unknown_architecture_lists_the_known_ones(names):
    with pytest.raises(UnsupportedModelError) as caught:
        spec(architectures=names)
    assert all(name in caught.value.fix for name in FAMILIES)
    if names and names[0] in ("GPT2LMHeadModel", "MambaForCausalLM"):
        assert names[0] in caught.value.cause


@pytest.mark.parametrize(
    ("method", "words"),
    [
        ("bitsandbytes", "bitsandbytes"),
        ("HQQ", "hqq"),
        ("gguf", "gguf"),
        ("something-new", "something-new"),
        (None, "unknown"),
    ],
)
def test_other_quantizations_are_refused_by_name(method, words):
    with pytest.raises(UnsupportedModelError, match=words) as caught:
        spec(quantization_config={"quant_method": method, "bits": 4})
    assert "unquantized" in caught.value.fix


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"layer_types": ["full_attention"] * 4 + ["sliding_attention"]}, "sliding_attention"),
        ({"layer_types": ["chunked_attention"] * 5}, "chunked_attention"),
        ({"layer_types": [["full_attention"]] * 5}, "full_attention"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"rope_scaling": {"rope_type": "mrope", "factor": 4.0}}, "mrope"),
        ({"rope_scaling": {"type": ["linear"], "factor": 4.0}}, "linear"),
        ({"partial_rotary_factor": 0.9}, "7 of 8 dims"),
        ({"partial_rotary_factor": 0.01}, "0 of 8 dims"),
        ({"head_dim": 2, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "2 of 2 dims"),
        ({"torch_dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
        ({"torch_dtype": 16}, "16"),
    ],
)
def test_variants_are_refused_by_name(changes, words):
    with pytest.raises(UnsupportedModelError, match=words):
        spec(**changes)


def test_switched_off_window_is_full_attention():
    """Qwen2.5's config.json names a window and switches it off."""
    model = spec(
        use_sliding_window=False, sliding_window=131072, layer_types=["full_attention"] * 5
    )
    assert model.kv_groups[0].kind == "full"


SIZES = [
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "intermediate_size", "max_position_embeddings"),
]


def test_bad_sizes_are_named():
    values = [0, -1, 1.5, "64", True, [64], {}, 2**31, 10**30]
    faults = {
        (key, str(value)): told
        for key in SIZES
        for value in values
        if f"{key} must be a positive integer" not in (told := refusal(**{key: value}))
    }
    assert faults == {}


def refusal(**changes):
    """What a config with these changes is refused with; "" where it is read."""
    try:
        spec(**changes)
    except ModelError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    "key",
    [
        *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"),
        "intermediate_size",
    ],
)
def test_missing_sizes_are_named(key):
    with pytest.raises(ModelError, match=f"{key} must be a positive integer"):
        spec(**{key: None})


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"rms_norm_eps": "small"}, "rms_norm_eps"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"rms_norm_eps": -1e-5}, "rms_norm_eps"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps"),
        ({"rms_norm_eps": [1e-5]}, "rms_norm_eps"),
        ({"rope_theta": "large"}, "rope_theta"),
        ({"rope_theta": float("inf")}, "rope_theta"),
        ({"rope_theta": 1.0}, "rope_theta"),
        ({"num_hidden_layers": 2**31 - 1}, "num_hidden_layers"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 1e29}}, "factor"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 1e29}}, "factor"),
        ({"rope_scaling": "linear"}, "rope_scaling"),
        ({"rope_scaling": [1]}, "rope_scaling"),
        ({"rope_scaling": {"type": "linear"}}, "factor"),
        ({"layer_types": "sliding_attention"}, "layer_types"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor"),
        ({"rope_scaling": {**LLAMA3_ROPE, "low_freq_factor": None}}, "low_freq_factor"),
        (
            {"rope_scaling": {**LLAMA3_ROPE, "original_max_position_embeddings": -1}},
            "original_max_position_embeddings",
        ),
        ({"quantization_config": "gptq"}, "quantization_config"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings"),
        ({"attention_bias": "false"}, "attention_bias"),
        ({"mlp_bias": 1}, "mlp_bias"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
        ({"eos_token_id": [1, None]}, "eos_token_id"),
        ({"eos_token_id": -1}, "eos_token_id"),
        ({"bos_token_id": True}, "bos_token_id"),
    ],
)
def test_bad_types_are_named(changes, key):
    with pytest.raises(ModelError, match=f"{key} must be"):
        spec(**changes)


def test_heads_must_divide():
    with pytest.raises(ModelError, match="8 attention heads are not a multiple of 3 KV heads"):
        spec(num_key_value_heads=3)


def test_heads_wider_than_the_model():
    """hidden 4 over 8 heads would be a head of no width."""
    with pytest.raises(ModelError, match="head_dim must be a positive integer"):
        spec(hidden_size=4)


# ── folders ─────────────────────────────────────────────────────────────────────────────────────


def test_reads_a_folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(small(eos_token_id=2)))
    assert read_model_spec(tmp_path).eos_token_ids == (2,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    assert read_model_spec(tmp_path).eos_token_ids == (1, 2)


def test_reads_the_real_ones(shared):
    model = read_model_spec(shared / "models" / "stories260K")
    assert (model.num_parameters, model.eos_token_ids) == (260_032, (1, 2))
    model = read_model_spec(shared / "tokenizers" / "smollm2-grafted")
    assert (model.num_parameters, model.ropes[0].theta) == (134_515_008, 1e5)


def test_folder_that_is_not_there(tmp_path):
    with pytest.raises(ModelError, match="There is no folder") as caught:
        read_model_spec(tmp_path / "nowhere")
    assert caught.value.exit_code == 3


def test_folder_without_a_model(tmp_path):
    with pytest.raises(ModelError, match=r"no config\.json"):
        read_model_spec(tmp_path)
    file = tmp_path / "weights.bin"
    file.write_bytes(b"")
    with pytest.raises(ModelError, match=r"no config\.json"):
        read_model_spec(file)


def test_folder_of_gguf_files_names_one(tmp_path):
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    with pytest.raises(ModelError, match=f"1 GGUF files(.|\n)*{file.name}"):
        read_model_spec(tmp_path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{", "not valid JSON"),
        (b"", "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b"[1, 2]", "does not hold a JSON object"),
        (b"null", "does not hold a JSON object"),
        (b'"text"', "does not hold a JSON object"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not valid JSON"),
    ],
)
def test_files_that_are_no_json_object(tmp_path, content, words):
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=words) as caught:
        read_model_spec(tmp_path)
    assert "config.json" in caught.value.cause


def test_missing_file_is_named(tmp_path):
    with pytest.raises(ModelError, match=r"tokenizer\.json is missing"):
        read_json(tmp_path / "tokenizer.json")
    (tmp_path / "folder.json").mkdir()
    with pytest.raises(ModelError, match="cannot be read"):
        read_json(tmp_path / "folder.json")
