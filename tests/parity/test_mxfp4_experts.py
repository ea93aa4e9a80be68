"""gpt-oss as it is published: stacked experts in MXFP4, beside all else in 16 or 32 bits."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import GptOssForCausalLM, Mxfp4Config, PreTrainedModel

from headway.core.errors import CheckpointError, HeadwayError, UnsupportedModelError
from headway.runtime.checkpoint import checkpoint_formats
from headway.runtime.experts import ExpertLinear
from headway.spec.formats import Format
from parity.quantized_folders import FILE, Tensors
from parity.quantized_models import (
    LARGEST_KL,
    divergence,
    executor_of,
    linears_of,
    plain_weights,
)
from parity.tiny import edit_config, save, tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

LEFT_OUT = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens"]
CONFIG = {"quant_method": "mxfp4", "modules_to_not_convert": [*LEFT_OUT, "lm_head"]}
"""As OpenAI published it."""
NUMBERS = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
STACKED = "model.layers.{i}.mlp.experts.{kind}"


def mxfp4_tensors(stacked_EHO: Tensor) -> Tensors:
    """`_blocks` and `_scales` of stacked experts: outputs first, 32 inputs a power of two."""
    groups = stacked_EHO.float().transpose(1, 2).unflatten(2, (-1, 32))
    exponents = torch.frexp(groups.abs().amax(-1))[1] - 3
    scaled = torch.ldexp(groups, -exponents[..., None])
    codes = (scaled.abs()[..., None] - NUMBERS).abs().argmin(-1) + 8 * (scaled < 0)
    packed = codes[..., 0::2] | codes[..., 1::2] << 4
    return {"_blocks": packed.to(torch.uint8), "_scales": (exponents + 127).to(torch.uint8)}


def write(folder: Path, dtype: torch.dtype = torch.float32, plain: tuple[int, ...] = ()) -> Path:
    """A folder in the published layout; layers in `plain` keep their experts in 16 or 32 bits."""
    model = tiny_model("gptoss", dtype, intermediate_size=96)
    save(model, folder)
    state = load_file(folder / FILE)
    for i in range(model.config.num_hidden_layers):
        for kind in ("gate_up_proj", "down_proj") if i not in plain else ():
            name = STACKED.format(i=i, kind=kind)
            made = mxfp4_tensors(state.pop(name))
            state |= {name + suffix: tensor for suffix, tensor in made.items()}
    save_file(state, folder / FILE)
    more = [f"model.layers.{i}.mlp.experts" for i in plain]
    left_out = CONFIG["modules_to_not_convert"]
    edit_config(folder, quantization_config=CONFIG | {"modules_to_not_convert": [*left_out, *more]})
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("mxfp4"))


@pytest.fixture(scope="module")
def theirs(folder: Path) -> PreTrainedModel:
    """transformers' model of the folder, dequantized by its own code."""
    asked = Mxfp4Config(dequantize=True)
    return GptOssForCausalLM.from_pretrained(
        folder, dtype=torch.float32, quantization_config=asked, attn_implementation="eager"
    ).eval()


def test_weights_are_those_that_transformers_dequantizes(folder: Path, theirs: PreTrainedModel):
    """To the bit, gates and ups apart; the experts are int8 by 32, all else is plain."""
    executor = executor_of(folder, kernels="torch")
    found, experts = plain_weights(executor), theirs.config.num_local_experts
    for i, layer in enumerate(theirs.model.layers):
        for e in range(experts):
            gate_up, down = layer.mlp.experts.gate_up_proj[e].T, layer.mlp.experts.down_proj[e].T
            base = STACKED.format(i=i, kind=e)
            assert torch.equal(found[f"{base}.gate_proj"], gate_up[0::2])
            assert torch.equal(found[f"{base}.up_proj"], gate_up[1::2])
            assert torch.equal(found[f"{base}.down_proj"], down)
    formats = dict(checkpoint_formats(folder, executor.spec))
    assert set(formats.values()) == {Format("int8", 32)}
    assert len(formats) == 2 * executor.spec.num_layers


def test_answers_are_those_of_transformers(folder: Path, theirs: PreTrainedModel):
    """On the native kernels, whose products are the definition's, bit for bit."""
    slow, fast = executor_of(folder, kernels="torch"), executor_of(folder)
    assert divergence(theirs, fast) < LARGEST_KL
    others, num_checked = linears_of(slow), 0
    for name, module in linears_of(fast).items():
        if isinstance(module, ExpertLinear):
            x = torch.randn(5, others[name].matrices[0].levels_OH.shape[1])
            assert torch.equal(module(x, 2), others[name](x, 2)), name
            num_checked += 1
    assert num_checked == 2 * fast.spec.num_layers


def test_a_layer_may_keep_its_experts_plain(tmp_path: Path):
    executor = executor_of(write(tmp_path, plain=(1,)), kernels="torch")
    held = {name for name, _ in checkpoint_formats(tmp_path, executor.spec)}
    assert held == {f"layers.{i}.mlp.{part}" for i in (0, 2) for part in ("gate_up", "down")}
    gate_up = load_file(tmp_path / FILE)[STACKED.format(i=1, kind="gate_up_proj")]
    ups = plain_weights(executor)["model.layers.1.mlp.experts.3.up_proj"]
    assert torch.equal(ups, gate_up[3, :, 1::2].T)


NAME = STACKED.format(i=1, kind="down_proj")
Change = Callable[[Tensors], object]
FAULTS: dict[str, tuple[Change, type[HeadwayError], str]] = {
    "scales are missing": (
        lambda state: state.pop(f"{NAME}_scales"),
        CheckpointError,
        "experts.0.down_proj.scales is missing; MXFP4 needs it",
    ),
    "a scale is NaN": (
        lambda state: state[f"{NAME}_scales"][2, 3, 1].fill_(255),
        CheckpointError,
        "experts.2.down_proj.scales holds a scale that is NaN",
    ),
    "blocks do not fit their scales": (
        lambda state: state.update({f"{NAME}_scales": state[f"{NAME}_scales"][..., :2].clone()}),
        CheckpointError,
        "blocks has shape [64, 3, 16]; MXFP4 implies [64, 2, 16]",
    ),
    "an expert more": (
        lambda state: state.update(
            {f"{NAME}_bias": torch.cat([state[f"{NAME}_bias"], state[f"{NAME}_bias"][:1]])}
        ),
        CheckpointError,
        "experts.4.down_proj.bias are left over",
    ),
    "a layer is plain without a word": (
        lambda state: (
            state.pop(f"{NAME}_scales"),
            state.update({NAME: torch.zeros(4, 96, 64), f"{NAME}_blocks": torch.zeros(1)}),
            state.pop(f"{NAME}_blocks"),
        ),
        CheckpointError,
        "experts.0.down_proj.weight is of type F32; quantization_config says",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named(fault: str, folder: Path, tmp_path: Path):
    change, error, said = FAULTS[fault]
    state = load_file(folder / FILE)
    change(state)
    save_file(state, tmp_path / FILE)
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(error) as found:
        executor_of(tmp_path)
    assert said in str(found.value)


def test_other_families_and_expressions_without_end_are_refused(folder: Path, tmp_path: Path):
    save(tiny_model("qwen3moe"), tmp_path)
    edit_config(tmp_path, quantization_config=CONFIG)
    with pytest.raises(UnsupportedModelError, match="read for GptOssForCausalLM only"):
        executor_of(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["modules_to_not_convert"] = ["(a+)+"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="too complex"):
        executor_of(tmp_path)
