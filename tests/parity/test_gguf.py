"""GGUF files beside the folders they are made from, and beside the `gguf` package's numbers."""

import inspect
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.testing import assert_close
from transformers.convert_slow_tokenizer import TikTokenConverter
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

pytest.importorskip("gguf", reason="pip install gguf")

import gguf
from gguf import GGMLQuantizationType

import gguf_file
from drive import engine_for
from headway.core.errors import CheckpointError, UnsupportedModelError
from headway.runtime.kernels.reference import quantized_linear
from headway.runtime.quantized.gguf import gguf_formats, open_gguf
from headway.runtime.quantized.gguf_blocks import PACKINGS, unpack
from headway.runtime.rounding import RoundedWeight
from headway.spec import read_model_spec
from headway.spec.gguf.tokenizer import LLAMA3, QWEN2
from headway.spec.gguf.types import TYPES
from headway.spec.quantization import planned_bytes
from parity import gguf_models
from parity.logits import our_logits
from parity.tiny import prompts, save, tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

HALVES = {
    **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS"), (0,)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
    "MXFP4": (),
}
"""Where a block has numbers in fp16."""
NUMBERS = {each.name: (number, each) for number, each in TYPES.items()}
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_key_value_heads": 4}


def random_blocks(name: str, rows: int, columns: int, scale: float = 0.1) -> np.ndarray:
    """Rows of blocks, any bytes but for scales that are small numbers, of either sign."""
    _, type = NUMBERS[name]
    generator = np.random.default_rng(len(name) + rows)
    raw = generator.integers(0, 256, (rows, columns // type.block, type.size), dtype=np.uint8)
    for at in HALVES[name]:
        halves = (generator.standard_normal((*raw.shape[:2], 1)) * scale).astype(np.float16)
        raw[..., at : at + 2] = halves.view(np.uint8)
    if name == "MXFP4":
        raw[..., 0] = generator.integers(100, 130, raw.shape[:2])
        raw[0, 0, 0] = 0
    return raw.reshape(rows, -1)


def test_every_type_of_block_is_compared():
    assert set(HALVES) == set(PACKINGS)


@pytest.mark.parametrize("name", PACKINGS)
def test_blocks_are_the_numbers_of_the_gguf_package(name: str):
    """Equal to the bit without minima; with those within fp32's rounding, once for the offset."""
    number, type = NUMBERS[name]
    raw = random_blocks(name, 48, 1024)
    theirs = torch.from_numpy(gguf.dequantize(raw, GGMLQuantizationType(number)))
    weight = unpack(torch.from_numpy(raw), type)
    assert weight.fits(PACKINGS[name].format)
    tolerance = 2e-7 * theirs.abs().max().item() if weight.offsets_OG is not None else 0.0
    assert_close(weight.plain(), theirs, rtol=0, atol=tolerance)


def test_block_by_hand():
    """Q4_0 with d = -0.5: code 0 in the low half of byte 0 is the first number, (0 - 8) · -0.5."""
    codes = bytes([0xF0, 0x1A]) + bytes([0x88]) * 14
    raw = torch.frombuffer(bytearray(np.float16(-0.5).tobytes() + codes), dtype=torch.uint8)
    weight = unpack(raw[None], NUMBERS["Q4_0"][1])
    assert weight.levels_OH[0].tolist() == [-8, 2, *[0] * 14, 7, -7, *[0] * 14]
    assert weight.scales_OG.tolist() == [[-0.5]] and weight.offsets_OG is None


FAMILIES = sorted(gguf_models.ARCHITECTURES)
NOT_WRITTEN = {
    "qwen2moe": {"mlp_only_layers": []},
    "lfm2moe": {"tie_word_embeddings": True, "routed_scaling_factor": 1.0},
    "lfm2": {"conv_bias": False, "block_auto_adjust_ff_dim": False},
}
"""Family → what a file has no word for."""


@pytest.mark.parametrize("family", FAMILIES)
def test_file_gives_the_logits_of_the_folder(family: str, tmp_path: Path):
    """In F32 the numbers are the same, and so is every logit."""
    scalar = {"query_pre_attn_scalar": 24} if family.startswith("gemma") else {}
    model = tiny_model(family, **SIZES, **scalar, **NOT_WRITTEN.get(family, {}))
    file = gguf_models.write(tmp_path / "model.gguf", family, model)
    folder = save(model, tmp_path / "folder")
    (prompt,) = prompts([60])
    expected = our_logits(engine_for(folder).executor, prompt)
    assert_close(our_logits(engine_for(file).executor, prompt), expected, rtol=0, atol=1e-5)


def test_split_files_give_the_logits_of_one(tmp_path: Path):
    model = tiny_model("llama", **SIZES)
    whole = gguf_models.write(tmp_path / "model.gguf", "llama", model, MIXED)
    first = gguf_models.write(tmp_path / "model.gguf", "llama", model, MIXED, splits=3)
    assert first.name == "model-00001-of-00003.gguf"
    (prompt,) = prompts([60])
    expected = our_logits(engine_for(whole).executor, prompt)
    assert torch.equal(our_logits(engine_for(first).executor, prompt), expected)


MIXED = {
    "attn_v": "Q8_0",
    "attn_q": "Q4_0",
    "attn_k": "Q4_0",
    "ffn_gate": "Q5_0",
    "ffn_up": "Q5_1",
    "token_embd": "Q8_0",
    "": "Q4_0",
}
"""Parts of fused layers in formats of their own, as Q4_K_M has them."""


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3moe"])
def test_mixed_formats_are_near_the_plain_model(family: str, tmp_path: Path):
    experts = {"moe_intermediate_size": 32} if family == "qwen3moe" else {}
    model = tiny_model(family, **SIZES, **experts, initializer_range=0.05)
    file = gguf_models.write(tmp_path / "mixed.gguf", family, model, MIXED)
    plain = gguf_models.write(tmp_path / "plain.gguf", family, model)
    (prompt,) = prompts([40])
    executor = engine_for(file).executor
    formats = {module: str(format) for module, format in executor.spec.formats}
    assert executor.spec.dtype == "bfloat16"  # whatever the router has
    assert formats["layers.0.attention.qkv.v"] == "int8 in groups of 32"
    assert formats["layers.0.attention.qkv.k"] == "int4 in groups of 32"
    assert "layers.0.attention.qkv" not in formats
    if family != "qwen3moe":
        assert formats["layers.0.mlp.gate_up"] == "int8 in groups of 32, any offsets"
    rounded, expected = our_logits(executor, prompt), our_logits(engine_for(plain).executor, prompt)
    assert torch.nn.functional.cosine_similarity(rounded, expected).mean() > 0.93


PARTS = {
    "attention.qkv": [f"self_attn.{part}_proj" for part in "qkv"],
    "attention.out": ["self_attn.o_proj"],
    "mlp.gate_up": ["mlp.gate_proj", "mlp.up_proj"],
    "mlp.down": ["mlp.down_proj"],
}


@pytest.mark.parametrize("kinds", [MIXED, "Q8_0", "Q4_0", "Q5_1"], ids=str)
def test_products_are_those_of_the_definition(kinds: dict[str, str] | str, tmp_path: Path):
    """Every linear layer of a loaded model, by whatever kernel, to the bit."""
    model = tiny_model("llama", **SIZES, num_hidden_layers=1)
    file = gguf_models.write(tmp_path / "model.gguf", "llama", model, kinds)
    executor = engine_for(file, dtype="float32").executor
    weights = read_all(file)
    layer = executor.model.layers[0]
    for module, names in PARTS.items():
        linear = layer.get_submodule(module)
        found = [weights[f"model.layers.0.{name}.weight"] for name in names]
        x_TH = torch.randn(9, found[0].levels_OH.shape[1])
        expected = torch.cat([quantized_linear(x_TH, weight, None) for weight in found], 1)
        assert torch.equal(linear(x_TH), expected), module


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "F16", "BF16"])
def test_nothing_but_the_embedding_is_kept_in_16_bits(kind: str, tmp_path: Path):
    """What the plan says is what is there: a quantized embedding counts in the model's type."""
    model = tiny_model("llama", **SIZES, tie_word_embeddings=True)
    file = gguf_models.write(tmp_path / "model.gguf", "llama", model, kind)
    executor = engine_for(file).executor
    spec, settings = executor.spec, executor.settings
    assert spec.dtype == {"F16": "float16", "BF16": "bfloat16"}.get(kind, "bfloat16")
    if kind in PACKINGS:
        assert all(
            linear.weight is None or linear is executor.model.head
            for linear in executor.target.linears
        )
    planned = planned_bytes(settings.quantization, spec, settings.dtype)
    assert executor.target.weight_bytes == pytest.approx(planned, rel=0.1)


def test_splittings_of_words_are_those_of_transformers():
    theirs = inspect.signature(TikTokenConverter.__init__).parameters["pattern"].default
    assert theirs == LLAMA3
    assert PRETOKENIZE_REGEX == QWEN2


def read_all(file: Path) -> dict[str, torch.Tensor | RoundedWeight]:
    return {name: read() for name, read in open_gguf(file, read_model_spec(file))}


def test_tied_embedding_comes_twice(tmp_path: Path):
    model = tiny_model("llama", **SIZES, tie_word_embeddings=True)
    file = gguf_models.write(tmp_path / "model.gguf", "llama", model, "Q8_0")
    weights = read_all(file)
    embedding, head = weights["model.embed_tokens.weight"], weights["lm_head.weight"]
    assert isinstance(head, RoundedWeight) and embedding.dtype == torch.bfloat16
    assert torch.equal(head.plain().bfloat16(), embedding)
    own = tiny_model("llama", **SIZES)
    file = gguf_models.write(tmp_path / "own.gguf", "llama", own, {"output.": "Q4_0"})
    assert dict(gguf_formats(file, read_model_spec(file))) == {
        "layers.0.attention.out": PACKINGS["Q4_0"].format,
        "layers.1.attention.out": PACKINGS["Q4_0"].format,
        "head": PACKINGS["Q4_0"].format,
    }
    assert isinstance(read_all(file)["model.embed_tokens.weight"], torch.Tensor)


def test_fused_tensors_are_parted(tmp_path: Path):
    """q, k and v in one tensor, as newer converters write them on request."""
    model = tiny_model("qwen3", **SIZES, head_dim=16)
    tensors = gguf_models.tensors_of("qwen3", model)
    file = gguf_models.write(tmp_path / "model.gguf", "qwen3", model)
    parted = read_all(file)
    for i in range(2):
        parts = [tensors.pop(f"blk.{i}.attn_{part}.weight") for part in "qkv"]
        tensors[f"blk.{i}.attn_qkv.weight"] = torch.cat(parts)
    metadata = gguf_models.metadata_of("qwen3", model.config.to_dict())
    written = {n: ("F32", tuple(t.shape), t.numpy().tobytes()) for n, t in tensors.items()}
    fused = read_all(gguf_file.write(tmp_path / "fused.gguf", metadata, written))
    assert fused.keys() == parted.keys()
    assert all(torch.equal(fused[name], parted[name]) for name in parted)


def test_what_is_wrong_with_tensors_is_named(tmp_path: Path):
    file = tmp_path / "model.gguf"
    tensors = gguf_file.llama_tensors()
    gguf_file.write(file, gguf_file.LLAMA, {**tensors, "a": gguf_file.zeros("IQ2_XS", 4, 256)})
    with pytest.raises(UnsupportedModelError, match=r"a is IQ2_XS(.|\n)*Q4_K"):
        engine_for(file)
    without = {**tensors, "blk.0.odd.weight": tensors["blk.0.ffn_down.weight"]}
    del without["blk.0.ffn_down.weight"]
    gguf_file.write(file, gguf_file.LLAMA, without)
    with pytest.raises(CheckpointError, match=r"mlp.down_proj(.|\n)*missing(.|\n)*blk.0.odd"):
        engine_for(file)
    gguf_file.write(
        file, gguf_file.LLAMA, {**tensors, "blk.0.attn_q.weight": gguf_file.zeros("Q4_0", 28, 32)}
    )
    with pytest.raises(CheckpointError, match="4 heads"):
        engine_for(file)


@pytest.mark.parametrize("name", ["blk.0.ffn_up.weight", "token_embd.weight"])
@pytest.mark.parametrize("half", [0x7C00, 0x7E00, 0xFC00])
def test_scale_that_is_no_number_is_named(name: str, half: int, tmp_path: Path):
    """Infinite, NaN, minus infinite; of a matrix, and of an embedding with a head beside it."""
    tensors = gguf_file.llama_tensors()
    tensors["output.weight"] = gguf_file.zeros("F32", *tensors["token_embd.weight"][1])
    rows, columns = tensors[name][1]
    blocks = bytearray(rows * columns // 32 * 18)
    blocks[-18:-16] = half.to_bytes(2, "little")
    tensors[name] = ("Q4_0", (rows, columns), bytes(blocks))
    file = gguf_file.write(tmp_path / "model.gguf", gguf_file.LLAMA, tensors)
    with pytest.raises(CheckpointError, match=rf"{name} has a scale"):
        engine_for(file)
