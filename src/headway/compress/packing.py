"""Levels and scales as tensors of a file: compressed-tensors and GPTQ, with their configuration.

    pack-quantized   weight_packed int32 (O, I · bits / 32), level + 8 or + 128, the first input in
                     the lowest bits; weight_scale (O, G); weight_shape
    int-quantized    weight int8 (O, I), weight_scale (O, 1); inputs are rounded by token
    gptq             qweight int32 (I / 8, O), level + 8; scales (G, O); g_idx; qzeros 7: 8 is meant

O outputs, I inputs, G groups of inputs that share a scale.
"""

import re
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from headway.core.errors import UsageError
from headway.runtime.rounding import RoundedWeight
from headway.spec.formats import PLAIN, Format

FileFormat = Literal["compressed-tensors", "gptq"]
LIBRARY_VERSION = "0.20.0"
"""The version of compressed-tensors whose configuration is written."""
BITS = {"int4": 4, "int8": 8}
ALL_LAYERS = "re:.*\\.layers\\..*"
"""Target for the layers if the head has another format: `Linear` would match the head as well."""
LAYER = re.compile(r"^(.*\.layers\.)(\d+)(\..*)$")


def tensors_of(
    name: str, weight: RoundedWeight, kind: str, file_format: FileFormat, w8a8: bool, dtype: str
) -> dict[str, Tensor]:
    """Return the tensors of one matrix by checkpoint name; `kind` is int4 or int8."""
    scales = weight.scales_OG.to(getattr(torch, dtype))
    if file_format == "gptq":
        return gptq_tensors(name, weight)
    if kind == "int8" and w8a8:
        return {f"{name}.weight": weight.levels_OH.contiguous(), f"{name}.weight_scale": scales}
    return {
        f"{name}.weight_packed": pack(weight.levels_OH, BITS[kind]),
        f"{name}.weight_scale": scales.contiguous(),
        f"{name}.weight_shape": torch.tensor(weight.levels_OH.shape, dtype=torch.int64),
    }


def pack(levels_OI: Tensor, bits: int) -> Tensor:
    """Pack to int32 (O, I · bits / 32): [-8, 7, 0 …] in 4 bits is 0x…8f0; inputs are padded with
    0."""
    a_word, lowest = 32 // bits, -(2 ** (bits - 1))
    codes = levels_OI.to(torch.int32) - lowest
    codes = torch.nn.functional.pad(codes, (0, -codes.shape[1] % a_word)).unflatten(1, (-1, a_word))
    packed = torch.zeros(codes.shape[:2], dtype=torch.int32)
    for at in range(a_word):
        packed |= codes[:, :, at] << (bits * at)
    return packed


def gptq_tensors(name: str, weight: RoundedWeight) -> dict[str, Tensor]:
    """Return the tensors of GPTQ v1: packed along inputs, zero points stored minus one."""
    outputs, inputs = weight.levels_OH.shape
    groups = weight.scales_OG.shape[1]
    zeros = pack(torch.full((groups, outputs), 7 - 8, dtype=torch.int8), 4)
    return {
        f"{name}.qweight": pack(weight.levels_OH, 4).T.contiguous(),
        f"{name}.qzeros": zeros,
        f"{name}.scales": weight.scales_OG.T.half().contiguous(),
        f"{name}.g_idx": (torch.arange(inputs) // weight.group).to(torch.int32),
    }


def quantization_config(
    formats: Mapping[str, Format], file_format: FileFormat, w8a8: bool
) -> dict[str, Any]:
    """Return `quantization_config` of config.json for these matrices of the checkpoint and the
    head."""
    if file_format == "gptq":
        return gptq_config(formats)
    groups = {}
    kinds = list(dict.fromkeys(format for format in formats.values() if format != PLAIN))
    for number, format in enumerate(kinds):
        names = [name for name, own in formats.items() if own == format]
        groups[f"group_{number}"] = scheme(format, targets(names, formats), w8a8)
    styles = {group["format"] for group in groups.values()}
    ignored = [name for name, own in formats.items() if own == PLAIN]
    return {
        "config_groups": groups,
        "format": styles.pop() if len(styles) == 1 else "mixed-precision",
        "global_compression_ratio": None,
        "ignore": ignored_patterns(ignored),
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "version": LIBRARY_VERSION,
    }


def scheme(format: Format, names: list[str], w8a8: bool) -> dict[str, Any]:
    """Return one group of the configuration."""
    integers = format.kind == "int8" and w8a8
    return {
        "format": "int-quantized" if integers else "pack-quantized",
        "input_activations": arguments(8, "token", None, dynamic=True) if integers else None,
        "output_activations": None,
        "targets": names,
        "weights": arguments(
            BITS[format.kind],
            "group" if format.group else "channel",
            format.group or None,
            dynamic=False,
        ),
    }


def arguments(bits: int, strategy: str, group: int | None, dynamic: bool) -> dict[str, Any]:
    """Return compressed-tensors' QuantizationArgs."""
    return {
        "actorder": None,
        "block_structure": None,
        "dynamic": dynamic,
        "group_size": group,
        "num_bits": bits,
        "observer": None if dynamic else "minmax",
        "observer_kwargs": {},
        "strategy": strategy,
        "symmetric": True,
        "type": "int",
    }


def targets(names: list[str], formats: Mapping[str, Format]) -> list[str]:
    """Return `Linear` if the whole model has this format, all layers if they have it, else
    patterns.

    q, k and v of layers 0 and 3: `re:.*layers\\.(0|3)\\.self_attn\\.q_proj$` and two more.
    """
    layers = [name for name in names if LAYER.match(name)]
    others = [name for name in names if not LAYER.match(name)]
    everywhere = [name for name, own in formats.items() if LAYER.match(name) and own != PLAIN]
    if layers and layers == everywhere:
        alone = all(LAYER.match(name) or own == PLAIN for name, own in formats.items())
        return ["Linear" if alone else ALL_LAYERS, *others]
    return [*patterns(layers), *others]


def ignored_patterns(names: list[str]) -> list[str]:
    """The matrices that stay plain."""
    layers = [name for name in names if LAYER.match(name)]
    return [*patterns(layers), *(name for name in names if not LAYER.match(name))]


def patterns(names: list[str]) -> list[str]:
    """Return regular expressions for names of layers, one for each kind of matrix."""
    by_kind: dict[str, list[str]] = {}
    for name in names:
        match = LAYER.match(name)
        assert match is not None
        by_kind.setdefault(match[3], []).append(match[2])
    return [
        f"re:.*layers\\.({'|'.join(layers)}){re.escape(rest)}$" for rest, layers in by_kind.items()
    ]


def gptq_config(formats: Mapping[str, Format]) -> dict[str, Any]:
    """Return GPTQ's configuration: one int4 format for all layers, and a plain head."""
    formats_used = {
        format for name, format in formats.items() if LAYER.match(name) and format != PLAIN
    }
    if (
        len(formats_used) != 1
        or next(iter(formats_used)).kind != "int4"
        or formats["lm_head"] != PLAIN
    ):
        raise UsageError(
            "A GPTQ file holds int4 of one group in all layers, and a plain head.",
            "Write compressed-tensors, or ask for --format int4 --head none.",
        )
    return {
        "bits": 4,
        "checkpoint_format": "gptq",
        "damp_percent": 0.01,
        "desc_act": False,
        "dynamic": {},
        "group_size": next(iter(formats_used)).group,
        "lm_head": False,
        "quant_method": "gptq",
        "sym": True,
        "true_sequential": True,
    }
