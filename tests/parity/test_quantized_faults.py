"""Quantized folders that are odd, and those that are wrong: errors name the tensor and the fix."""

import json
import random
import resource
import shutil
import struct
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from headway.config.options import EngineOptions
from headway.core.errors import CheckpointError, HeadwayError, UnsupportedModelError, UsageError
from headway.planning import plan_settings
from headway.runtime.checkpoint import checkpoint_formats, open_model
from headway.runtime.rounding import round_weight
from headway.spec import ModelSpec, read_model_spec
from headway.spec.formats import PLAIN, ROTATED_INT8, Format
from headway.spec.quantization import Quantization
from parity.mutations import mutated
from parity.quantized_folders import (
    FILE,
    Tensors,
    awq_tensors,
    fp8_tensors,
    gptq_tensors,
    make_grid,
    packed_tensors,
    write_quantized,
)
from parity.quantized_models import (
    LARGEST_KL,
    check_products,
    divergence,
    executor_of,
    plain_weights,
)
from parity.tiny import edit_config, tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
FP8 = {"quant_method": "fp8", "weight_block_size": [32, 32]}
QUERY, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"
SCALES = f"{QUERY}.weight_scale_inv"


def gptq(name: str, weight: Tensor) -> tuple[Tensors, Tensor] | None:
    if name == "lm_head" or name.endswith("mlp.gate"):
        return None
    grid = make_grid(weight)
    return gptq_tensors(grid), grid.weight


def awq(name: str, weight: Tensor) -> tuple[Tensors, Tensor] | None:
    grid = make_grid(weight)
    return None if name == "lm_head" else (awq_tensors(grid), grid.weight)


def fp8(name: str, weight: Tensor) -> tuple[Tensors, Tensor] | None:
    return None if name == "lm_head" else fp8_tensors(weight, (32, 32))


WRITERS = {"gptq": (GPTQ, gptq), "awq": (AWQ, awq), "fp8": (FP8, fp8)}


@pytest.fixture(scope="module", params=WRITERS)
def good(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A good folder of each format; tests copy it."""
    config, quantize = WRITERS[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    write_quantized(tiny_model("qwen2", intermediate_size=96), folder, config, quantize)
    return folder


@pytest.fixture
def folder(good: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(good, tmp_path / "model"))


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Load the tensors of the one file, change the dict, write it back."""
    tensors = load_file(folder / FILE)
    change(tensors)
    save_file(tensors, folder / FILE)


def edit_quantization(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    edit_config(folder, quantization_config=config["quantization_config"] | changes)


def refused(folder: Path, *words: str) -> None:
    """Loading raises CheckpointError: a cause with these words and a fix, a line each."""
    with pytest.raises(CheckpointError) as caught:
        executor_of(folder)
    cause, fix = str(caught.value).split("\n")
    assert cause.isprintable()
    assert fix
    for word in words:
        assert word in cause, cause


def set_to(name: str, place: tuple[int, ...], value: float) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors[name].__setitem__(place, value)


def replaced(name: str, tensor: Tensor) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.__setitem__(name, tensor)


def by_another_writer(tensors: dict[str, Tensor], parts: Tensors) -> None:
    """One layer as another run has quantized it: a shard of another folder among ours."""
    for name in [name for name in tensors if name.startswith(f"{DOWN}.")]:
        del tensors[name]
    tensors.update({f"{DOWN}.{suffix}": tensor for suffix, tensor in parts.items()})


# ── what is wrong ───────────────────────────────────────────────────────────────────────────

Change = Callable[[dict[str, Tensor]], object]
FAULTS: dict[str, list[tuple[Change, tuple[str, ...]]]] = {
    "gptq": [
        (lambda t: t.pop(f"{QUERY}.qweight"), (f"{QUERY}.qweight", "missing")),
        (lambda t: t.pop(f"{DOWN}.scales"), (f"{DOWN}.scales", "missing")),
        (replaced(f"{QUERY}.g_idx", torch.zeros(64).int()), (f"{QUERY}.g_idx", "zeros")),
        (replaced(f"{QUERY}.g_idx", torch.arange(64).int()), (f"{QUERY}.g_idx", "beyond")),
        (replaced(f"{QUERY}.g_idx", torch.arange(63).int()), (QUERY, "63 inputs")),
        (set_to(f"{QUERY}.g_idx", (0,), 1), (f"{QUERY}.g_idx", "32 inputs")),
        (set_to(f"{DOWN}.scales", (1, 3), float("nan")), (f"{DOWN}.scales", "NaN")),
        (set_to(f"{DOWN}.scales", (1, 3), float("inf")), (f"{DOWN}.scales", "infinite")),
        (set_to(f"{DOWN}.scales", (1, 3), -0.1), (f"{DOWN}.scales", "negative")),
        (set_to(f"{DOWN}.scales", (1, 3), 0.0), (f"{DOWN}.scales", "0", "output 3, group 1")),
        (replaced(f"{QUERY}.extra", torch.zeros(1)), (f"{QUERY}.extra", "left over")),
        (replaced("lm_head.qweight", torch.zeros(8, 211).int()), ("lm_head", "not quantized")),
        (replaced(f"{DOWN}.scales", torch.ones(2, 64)), (f"{DOWN}.scales", "[2, 64]", "[3, 64]")),
        (replaced(f"{DOWN}.qweight", torch.ones(12, 64)), (f"{DOWN}.qweight", "F32")),
        (
            replaced(f"{DOWN}.qweight", torch.ones(4).int()),
            (f"{DOWN}.qweight", "not that of a matrix"),
        ),
        (replaced(f"{QUERY}.bias", torch.ones(8)), (f"{QUERY}.bias", "shape")),
        (replaced(f"{DOWN}.bias", torch.ones(64)), (f"{DOWN}.bias", "left over")),
        (replaced("model.layers.2.mlp.up_proj.qweight", torch.ones(1)), ("layers.2", "left over")),
        (lambda t: by_another_writer(t, awq_tensors(OTHER)), (f"{DOWN}.scales", "[24, 8]")),
        (lambda t: by_another_writer(t, packed_tensors(OTHER)), (f"{DOWN}.qweight", "missing")),
        (
            lambda t: by_another_writer(t, gptq_tensors(make_grid(OTHER.weight, group=48))),
            (f"{DOWN}.scales", "[2, 64]", "[3, 64]"),
        ),
    ],
    "awq": [
        (lambda t: t.pop(f"{QUERY}.qzeros"), (f"{QUERY}.qzeros", "missing")),
        (replaced(f"{QUERY}.qzeros", torch.ones(1, 8).int()), (f"{QUERY}.qzeros", "shape")),
        (set_to(f"{DOWN}.scales", (0, 0), -1.0), (f"{DOWN}.scales", "negative")),
        (set_to(f"{DOWN}.scales", (0, 5), float("nan")), (f"{DOWN}.scales", "NaN")),
        (set_to(f"{DOWN}.scales", (2, 5), 0.0), (f"{DOWN}.scales", "0", "output 5, group 2")),
        (
            lambda t: (
                [t.pop(f"{QUERY}.{name}") for name in ("qweight", "qzeros", "scales")]
                and t.update({f"{QUERY}.weight": torch.ones(64, 64).half()})
            ),
            (f"{QUERY}.weight", "F16", "4 bits"),
        ),
        (
            lambda t: t.update(
                {f"{QUERY}.{name}": each for name, each in awq_tensors(WIDER).items()}
            ),
            (f"{QUERY}.weight", "[64, 96]", "[64, 64]"),
        ),
    ],
    "fp8": [
        (lambda t: t.pop(f"{QUERY}.weight_scale_inv"), (f"{QUERY}.weight_scale", "missing")),
        (set_to(SCALES, (0, 1), float("nan")), (SCALES, "NaN")),
        (set_to(SCALES, (1, 0), float("inf")), (SCALES, "infinite")),
        (set_to(SCALES, (1, 0), -0.5), (SCALES, "negative")),
        (set_to(SCALES, (1, 0), 0.0), (SCALES, "0", "output 32, group 0")),
        (
            lambda t: t[f"{DOWN}.weight"].view(torch.uint8).__setitem__((5, 7), 0xFF),
            (f"{DOWN}.weight", "NaN", "0x7F"),
        ),
        (
            lambda t: t[f"{DOWN}.weight"].view(torch.uint8).__setitem__((5, 7), 0x7F),
            (f"{DOWN}.weight", "NaN", "0x7F"),
        ),
        (replaced(f"{DOWN}.weight", torch.ones(64, 96).bfloat16()), (f"{DOWN}.weight", "BF16")),
    ],
}
WIDER, OTHER = make_grid(torch.randn(64, 96)), make_grid(torch.randn(64, 96), symmetric=True)
WRONG = [(format, i) for format, faults in FAULTS.items() for i in range(len(faults))]


@pytest.mark.parametrize(("good", "fault"), WRONG, indirect=["good"])
def test_a_fault_is_named(folder: Path, fault: int, request: pytest.FixtureRequest):
    change, words = FAULTS[request.node.callspec.params["good"]][fault]
    rewrite(folder, change)
    refused(folder, *words)


@pytest.mark.parametrize("good", ["gptq"], indirect=True)
def test_configs_that_do_not_fit_are_refused(folder: Path):
    edit_quantization(folder, group_size=128)
    refused(folder, "inputs", "128")
    edit_quantization(folder, group_size=32, bits=8)
    refused(folder, "shape")
    edit_quantization(folder, bits=4, **{"dynamic": {"-:.*down_proj": {}}})
    refused(folder, "down_proj", "not quantized")


@pytest.mark.parametrize("good", ["gptq"], indirect=True)
def test_one_tensor_in_two_files_is_refused(folder: Path):
    save_file({f"{QUERY}.scales": torch.ones(2, 64)}, folder / "more.safetensors")
    refused(folder, f"{QUERY}.scales", "more.safetensors")


def test_parts_may_lie_in_several_files(folder: Path):
    """The words of a matrix in one, its scales in another."""
    expected = plain_weights(executor_of(folder, kernels="torch"))
    tensors = load_file(folder / FILE)
    names = sorted(tensors)
    save_file({name: tensors[name] for name in names[::2]}, folder / FILE)
    save_file({name: tensors[name] for name in names[1::2]}, folder / "more.safetensors")
    found = plain_weights(executor_of(folder, kernels="torch"))
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())


def refusal(folder: Path, spec: ModelSpec) -> HeadwayError | None:
    """Why the folder's tensors cannot be read, or None when they can."""
    try:
        planned = replace(spec, formats=checkpoint_formats(folder, spec))
        for _, read in open_model(folder, planned):
            read()
    except HeadwayError as error:
        return error
    return None


@pytest.mark.parametrize(
    ("count", "seed"),
    [(300, 300), *(pytest.param(1000, seed, marks=pytest.mark.hardening) for seed in range(10))],
)
@pytest.mark.parametrize("good", ["gptq"], indirect=True)
def test_mutated_headers_are_read_or_refused_and_nothing_else(folder: Path, count: int, seed: int):
    """Success or HeadwayError in two lines; the hardening form holds 1 s and 512 MB each."""
    original = (folder / FILE).read_bytes()
    (length,) = struct.unpack("<Q", original[:8])
    header, data = json.loads(original[8 : 8 + length]), original[8 + length :]
    rng, spec = random.Random(seed), read_model_spec(folder)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refusals, longest = 0, 0.0
    for _ in range(count):
        (folder / FILE).write_bytes(mutated(rng, header, data))
        begin = time.process_time()
        error = refusal(folder, spec)
        longest = max(longest, time.process_time() - begin)
        refusals += error is not None
        assert error is None or len(str(error).splitlines()) == 2, str(error)
    assert refusals > 0.7 * count
    if count >= 1000:
        assert longest < 1.0
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 512 * 1024


# ── heads, experts, fused and odd biases ────────────────────────────────────────────────────


@pytest.mark.parametrize("stored", ["neither", "plain", "quantized"])
def test_a_tied_head(stored: str, tmp_path: Path):
    """Left out, stored beside the embedding, or quantized beside it; untied ones are elsewhere."""
    model = tiny_model("qwen2", intermediate_size=96, tie_word_embeddings=True)
    write_quantized(model, tmp_path, GPTQ, gptq)
    grid = make_grid(model.lm_head.weight.data, symmetric=True)
    if stored == "plain":
        rewrite(tmp_path, replaced("lm_head.weight", model.lm_head.weight.data.clone()))
    if stored == "quantized":
        edit_quantization(tmp_path, lm_head=True)
        head = {f"lm_head.{name}": tensor for name, tensor in gptq_tensors(grid).items()}
        rewrite(tmp_path, lambda tensors: tensors.update(head))
    executor = executor_of(tmp_path, kernels="torch")
    found = plain_weights(executor)["lm_head"]
    expected = grid.weight if stored == "quantized" else model.lm_head.weight.data
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(executor.model.embedding.weight, model.lm_head.weight.data)


@pytest.mark.parametrize("family", ["qwen3moe", "phi3"])
def test_experts_and_matrices_that_are_fused_already(family: str, tmp_path: Path):
    """A router in 16 bits; each expert's own numbers; qkv and gate_up as one matrix each."""
    sizes = {"intermediate_size": 96, "moe_intermediate_size": 32} if family == "qwen3moe" else {}
    model = tiny_model(family, **{"intermediate_size": 96, **sizes})
    if family == "qwen3moe":
        expected = write_experts(model, tmp_path)
    else:
        expected = write_quantized(model, tmp_path, GPTQ, gptq)
    executor = executor_of(tmp_path, kernels="torch")
    found = plain_weights(executor)
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=1e-6, atol=1e-7, msg=name)
    most = LARGEST_KL if family == "phi3" else 0.02  # a rounded input may choose another expert
    assert divergence(model, executor) < most


def write_experts(model: Any, folder: Path) -> dict[str, Tensor]:
    """transformers holds experts as one tensor, and writes each by its name."""
    expected = write_quantized(model, folder, GPTQ, gptq)
    model.save_pretrained(folder / "plain")
    plain = load_file(folder / "plain" / FILE)
    shutil.rmtree(folder / "plain")
    tensors = {k: v for k, v in load_file(folder / FILE).items() if ".experts." not in k}
    grids = {
        name.removesuffix(".weight"): make_grid(weight)
        for name, weight in plain.items()
        if ".experts." in name
    }
    for name, grid in grids.items():
        tensors |= {f"{name}.{suffix}": each for suffix, each in gptq_tensors(grid).items()}
        expected[name] = grid.weight
    save_file(tensors, folder / FILE)
    state = model.state_dict()
    for name, grid in grids.items():
        layer, _, rest = name.partition(".experts.")
        expert, _, kind = rest.partition(".")
        key = f"{layer}.experts.{'down_proj' if kind == 'down_proj' else 'gate_up_proj'}"
        rows = {"gate_proj": slice(0, 32), "up_proj": slice(32, 64), "down_proj": slice(None)}
        state[key][int(expert)][rows[kind]] = grid.weight
    return expected


@pytest.mark.parametrize("good", ["gptq"], indirect=True)
def test_a_bias_of_zeros_that_the_model_has_no_place_for_is_passed_over(folder: Path):
    rewrite(folder, replaced(f"{DOWN}.bias", torch.zeros(64)))
    executor_of(folder)


@pytest.mark.parametrize("good", ["gptq"], indirect=True)
def test_a_draft_has_formats_of_its_own(folder: Path, tmp_path: Path):
    """A plain draft of an int4 model is rounded at load; a quantized one of any model is read."""
    plain = tiny_model("qwen2", intermediate_size=96, num_hidden_layers=1)
    plain.save_pretrained(tmp_path / "plain")
    write_quantized(plain, tmp_path / "small", GPTQ, gptq)
    tiny_model("qwen2", intermediate_size=96).save_pretrained(tmp_path / "large")
    for target, draft in ((folder, "plain"), (tmp_path / "large", "small")):
        executor = executor_of(
            target,
            draft_model=str(tmp_path / draft),
            speculative_method="draft",
            skip_tokenizer_init=True,
        )
        found = executor.drafter.forward.model.get_submodule("layers.0.mlp.down")
        expected = Format("int4", 32, offsets="none" if draft == "plain" else "zeros")
        assert found.kernel.format == expected


# ── what the options do with it ─────────────────────────────────────────────────────────────


def formats(folder: Path, **options: Any) -> dict[str, Format]:
    table = EngineOptions(device="cpu", **options)
    quantization = plan_settings(folder, table)[1].quantization
    return {name: quantization.format_of(name) for name in ("head", "layers.0.mlp.down")}


@pytest.mark.parametrize("good", ["gptq", "awq"], indirect=True)
def test_options_round_what_is_plain_and_name_what_is_there(folder: Path):
    own = Format("int4", 32, offsets="zeros")
    assert formats(folder) == {"head": PLAIN, "layers.0.mlp.down": own}
    assert formats(folder, quantization="int8") == {"head": ROTATED_INT8, "layers.0.mlp.down": own}
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    method = config["quant_method"]
    assert formats(folder, quantization=method) == formats(folder)
    assert formats(folder, quantization=f"{method}_marlin") == formats(folder)
    with pytest.raises(UsageError, match="fp8"):
        formats(folder, quantization="fp8")


def test_a_method_is_refused_where_nothing_is_quantized(tmp_path: Path):
    tiny_model().save_pretrained(tmp_path)
    with pytest.raises(UsageError, match="not quantized"):
        formats(tmp_path, quantization="gptq")


@pytest.mark.parametrize("good", ["gptq"], indirect=True)
def test_the_config_of_autogptq_stands_beside(folder: Path):
    """quantize_config.json says what config.json does not."""
    expected = plain_weights(executor_of(folder, kernels="torch"))
    path = folder / "config.json"
    config = json.loads(path.read_text())
    old = {k: v for k, v in config.pop("quantization_config").items() if k != "quant_method"}
    path.write_text(json.dumps(config))
    (folder / "quantize_config.json").write_text(json.dumps(old))
    found = plain_weights(executor_of(folder, kernels="torch"))
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())


@pytest.mark.parametrize("good", ["fp8"], indirect=True)
def test_fp8_is_rounded_once_more_where_that_is_asked(folder: Path):
    """To int8 by output of the numbers that it stands for, in both kernels; else it stays."""
    exact = plain_weights(executor_of(folder, kernels="torch"))
    slow, fast = (executor_of(folder, kernels=name, fp8="int8") for name in ("torch", "auto"))
    assert formats(folder)["layers.0.mlp.down"].kind == "fp8"
    assert formats(folder, fp8="int8") == {"head": PLAIN, "layers.0.mlp.down": ROTATED_INT8}
    for name, weight in plain_weights(slow).items():
        expected = exact[name] if name == "lm_head" else round_weight(exact[name], 0, True).plain()
        assert torch.equal(weight, expected), name
    check_products(slow, fast)
    if fast.kernels.library is not None:
        assert fast.target.program is not None


@pytest.mark.parametrize("good", ["gptq"], indirect=True)
def test_rounding_fp8_is_refused_where_there_is_none(folder: Path):
    with pytest.raises(UsageError, match="--fp8 int8: no weights of the model are in FP8"):
        formats(folder, fp8="int8")


def test_a_draft_in_fp8_is_rounded_as_the_model_is():
    held = (("layers.0.mlp.down", Format("fp8")), ("layers.0.mlp.gate_up", Format("int4", 64)))
    quantization = Quantization.of("none", checkpoint=held, fp8="int8").of_draft(held)
    assert quantization.format_of("layers.0.mlp.down") == ROTATED_INT8
    assert quantization.format_of("layers.0.mlp.gate_up") == Format("int4", 64)
    assert Quantization.of("none", checkpoint=held).of_draft(held).rounded == (
        Format("fp8"),
        Format("int4", 64),
    )


@pytest.mark.parametrize("good", ["awq"], indirect=True)
@pytest.mark.parametrize("suffix", ["weight_packed", "qweight", "weight"])
def test_a_quantized_embedding_is_refused_by_name(folder: Path, suffix: str):
    """compressed-tensors' `targets: Embedding`; other methods' tensors the same."""
    embedding = "model.embed_tokens"

    def quantize(tensors: dict[str, Tensor]) -> None:
        tensors[f"{embedding}.{suffix}"] = tensors.pop(f"{embedding}.weight").to(torch.int8)

    rewrite(folder, quantize)
    with pytest.raises(UnsupportedModelError, match=rf"embedding is quantized .*{suffix} is I8"):
        executor_of(folder)
