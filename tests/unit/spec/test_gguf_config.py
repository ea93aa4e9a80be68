"""Models out of GGUF metadata: the numbers, and what is refused."""

import math
import struct
from pathlib import Path

import pytest

import gguf_file
from headway.core.errors import CheckpointError, ModelError, UnsupportedModelError
from headway.spec import FAMILIES, ModelSpec, read_model_spec
from headway.spec.gguf.config import ARCHITECTURES
from headway.spec.model_files import read_document


def metadata_of(architecture: str, **changes: object) -> dict[str, object]:
    """`gguf_file.LLAMA` for another architecture; None removes a key."""
    renamed = {
        key.replace("llama.", f"{architecture}.", 1): value
        for key, value in gguf_file.LLAMA.items()
    }
    full = {f"{architecture}.{key.replace('__', '.')}": value for key, value in changes.items()}
    merged = {**renamed, "general.architecture": architecture, **full}
    return {key: value for key, value in merged.items() if value is not None}


def spec(path: Path, architecture: str = "llama", tensors=None, **changes: object) -> ModelSpec:
    file = path / "model.gguf"
    tensors = {**gguf_file.llama_tensors(), **(tensors or {})}
    gguf_file.write(file, metadata_of(architecture, **changes), tensors)
    return read_model_spec(file)


def test_every_architecture_has_a_family():
    assert {row.hf for row in ARCHITECTURES.values()} <= set(FAMILIES)


def test_numbers_of_a_llama(tmp_path: Path):
    found = spec(tmp_path, rope__freq_base=5e5)
    assert found.architecture == "LlamaForCausalLM"
    assert (found.vocab_size, found.hidden_size, found.intermediate_size) == (8, 32, 64)
    assert (found.num_heads, found.num_kv_heads, found.head_dim, found.num_layers) == (4, 2, 8, 1)
    assert (found.max_len, found.rms_norm_eps, found.ropes[0].theta) == (64, 1e-5, 5e5)
    assert found.tied and found.dtype == "bfloat16"
    assert found.quantization == "gguf"
    own = spec(tmp_path, tensors={"output.weight": gguf_file.zeros("F32", 8, 32)})
    assert not own.tied and own.dtype == "bfloat16"
    plain = spec(tmp_path, tensors=gguf_file.llama_tensors("F16"))
    assert (plain.dtype, plain.quantization) == ("float16", "")


def test_head_of_its_own_size_and_a_partly_turned_one(tmp_path: Path):
    lengths = {"attention__key_length": 16, "attention__value_length": 16}
    found = spec(tmp_path, "qwen3", **lengths)
    assert (found.head_dim, found.ropes[0].share) == (16, 0.5)
    with pytest.raises(UnsupportedModelError, match="dimension_count = 8 of 16"):
        spec(tmp_path, **lengths)
    with pytest.raises(UnsupportedModelError, match=r"llama.attention.value_length = 8"):
        spec(tmp_path, attention__key_length=16, attention__value_length=8)


def test_values_of_each_layer_must_agree(tmp_path: Path):
    assert spec(tmp_path, attention__head_count_kv=[2, 2]).num_kv_heads == 2
    with pytest.raises(UnsupportedModelError, match="differs between layers"):
        spec(tmp_path, attention__head_count_kv=[2, 1])


def test_gemma3(tmp_path: Path):
    """Five windows, a full layer; a rope for each; the file's norms have the 1 already."""
    found = spec(
        tmp_path,
        "gemma3",
        block_count=7,
        attention__sliding_window=16,
        rope__freq_base=1e6,
        rope__scaling__type="linear",
        rope__scaling__factor=8.0,
    )
    windows = [layer.window for layer in found.layers]
    assert windows == [16] * 5 + [0, 16]
    full, local = (found.ropes[found.layers[i].rope or 0] for i in (5, 0))
    assert (full.theta, full.kind, full.factor) == (1e6, "linear", 8.0)
    assert (local.theta, local.kind) == (1e4, "default")
    assert found.attention_scale == 8**-0.5 and found.norm_offset == 1.0
    assert found.embedding_scale == math.sqrt(32)


def test_gemma2_of_27b_has_a_scale_of_its_own(tmp_path: Path):
    numbers = {f"attention__{each}_length": 16 for each in ("key", "value")}
    assert spec(tmp_path, "gemma2", **numbers).attention_scale == 16**-0.5
    assert spec(tmp_path, "gemma2", **numbers, block_count=46).attention_scale == 8**-0.5
    caps = {"attn_logit_softcapping": 20.0, "final_logit_softcapping": 10.0}
    found = spec(tmp_path, "gemma2", **caps)
    assert (found.attention_softcap, found.logits_softcap) == (20.0, 10.0)


def test_granite_multiplies(tmp_path: Path):
    scales = {
        "attention__scale": 0.0078125,
        "embedding_scale": 12.0,
        "residual_scale": 0.22,
        "logit_scale": 8.0,
    }
    found = spec(tmp_path, "granite", **scales)
    assert (found.attention_scale, found.embedding_scale) == (0.0078125, 12.0)
    assert (found.residual_scale, found.logits_scale) == (0.22, 0.125)


def test_qwen3_mixture(tmp_path: Path):
    found = spec(
        tmp_path,
        "qwen3moe",
        expert_count=4,
        expert_used_count=2,
        expert_feed_forward_length=16,
    )
    experts = found.experts
    assert experts is not None and experts.normalize
    assert (experts.count, experts.active, experts.intermediate_size) == (4, 2, 16)


def floats(*values: float) -> tuple[str, tuple[int, ...], bytes]:
    return "F32", (len(values),), struct.pack(f"<{len(values)}f", *values)


def test_yarn(tmp_path: Path):
    scaling = {
        "rope__scaling__type": "yarn",
        "rope__scaling__factor": 4.0,
        "rope__scaling__original_context_length": 32,
    }
    (rope,) = spec(tmp_path, **scaling).ropes
    assert (rope.kind, rope.factor, rope.original_max_len) == ("yarn", 4.0, 32)
    assert rope.gain == 0.1 * math.log(4) + 1


def test_factors_of_frequencies(tmp_path: Path):
    """Llama 3.1's bands written out, and Phi-3's two lists with its gain."""
    (rope,) = spec(tmp_path, tensors={"rope_freqs.weight": floats(1, 1, 4, 8)}).ropes
    assert (rope.kind, rope.gain) == ("longrope", 1.0)
    assert rope.short_factors == rope.long_factors == (1, 1, 4, 8)
    both = {
        "rope_factors_short.weight": floats(1, 1, 1, 1.5),
        "rope_factors_long.weight": floats(1, 2, 3, 4),
    }
    scaling = {
        "rope__scaling__attn_factor": 1.1875,
        "rope__scaling__original_context_length": 16,
    }
    (rope,) = spec(tmp_path, "phi3", both, **scaling).ropes
    assert (rope.short_factors, rope.long_factors) == ((1, 1, 1, 1.5), (1, 2, 3, 4))
    assert (rope.original_max_len, rope.gain) == (16, 1.1875)
    with pytest.raises(CheckpointError, match="4 numbers in F32"):
        spec(tmp_path, tensors={"rope_freqs.weight": floats(1, 1, 4)})
    with pytest.raises(ModelError, match="short_factor"):
        spec(tmp_path, tensors={"rope_freqs.weight": floats(1, 1, 4, float("nan"))})


@pytest.mark.parametrize(
    ("architecture", "changes", "words"),
    [
        ("mamba", {}, r"'mamba'(.|\n)*llama, mistral3"),
        ("mistral3", {"attention__temperature_scale": 0.1}, "temperature_scale"),
        ("llama", {"attention__scale": 0.5}, r"llama.attention.scale = 0.5"),
        ("llama", {"attention__causal": False}, "attention.causal"),
        ("llama", {"attention__clamp_kqv": 8.0}, "clamp_kqv"),
        ("llama", {"rope__scaling__type": "ntk", "rope__scaling__factor": 2.0}, "= ntk"),
        ("llama", {"rope__scaling__attn_factor": 1.5}, "attn_factor"),
        (
            "olmo2",
            {"attention__sliding_window": 16, "rope__freq_base_swa": 5.0},
            "freq_base_swa",
        ),
        ("granite", {"rope__scaling__finetuned": False}, "finetuned"),
        ("qwen2", {"something_new": 2}, "qwen2.something_new = 2"),
    ],
)
def test_what_would_change_the_model_is_refused_by_name(
    architecture: str, changes: dict[str, object], words: str, tmp_path: Path
):
    with pytest.raises(UnsupportedModelError, match=words):
        spec(tmp_path, architecture, **changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"block_count": None}, "lacks llama.block_count"),
        ({"attention__head_count": 0}, "0 attention heads"),
        ({"attention__head_count": "four"}, "four attention heads"),
        ({"block_count": "two"}, r"model.gguf(.|\n)*num_hidden_layers"),
        ({"attention__head_count_kv": 3}, "multiple of 3 KV heads"),
        ({"rope__dimension_count": 0}, "dimension_count"),
        ({"attention__layer_norm_rms_epsilon": -1.0}, "rms_norm_eps"),
    ],
)
def test_values_that_cannot_be(changes: dict[str, object], words: str, tmp_path: Path):
    with pytest.raises(ModelError, match=words):
        spec(tmp_path, **changes)


def test_biases_are_seen_by_their_tensors(tmp_path: Path):
    parts = {"attn_q": 32, "attn_k": 16, "attn_v": 16, "attn_output": 32}
    biases = {f"blk.0.{part}.bias": gguf_file.zeros("F32", n) for part, n in parts.items()}
    found = spec(tmp_path, tensors=biases)
    assert (found.qkv_bias, found.o_bias, found.mlp_bias) == (True, True, False)
    del biases["blk.0.attn_output.bias"]
    with pytest.raises(UnsupportedModelError, match="biases for attn_q, attn_k, attn_v alone"):
        spec(tmp_path, tensors=biases)


def test_tokens_that_end_answers_and_how_to_choose(tmp_path: Path):
    """eos first, then what the file names and what every model ends with, where it is control."""
    tokens = ["a", "<|im_end|>", "</s>", "<|endoftext|>", "<|eom_id|>", "<|end|>"]
    metadata = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1, 3, 3, 3, 3, 1],
        "tokenizer.ggml.eos_token_id": 3,
        "tokenizer.ggml.eot_token_id": 1,
        "tokenizer.ggml.bos_token_id": 2,
        "general.sampling.temp": 0.7,
        "general.sampling.top_k": 20,
    }
    gguf_file.write(tmp_path / "model.gguf", metadata, {})
    assert read_document(tmp_path / "model.gguf", "generation_config.json") == {
        "bos_token_id": 2,
        "eos_token_id": [3, 1, 2, 4],
        "temperature": 0.7,
        "top_k": 20,
    }
