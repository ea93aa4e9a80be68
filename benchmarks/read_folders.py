"""Folders that others have quantized beside our own rounding of the same matrices, in turn.

    python benchmarks/read_folders.py FOLDER [--only "AWQ, zeros" …]

FOLDER, in 16 bits, with linear layers named as in Llama and Qwen, is written in each format: the
numbers are rounded to the nearest, which changes their quality and not their speed; those of Q4_K,
Q5_K and Q6_K are random, and want a FOLDER whose inputs are multiples of 256 (the shape of
Qwen2.5-1.5B, not of 0.5B). All heads are int8: of the folders, which leave them in 16 bits, by
`--quantization int8`. Prefill of 512 tokens,
and steps of 1 and of 8 sequences of that context; both models take turns, a few steps at a time. A
row has the medians of tokens a second, and the median of the ratios with its quartiles.
"""

import argparse
import json
import shutil
import statistics
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor

from common import heading, line
from headway import LLM
from headway.compress import packing
from headway.runtime.rounding import RoundedWeight, round_weight
from headway.spec.formats import INT8, PLAIN, Format
from offline import Rates

TURNS = {0: 9, 1: 15, 8: 13}
"""Sequences of a measurement, 0 is the prefill → turns."""
STEPS = {1: 16, 8: 10}
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
MOST_FP8 = 448.0
K_FACTORS = {
    "Q4_K": ((1e-4, 7.5e-4), 0),
    "Q5_K": ((5e-5, 7.5e-4), 0),
    "Q6_K": ((1e-5,), 208),
}
"""Type → the factors of scales and of minima in fp16, and the byte where they stand."""
Tensors = dict[str, Tensor]
Options = dict[str, Any]


# ── writers: (name, weight) → the tensors of one matrix ─────────────────────────────────────


def compressed(name: str, weight_OI: Tensor, group: int) -> Tensors:
    """compressed-tensors, int4 by group or (0) int8 by output."""
    rounded = round_weight(weight_OI, group)
    kind = "int4" if group else "int8"
    return packing.tensors_of(name, rounded, kind, "compressed-tensors", not group, "float16")


def gptq(name: str, weight_OI: Tensor, group: int) -> Tensors:
    """GPTQ, symmetric: scales are positive there."""
    parts = weight_OI.float().unflatten(1, (-1, group))
    scales = (parts.abs().amax(-1) / 7).half().float()
    levels = (parts / scales[..., None]).nan_to_num(0).round().clamp(-8, 7).flatten(1)
    return packing.gptq_tensors(name, RoundedWeight(levels.to(torch.int8), scales, group))


def awq(name: str, weight_OI: Tensor, group: int) -> Tensors:
    """AWQ with zeros: code = weight / scale + zero, eight outputs a word in AWQ's order."""
    parts = weight_OI.float().unflatten(1, (-1, group))
    low, high = parts.amin(-1).clamp(max=0), parts.amax(-1).clamp(min=0)
    scales = ((high - low) / 15).clamp(min=1e-7).half().float()
    zeros = (-low / scales).round().clamp(0, 15)
    codes = (parts / scales[..., None] + zeros[..., None]).round().clamp(0, 15).flatten(1)

    def words(codes_OW: Tensor) -> Tensor:
        turned = codes_OW.T.unflatten(1, (-1, 8))[..., AWQ_ORDER].flatten(1)
        return packing.pack(turned - 8, 4)

    return {
        f"{name}.qweight": words(codes),
        f"{name}.qzeros": words(zeros),
        f"{name}.scales": scales.T.half().contiguous(),
    }


def fp8(name: str, weight_OI: Tensor, block: int) -> Tensors:
    """FP8 by output (0), or by blocks of so many outputs and inputs."""
    outputs, inputs = weight_OI.shape
    high, wide = (block, block) if block else (1, inputs)
    filled = torch.nn.functional.pad(weight_OI.float(), (0, -inputs % wide, 0, -outputs % high))
    parts = filled.unflatten(1, (-1, wide)).unflatten(0, (-1, high))
    scales = (parts.abs().amax((1, 3)) / MOST_FP8).clamp(min=1e-12)
    codes = (parts / scales[:, None, :, None]).flatten(0, 1).flatten(1)[:outputs, :inputs]
    suffix = "weight_scale_inv" if block else "weight_scale"
    numbers = codes.to(torch.float8_e4m3fn).contiguous()
    return {f"{name}.weight": numbers, f"{name}.{suffix}": scales}


Writer = Callable[[str, Tensor], Tensors]


def write_folder(folder: Path, out: Path, config: dict[str, Any], writer: Writer) -> Path:
    """FOLDER with its linear layers as `writer` has them."""
    out.mkdir()
    tensors: Tensors = {}
    for name, tensor in weights_of(folder):
        module = name.removesuffix(".weight")
        tensors |= writer(module, tensor) if module.endswith("_proj") else {name: tensor}
    save_file(
        {name: each.contiguous() for name, each in tensors.items()}, out / "model.safetensors"
    )
    for path in folder.glob("*.json"):
        if not path.name.endswith(".index.json"):
            shutil.copy(path, out / path.name)
    own = json.loads((folder / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(own | {"quantization_config": config}))
    return out


def weights_of(folder: Path) -> Iterator[tuple[str, Tensor]]:
    for path in sorted(folder.glob("model*.safetensors")):
        yield from load_file(path).items()


def write_fp8(folder: Path, out: Path, block: int) -> Path:
    """FOLDER in FP8, by output (0) or by blocks."""
    config: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    config |= {"weight_block_size": [block, block]} if block else {}
    return write_folder(folder, out, config, lambda name, weight: fp8(name, weight, block))


def super_blocks(type: gguf.GGMLQuantizationType, outputs: int, inputs: int) -> NDArray[np.uint8]:
    """(O, bytes of a row): random codes, scales and minima, and factors that make weights small."""
    numbers, size = gguf.GGML_QUANT_SIZES[type]
    if inputs % numbers:
        raise SystemExit(f"Rows of {inputs} numbers do not fit {type.name}'s blocks of {numbers}.")
    draw = np.random.default_rng(outputs)
    blocks = draw.integers(0, 256, (outputs, inputs // numbers, size), dtype=np.uint8)
    factors, at = K_FACTORS[type.name]
    blocks[..., at : at + 2 * len(factors)] = np.frombuffer(np.float16(factors).tobytes(), np.uint8)
    return blocks.reshape(outputs, -1)


def write_gguf(folder: Path, out: Path, kind: str) -> Path:
    """A GGUF file of a Qwen2 folder, its embedding in 16 bits."""
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(out, "qwen2")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2, config["num_hidden_layers"])
    for name, tensor in weights_of(folder):
        rounded = name.endswith("_proj.weight")
        type = gguf.GGMLQuantizationType[
            kind if rounded else "F32" if tensor.dim() == 1 else "BF16"
        ]
        base, _, suffix = name.rpartition(".")
        if type.name in K_FACTORS:
            data = super_blocks(type, *tensor.shape)
        else:
            data = gguf.quants.quantize(tensor.float().numpy(), type)
        writer.add_tensor(f"{names.get_name(base)}.{suffix}", data, raw_dtype=type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


# ── the formats ─────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Case:
    """How a folder is written, how it is opened, and what of our own it stands beside."""

    write: Callable[[Path, Path], Path]
    ours: Options
    options: Options


def folder_case(config: dict[str, Any], writer: Writer, ours: Options, **options: Any) -> Case:
    def write(folder: Path, out: Path) -> Path:
        return write_folder(folder, out, config, writer)

    return Case(write, ours, {"quantization": "int8", **options})


def gguf_case(kind: str, ours: Options) -> Case:
    def write(folder: Path, out: Path) -> Path:
        return write_gguf(folder, out.with_suffix(".gguf"), kind)

    return Case(write, ours, {"quantization": "int8"})


def fp8_case(block: int, ours: Options, **options: Any) -> Case:
    def write(folder: Path, out: Path) -> Path:
        return write_fp8(folder, out, block)

    return Case(write, ours, {"quantization": "int8", **options})


def compressed_config(format: Format) -> dict[str, Any]:
    formats = {"model.layers.0.self_attn.q_proj": format, "lm_head": PLAIN}
    return packing.quantization_config(formats, "compressed-tensors", format == INT8)


def gptq_config(group: int) -> dict[str, Any]:
    formats = {"model.layers.0.self_attn.q_proj": Format("int4", group), "lm_head": PLAIN}
    return packing.gptq_config(formats)


def cases() -> dict[str, Case]:
    """Row → case."""
    by = {group: {"quantization": "int4", "quantization_group": group} for group in (32, 64, 128)}
    int8 = {"quantization": "int8"}
    awq_config = {"quant_method": "awq", "bits": 4, "zero_point": True, "version": "gemm"}
    found = {}
    for group in (64, 128):
        format = Format("int4", group)
        found[f"compressed-tensors int4 by {group}"] = folder_case(
            compressed_config(format), lambda n, w, g=group: compressed(n, w, g), by[group]
        )
        found[f"GPTQ by {group}"] = folder_case(
            gptq_config(group), lambda n, w, g=group: gptq(n, w, g), by[group]
        )
        found[f"AWQ by {group}, zeros"] = folder_case(
            awq_config | {"group_size": group}, lambda n, w, g=group: awq(n, w, g), by[group]
        )
    found["compressed-tensors W8A8"] = folder_case(
        compressed_config(INT8), lambda n, w: compressed(n, w, 0), int8
    )
    found["GGUF Q4_0"] = gguf_case("Q4_0", by[32])
    found["GGUF Q8_0"] = gguf_case("Q8_0", int8)
    found["GGUF Q8_0, beside int4 by 32"] = gguf_case("Q8_0", by[32])
    found["GGUF Q4_K"] = gguf_case("Q4_K", by[32])
    found["GGUF Q5_K"] = gguf_case("Q5_K", int8)
    found["GGUF Q6_K"] = gguf_case("Q6_K", int8)
    found["FP8 by output"] = fp8_case(0, int8)
    found["FP8 by blocks"] = fp8_case(128, int8)
    found["FP8 by output, --fp8 int8"] = fp8_case(0, int8, fp8="int8")
    return found


# ── measuring ───────────────────────────────────────────────────────────────────────────────


def opened(model: Path, options: Options, threads: int) -> Rates:
    llm = LLM(
        model,
        dtype="bfloat16",
        kv_memory="160MiB",
        threads=threads,
        max_model_len=1024,
        skip_tokenizer_init=True,
        **options,
    )
    return Rates(llm)


def in_turns(both: tuple[Rates, Rates], sequences: int) -> list[tuple[float, float]]:
    """(tokens/s of ours, of theirs) by turn; who is first alternates."""
    for rates in both:
        rates.begin(sequences) if sequences else rates.prefill()
    found = []
    for turn in range(TURNS[sequences]):
        speeds = [0.0, 0.0]
        for which in (0, 1) if turn % 2 else (1, 0):
            rates = both[which]
            speeds[which] = rates.steps(STEPS[sequences]) if sequences else rates.prefill()
        found.append((speeds[0], speeds[1]))
    for rates in both:
        rates.end()
    return found


def cell(found: list[tuple[float, float]]) -> str:
    """`120.1, 118.9: 0.99 (0.98 … 1.00)`."""
    low, middle, high = statistics.quantiles([theirs / ours for ours, theirs in found], n=4)
    ours, theirs = (statistics.median(each) for each in zip(*found, strict=True))
    return f"{ours:.0f}, {theirs:.0f}: **{middle:.2f}** ({low:.2f} … {high:.2f})"


def main() -> None:
    """Write, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", action="append", help="rows whose name holds this")
    parser.add_argument("--at", type=Path, help="where folders are kept for another run")
    parser.add_argument("--write", action="store_true", help="write them, and stop")
    parser.add_argument("--threads", type=int, default=2)
    chosen = parser.parse_args()
    columns = {0: "prefill of 512", 1: "batch 1", 8: "batch 8"}
    print(heading(["ours, theirs", *columns.values()]))
    with tempfile.TemporaryDirectory() as temporary:
        place = chosen.at or Path(temporary)
        for name, case in cases().items():
            if chosen.only and not any(part in name for part in chosen.only):
                continue
            out = place / name.split(", --")[0].split(", beside")[0].replace(" ", "-")
            if not out.exists() and not out.with_suffix(".gguf").exists():
                case.write(chosen.folder, out)
            if chosen.write:
                continue
            model = out if out.exists() else out.with_suffix(".gguf")
            both = (
                opened(chosen.folder, case.ours, chosen.threads),
                opened(model, case.options, chosen.threads),
            )
            print(line([name, *(cell(in_turns(both, each)) for each in columns)]), flush=True)
            if not chosen.at:
                shutil.rmtree(out) if out.is_dir() else model.unlink()


if __name__ == "__main__":
    main()
