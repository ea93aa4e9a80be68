"""Configs of real models and what is published of them, for tests without their weights."""


def llama(vocab, hidden, intermediate, layers, heads, kv_heads, tied=False, **more):
    """A Llama config of these dimensions, as its config.json says them."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "tie_word_embeddings": tied,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "torch_dtype": "bfloat16",
        **more,
    }


def like(architecture, *dimensions, **more):
    """The same keys for another architecture; `tied` None leaves the key out."""
    config = llama(*dimensions, **more) | {"architectures": [architecture]}
    return {key: value for key, value in config.items() if value is not None}


LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LATENT = {
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "max_position_embeddings": 163840,
}
DEEPSEEK_YARN = {
    "type": "yarn",
    "factor": 40,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32,
    "beta_slow": 1,
}
MODELS = {
    "Llama-3.1-8B": (
        llama(128256, 4096, 14336, 32, 32, 8, rope_theta=5e5, rope_scaling=LLAMA3_ROPE),
        *(8_030_261_248, 131_072),
    ),
    "Llama-3.2-1B": (
        llama(128256, 2048, 8192, 16, 32, 8, True, head_dim=64, rope_theta=5e5),
        *(1_235_814_400, 32_768),
    ),
    "Llama-2-13B": (
        llama(32000, 5120, 13824, 40, 40, 40, torch_dtype="float16"),
        *(13_015_864_320, 819_200),
    ),
    "SmolLM2-135M": (llama(49152, 576, 1536, 30, 9, 3, True), 134_515_008, 23_040),
    "Mistral-7B-v0.1": (
        like(
            *("MistralForCausalLM", 32000, 4096, 14336, 32, 32, 8),
            max_position_embeddings=32768,
            sliding_window=4096,
        ),
        *(7_241_732_096, 131_072),
    ),
    "Mixtral-8x7B": (
        like(
            *("MixtralForCausalLM", 32000, 4096, 14336, 32, 32, 8),
            max_position_embeddings=32768,
            num_local_experts=8,
            num_experts_per_tok=2,
        ),
        *(46_702_792_704, 131_072),
    ),
    "Ministral-3-8B (text)": (
        like("Ministral3ForCausalLM", 131072, 4096, 14336, 34, 32, 8)
        | {"head_dim": 128, "max_position_embeddings": 262144},
        *(8_489_553_920, 139_264),
    ),
    "Qwen1.5-MoE-A2.7B": (
        like("Qwen2MoeForCausalLM", 151936, 2048, 5632, 24, 16, 16)
        | {"num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408},
        *(14_315_784_192, 196_608),
    ),
    "Qwen2.5-0.5B": (
        like("Qwen2ForCausalLM", 151936, 896, 4864, 24, 14, 2, True),
        *(494_032_768, 12_288),
    ),
    "Qwen2.5-7B": (
        like("Qwen2ForCausalLM", 152064, 3584, 18944, 28, 28, 4),
        *(7_615_616_512, 57_344),
    ),
    "Qwen3-0.6B": (
        like("Qwen3ForCausalLM", 151936, 1024, 3072, 28, 16, 8, True, head_dim=128),
        *(596_049_920, 114_688),
    ),
    "Qwen3-30B-A3B": (
        like(
            *("Qwen3MoeForCausalLM", 151936, 2048, 6144, 48, 32, 4),
            head_dim=128,
            num_experts=128,
            num_experts_per_tok=8,
            moe_intermediate_size=768,
            norm_topk_prob=True,
            decoder_sparse_step=1,
            mlp_only_layers=[],
        ),
        *(30_532_122_624, 98_304),
    ),
    "Qwen3-Next-80B-A3B": (  # without the layers that guess
        like("Qwen3NextForCausalLM", 151936, 2048, 5120, 48, 16, 2)
        | {"head_dim": 256, "max_position_embeddings": 262144},
        *(79_674_391_296, 24_576),
    ),
    "Qwen3.5-27B (text)": (  # without the layer that guesses
        like("Qwen3_5ForCausalLM", 248320, 5120, 17408, 64, 24, 4)
        | {"head_dim": 256, "linear_num_value_heads": 48, "max_position_embeddings": 262144},
        *(26_895_998_464, 65_536),
    ),
    "Qwen3.5-35B-A3B (text)": (
        like("Qwen3_5MoeForCausalLM", 248320, 2048, None, 40, 16, 2)
        | {"head_dim": 256, "max_position_embeddings": 262144},
        *(34_660_610_688, 20_480),
    ),
    "Gemma-2-2B": (
        like(
            *("Gemma2ForCausalLM", 256000, 2304, 9216, 26, 8, 4, None),
            head_dim=256,
            sliding_window=4096,
            max_position_embeddings=8192,
        ),
        *(2_614_341_888, 106_496),
    ),
    "Gemma-3-1B": (
        like(
            *("Gemma3ForCausalLM", 262144, 1152, 6912, 26, 4, 1, None),
            head_dim=256,
            sliding_window=512,
            sliding_window_pattern=6,
            max_position_embeddings=32768,
        ),
        *(999_885_952, 26_624),
    ),
    "Gemma-3n-E2B (text)": (
        like("Gemma3nForCausalLM", 262400, 2048, 8192, 30, 8, 2, None)
        | {
            "head_dim": 256,
            "sliding_window": 512,
            "max_position_embeddings": 32768,
            "num_kv_shared_layers": 10,
            "activation_sparsity_pattern": [0.95] * 10 + [0.0] * 20,
        },
        *(4_435_182_688, 40_960),
    ),
    "Gemma-3n-E4B (text)": (
        like("Gemma3nForCausalLM", 262400, 2048, 16384, 35, 8, 2, None)
        | {"head_dim": 256, "sliding_window": 512, "max_position_embeddings": 32768},
        *(6_835_235_568, 40_960),
    ),
    "Phi-3-mini-4k": (
        like("Phi3ForCausalLM", 32064, 3072, 8192, 32, 32, 32, sliding_window=2047),
        *(3_821_079_552, 393_216),
    ),
    "Phi-4-mini": (
        like("Phi3ForCausalLM", 200064, 3072, 8192, 32, 24, 8, True)
        | {
            "partial_rotary_factor": 0.75,
            "max_position_embeddings": 131072,
            "original_max_position_embeddings": 4096,
            "rope_scaling": {
                "type": "longrope",
                "short_factor": [1.0] * 48,
                "long_factor": [2.0] * 48,
            },
        },
        *(3_836_021_760, 131_072),
    ),
    "OLMo-2-7B": (
        like("Olmo2ForCausalLM", 100352, 4096, 11008, 32, 32, 32, rope_theta=5e5),
        *(7_298_617_344, 524_288),
    ),
    "Olmo-3-7B": (
        like("Olmo3ForCausalLM", 100278, 4096, 11008, 32, 32, 32, rope_theta=5e5)
        | {
            "sliding_window": 4096,
            "max_position_embeddings": 65536,
            "rope_scaling": {
                **{"rope_type": "yarn", "factor": 8.0, "attention_factor": 1.2079441541679836},
                "original_max_position_embeddings": 8192,
            },
        },
        *(7_298_011_136, 524_288),
    ),
    "LFM2-1.2B": (
        like("Lfm2ForCausalLM", 65536, 2048, 12288, 16, 32, 8, None)
        | {"full_attn_idxs": [2, 5, 8, 10, 12, 14], "max_position_embeddings": 128000},
        *(1_170_340_608, 12_288),
    ),
    "LFM2-8B-A1B": (
        like("Lfm2MoeForCausalLM", 65536, 2048, 7168, 24, 32, 8, None)
        | {
            "max_position_embeddings": 128000,
            "moe_intermediate_size": 1792,
            "layer_types": [
                "full_attention" if i in (2, 6, 10, 14, 18, 21) else "conv" for i in range(24)
            ],
        },
        *(8_339_930_560, 12_288),
    ),
    "Granite-3.0-2B": (
        like(
            *("GraniteForCausalLM", 49155, 2048, 8192, 40, 32, 8, True),
            embedding_multiplier=12.0,
            attention_multiplier=0.015625,
            residual_multiplier=0.22,
            logits_scaling=8.0,
        ),
        *(2_533_531_648, 81_920),
    ),
    "gpt-oss-20b": (
        like(
            *("GptOssForCausalLM", 201088, 2880, 2880, 24, 64, 8),
            head_dim=64,
            num_local_experts=32,
            num_experts_per_tok=4,
            sliding_window=128,
            max_position_embeddings=131072,
        ),
        *(20_914_757_184, 49_152),
    ),
    "DeepSeek-V2-Lite": (
        like("DeepseekV2ForCausalLM", 102400, 2048, 10944, 27, 16, 16)
        | {
            **LATENT,
            "q_lora_rank": None,
            "n_routed_experts": 64,
            "num_experts_per_tok": 6,
            "n_shared_experts": 2,
            "moe_intermediate_size": 1408,
            "first_k_dense_replace": 1,
            "topk_method": "greedy",
            "scoring_func": "softmax",
            "norm_topk_prob": False,
            "rope_scaling": DEEPSEEK_YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
        },
        *(15_706_484_224, 31_104),
    ),
    "DeepSeek-V2": (
        like("DeepseekV2ForCausalLM", 102400, 5120, 12288, 60, 128, 128)
        | {
            **LATENT,
            "q_lora_rank": 1536,
            "n_routed_experts": 160,
            "num_experts_per_tok": 6,
            "n_shared_experts": 2,
            "moe_intermediate_size": 1536,
            "first_k_dense_replace": 1,
            "topk_method": "group_limited_greedy",
            "n_group": 8,
            "topk_group": 3,
            "routed_scaling_factor": 16.0,
            "rope_scaling": DEEPSEEK_YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
        },
        *(235_741_434_880, 69_120),
    ),
    "DeepSeek-V3": (
        like("DeepseekV3ForCausalLM", 129280, 7168, 18432, 61, 128, 128)
        | {
            **LATENT,
            "q_lora_rank": 1536,
            "n_routed_experts": 256,
            "num_experts_per_tok": 8,
            "n_shared_experts": 1,
            "moe_intermediate_size": 2048,
            "first_k_dense_replace": 3,
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
            "n_group": 8,
            "topk_group": 4,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "rope_scaling": DEEPSEEK_YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
        },
        *(671_026_419_200, 70_272),
    ),
    "SmolLM3-3B": (
        like("SmolLM3ForCausalLM", 128256, 2048, 11008, 36, 16, 4, None, rope_theta=5e6),
        *(3_075_098_624, 73_728),
    ),
}
"""Name → (config, parameters, bytes of KV a token takes in 16 bits)."""
