"""Gemma 3n: layers that read the keys and values of others, and folders of the whole model."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.testing import assert_close

from drive import engine_for, finish
from headway.compress.rows import check_trainable_attention
from headway.compress.train.model import check_trainable
from headway.core.errors import HeadwayError, UnsupportedModelError, UsageError
from headway.core.request import Request, SamplingParams
from headway.spec import read_model_spec, spec_from_config
from headway.spec.quantization import Quantization, planned_bytes
from parity.logits import our_logits, their_logits
from parity.quantized_folders import FILE
from parity.quantized_models import LARGEST_KL, divergence, executor_of
from parity.tiny import edit_config, prompts, save, tiny_model
from published import MODELS

pytestmark = pytest.mark.usefixtures("one_thread")

KV_FROM = [None, None, None, 2, 1]
"""A layer with a window reads the last one that has a window and keys, not the first."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tiny_model("gemma3n"), tmp_path_factory.mktemp("gemma3n"))


def test_layers_that_read_others_hold_nothing(folder: Path):
    """Memory for three layers of five; what a step reads counts all five."""
    executor = engine_for(folder, num_blocks=20, block_size=4).executor
    spec = executor.spec
    assert [layer.kv_from for layer in spec.layers] == KV_FROM
    windows, full = spec.kv_groups
    assert (windows.layers, windows.num_readers, windows.window) == ((0, 2), 1, 17)
    assert (full.layers, full.num_readers, full.window) == ((1,), 1, 0)
    one = 4 * 24 * 2 * 4  # heads, numbers of a head, K and V, bytes
    assert spec.kv_bytes_per_token() == 3 * one
    assert executor.target.kv_bytes == 21 * 4 * 3 * one
    assert windows.bytes_read_per_token("float32") == 3 * one
    far, alone = spec.flops(1, 100), spec.flops(1, 0)
    assert far - alone == (3 * 17 + 2 * 100) * spec.attended_flops


def test_published_shapes_hold_four_sevenths():
    """Gemma 3n E4B: 15 of 35 layers hold nothing."""
    spec = spec_from_config(MODELS["Gemma-3n-E4B (text)"][0], {})
    assert [layer.kv_from for layer in spec.layers[20:25]] == [18, 18, 18, 18, 19]
    assert spec.kv_bytes_per_token() * 35 == 20 * 35 * 2 * 2 * 256 * 2
    plain = Quantization()
    assert planned_bytes(plain, spec, "bfloat16") - 2 * spec.embedding_parameters == pytest.approx(
        2 * spec.num_parameters, rel=1e-5
    )


def test_the_text_of_a_model_of_images_and_sound_is_served(folder: Path, tmp_path: Path):
    """Its names begin otherwise, its towers are left out, and so are keys that nobody reads."""
    state = {
        name.replace("model.", "model.language_model.", 1): tensor
        for name, tensor in load_file(folder / FILE).items()
    }
    for name in ("k_proj.weight", "v_proj.weight", "k_norm.weight"):
        layer = "model.language_model.layers.{}.self_attn." + name
        state[layer.format(3)] = torch.ones_like(state[layer.format(0)])
    state["model.vision_tower.timm_model.conv.weight"] = torch.zeros(3, 3)
    state["model.audio_tower.conformer.0.norm.weight"] = torch.zeros(3)
    state["model.embed_vision.embedding.weight"] = torch.zeros(3, 3)
    save_file(state, tmp_path / FILE)
    text = json.loads((folder / "config.json").read_text())
    whole = {
        "architectures": ["Gemma3nForConditionalGeneration"],
        "text_config": {**text, "architectures": None},
        "vision_config": {},
        "audio_config": {},
        "eos_token_id": [1, 106],
    }
    (tmp_path / "config.json").write_text(json.dumps(whole))
    (prompt,) = prompts([40])
    found, expected = (our_logits(engine_for(each).executor, prompt) for each in (tmp_path, folder))
    assert torch.equal(found, expected)
    save_file(state | {"model.layers.0.self_attn.k_proj.weight": torch.ones(1)}, tmp_path / FILE)
    with pytest.raises(HeadwayError):
        engine_for(tmp_path)


def test_tokens_beyond_the_table_of_rows_look_up_the_first(folder: Path):
    """The tiny table has 190 rows for 211 tokens."""
    reference, prompt = tiny_model("gemma3n"), [5, 189, 190, 210, 7]
    assert_close(
        our_logits(engine_for(folder).executor, prompt),
        their_logits(reference, prompt),
        rtol=0,
        atol=1e-4,
    )


@pytest.mark.parametrize(
    ("options", "largest"),
    [
        ({"quantization": "int8"}, 5 * LARGEST_KL),
        ({"kv_cache_dtype": "int8"}, LARGEST_KL),
    ],
    ids=str,
)
def test_rounded_weights_and_rounded_keys(options: dict, largest: float, tmp_path: Path):
    """A layer reads what its owner rounded."""
    reference = tiny_model("gemma3n")
    executor = executor_of(save(reference, tmp_path), **options)
    assert 0 < divergence(reference, executor) < largest


@pytest.mark.parametrize("exact", ["", "1"])
def test_int4_keys_are_read_as_the_definition_reads_them(exact: str, tmp_path: Path):
    """Two blocks of 64 that owners rounded, and an open one; with a group that stays exact."""
    folder = save(tiny_model("gemma3n", head_dim=32), tmp_path)
    (prompt,) = prompts([150])
    asked = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    options = {"kv_cache_dtype": "int4", "kv_cache_dtype_skip_layers": exact}
    native, defined = (
        finish(engine_for(folder, **options, **more), [Request(0, prompt, asked)])[0, 0]
        for more in ({}, {"attention_backend": "reference", "kernels": "torch"})
    )
    found, expected = (
        torch.tensor([one.logprob for one in answer.prompt_logprobs[1:]])
        for answer in (native, defined)
    )
    assert (found - expected).abs().mean() < 2e-3


def test_what_is_not_there_is_refused_by_name(folder: Path, tmp_path: Path):
    windows = tmp_path / "windows.yaml"
    windows.write_text("layers:\n  0: {window: 8}\n")
    with pytest.raises(UsageError, match="read the keys and values of others"):
        engine_for(folder, kv_layers=str(windows))
    with pytest.raises(UsageError, match="layer 4 reads the keys and values of layer 1"):
        engine_for(folder, kv_cache_dtype="int8", kv_cache_dtype_skip_layers="0,4")
    for refuse in (check_trainable_attention, check_trainable):
        with pytest.raises(UnsupportedModelError, match="several streams"):
            refuse(read_model_spec(folder))
    save(tiny_model("gemma3n"), tmp_path)
    edit_config(tmp_path, quantization_config={"quant_method": "fp8"})
    with pytest.raises(UnsupportedModelError, match="quantized with fp8 is not read"):
        engine_for(tmp_path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_kv_shared_layers": 30}, "num_kv_shared_layers must be a number of layers below 30"),
        ({"num_kv_shared_layers": 26}, "such that a layer of each kind is left"),
        ({"altup_active_idx": 4}, "altup_active_idx must be an index below 4"),
        ({"activation_sparsity_pattern": [0.5]}, "activation_sparsity_pattern must be"),
        ({"activation_sparsity_pattern": [1.0] * 30}, "activation_sparsity_pattern must be"),
        ({"intermediate_size": [8192] * 29 + [4096]}, "another one in each layer"),
    ],
    ids=str,
)
def test_configs_that_cannot_be_are_refused(change: dict, said: str):
    with pytest.raises(HeadwayError, match=said):
        spec_from_config(MODELS["Gemma-3n-E2B (text)"][0] | change, {})
