"""From a folder's quantization config to the scheme of each linear layer.

Nothing here reads weights or needs torch.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from headway.runtime.quantized.scheme import (
    Match,
    Scheme,
    Schemes,
    get_boolean,
    get_integer,
    get_object,
    get_strings,
    invalid_value,
    match_all,
    match_head,
    match_name,
    match_pattern,
    raise_unsupported,
)
from headway.spec.model_files import read_document
from headway.spec.quantization_config import quantization_config, quantization_method

COMPRESSED_FORMATS = (
    *("pack-quantized", "int-quantized", "float-quantized", "naive-quantized"),
    "mxfp4-pack-quantized",
)
INTEGER_BITS = (4, 8)
FP8_TYPES = ("e4m3", "float8_e4m3fn", "torch.float8_e4m3fn")


def read_schemes(model: Path) -> Schemes | None:
    """Return a folder's schemes, None in 16 or 32 bits. Raises UnsupportedModelError."""
    config = quantization_config(model, read_document(model, "config.json") or {})
    method = quantization_method(config)
    return PARSERS[method](config) if method else None


# ── compressed-tensors ──────────────────────────────────────────────────────────────────────


def parse_compressed_tensors(config: dict[str, Any]) -> Schemes:
    """Parse groups and targets; names have priority over expressions, these over classes."""
    if get_object(config, "transform_config").get("config_groups"):
        raise_unsupported("compressed-tensors", "with transforms of inputs, which are not read")
    sparsity = str(get_object(config, "sparsity_config").get("format") or "dense")
    if sparsity != "dense":
        raise_unsupported("compressed-tensors", f"and pruned as {sparsity}, which is not read")
    status = str(config.get("quantization_status") or "compressed")
    if status != "compressed":
        raise_unsupported(
            "compressed-tensors", f"with the status {status!r}: its weights are not compressed"
        )
    whole = str(config.get("format") or "")
    rules: list[tuple[Match, Scheme | None]] = [
        (match_target(name, "ignore"), None) for name in get_strings(config, "ignore")
    ]
    targets: dict[str, Scheme] = {}
    for group, body in get_object(config, "config_groups").items():
        if not isinstance(body, dict):
            raise invalid_value(
                f"config_groups.{group}", body, "an object with targets and weights"
            )
        scheme = parse_group(body, str(body.get("format") or whole))
        for target in get_strings(body, "targets"):
            targets.setdefault(target, scheme)
    named = [name for name in targets if name[:1].islower() and not name.startswith("re:")]
    expressions = sorted(name for name in targets if name.startswith("re:"))
    classes = [name for name in targets if name not in {*named, *expressions}]
    for target in (*named, *expressions, *classes):
        rules.append((match_target(target, "targets"), targets[target]))
    return Schemes(method="compressed-tensors", rules=tuple(rules), named=tuple(named))


def match_target(target: str, where: str) -> Match:
    """Return the rule of a name, an expression or a class; all linear layers are of one class."""
    if target.startswith("re:"):
        return match_pattern(target.removeprefix("re:"), where)
    if target in ("Linear", "LinearBase"):
        return match_all
    return match_name(target)


def parse_group(group: dict[str, Any], format: str) -> Scheme:
    """Return the scheme of one group of compressed-tensors."""
    weights = get_object(group, "weights")
    label = f"compressed-tensors {format}"
    if format not in COMPRESSED_FORMATS:
        raise_unsupported(label, "which is not read")
    if not weights:
        raise_unsupported(label, "with inputs rounded and weights not, which is not read")
    if group.get("output_activations") is not None:
        raise_unsupported(label, "with rounded outputs, which are not read")
    bits, kind = get_integer(weights, "num_bits", 8), str(weights.get("type") or "int")
    strategy = str(weights.get("strategy") or strategy_of(weights))
    symmetric = get_boolean(weights, "symmetric", True)
    if format == "mxfp4-pack-quantized":
        return Scheme(layout="mxfp4", label=label, bits=4, group=32)
    if kind == "float":
        if bits != 8 or strategy not in ("tensor", "channel", "block") or not symmetric:
            raise_unsupported(label, f"floats of {bits} bits by {strategy}, which are not read")
        block = {"tensor": (0, 0), "channel": (1, 0)}.get(strategy) or block_shape(
            weights, "block_structure"
        )
        return Scheme(layout="float-quantized", label=label, block=block)
    if bits not in INTEGER_BITS or (bits != 8 and format != "pack-quantized"):
        raise_unsupported(label, f"of {bits} bits, which is not read (4 and 8 are)")
    if strategy not in ("tensor", "channel", "group"):
        raise_unsupported(label, f"by {strategy}, which is not read")
    layout = "pack-quantized" if format == "pack-quantized" else "int-quantized"
    size = get_integer(weights, "group_size") if strategy == "group" else 0
    group_size = check_group(size, label) if size else 0
    return Scheme(layout=layout, label=label, bits=bits, group=group_size, symmetric=symmetric)


def strategy_of(weights: dict[str, Any]) -> str:
    """Return compressed-tensors' default strategy where the config states none."""
    size = weights.get("group_size")
    return "tensor" if size is None else "channel" if size == -1 else "group"


def block_shape(config: dict[str, Any], key: str) -> tuple[int, int]:
    """Return (outputs, inputs) of a scale's block."""
    value = config.get(key)
    if isinstance(value, str):
        value = [int(part) if part.isdecimal() else 0 for part in value.split("x")]
    positive = isinstance(value, list) and all(
        isinstance(each, int) and 0 < each <= 1 << 20 for each in value
    )
    if not isinstance(value, list) or not positive or len(value) != 2:
        raise invalid_value(key, value, "a list of two positive numbers: [128, 128]")
    return (value[0], value[1])


def check_group(size: int, label: str) -> int:
    """Return a supported group size of a config; 0 for -1, which means all inputs of an output."""
    if size == -1:
        return 0
    if size <= 0 or size % 32:
        raise_unsupported(
            label, f"in groups of {size}, which are not read (multiples of 32 are, and -1)"
        )
    return size


# ── GPTQ and AWQ ────────────────────────────────────────────────────────────────────────────


def parse_gptq(config: dict[str, Any]) -> Schemes:
    """Parse AutoGPTQ's and GPTQModel's config; `dynamic` has schemes of single modules."""
    version = str(config.get("checkpoint_format") or config.get("format") or "gptq").lower()
    if version not in ("gptq", "gptq_v2"):
        raise_unsupported(f"GPTQ in the format {version}", "which is not read")
    if config.get("pack_dtype") not in (None, "int32", "torch.int32"):
        raise_unsupported("GPTQ", "packed in other words than int32, which is not read")
    rules: list[tuple[Match, Scheme | None]] = []
    for pattern, changes in get_object(config, "dynamic").items():
        matches = match_pattern(pattern.removeprefix("+:").removeprefix("-:"), "dynamic")
        if pattern.startswith("-:"):
            rules.append((matches, None))
        elif isinstance(changes, dict):
            rules.append((matches, parse_gptq_scheme(config | changes)))
        else:
            raise invalid_value("dynamic", changes, "an object of changes by expression")
    scheme = parse_gptq_scheme(config)
    if not get_boolean(config, "lm_head", False):
        rules.append((match_head, None))
    inside = config.get("modules_in_block_to_quantize")
    if inside:
        endings = module_endings(inside)
        rules.append((lambda module: not module.endswith(endings), None))
    rules.append((match_all, scheme))
    return Schemes(method="gptq", rules=tuple(rules), version=version)


def parse_gptq_scheme(config: dict[str, Any]) -> Scheme:
    """Return the scheme of GPTQ's fields."""
    bits = get_integer(config, "bits")
    if bits not in INTEGER_BITS:
        raise_unsupported("GPTQ", f"of {bits} bits, which is not read (4 and 8 are)")
    group = check_group(get_integer(config, "group_size", 128), "GPTQ")
    symmetric = get_boolean(config, "sym", True)
    return Scheme(layout="gptq", label="GPTQ", bits=bits, group=group, symmetric=symmetric)


def module_endings(inside: object) -> tuple[str, ...]:
    """Return what the names of quantized modules end with: `[["self_attn.q_proj"],
    ["mlp.down_proj"]]` → (".self_attn.q_proj", ".mlp.down_proj")."""
    lists = inside if isinstance(inside, list) else [None]
    names = [name for part in lists for name in (part if isinstance(part, list) else [part])]
    endings = tuple("." + name for name in names if isinstance(name, str))
    if len(endings) < len(names):
        raise invalid_value("modules_in_block_to_quantize", inside, "a list of lists of names")
    return endings


def parse_awq(config: dict[str, Any]) -> Schemes:
    """Parse the config of AutoAWQ; GPTQModel writes the same under other names."""
    version = str(config.get("version") or config.get("checkpoint_format") or "gemm").lower()
    if version not in ("gemm", "awq"):
        raise_unsupported(f"AWQ in the version {version}", "which is not read (gemm is)")
    bits = get_integer(config, "bits", get_integer(config, "w_bit", 4))
    if bits != 4:
        raise_unsupported("AWQ", f"of {bits} bits, which is not read (4 are)")
    size = get_integer(config, "group_size", get_integer(config, "q_group_size", 128))
    zeros = get_boolean(config, "zero_point", True)
    scheme = Scheme(
        layout="awq", label="AWQ", bits=4, group=check_group(size, "AWQ"), symmetric=not zeros
    )
    rules: list[tuple[Match, Scheme | None]] = [
        (match_substring(name), None) for name in get_strings(config, "modules_to_not_convert")
    ]
    rules += [(match_head, None), (match_all, scheme)]
    return Schemes(method="awq", rules=tuple(rules))


def match_substring(name: str) -> Match:
    """Return the rule for modules whose names contain `name`, as AutoAWQ excludes them."""
    return lambda module: name in module


# ── FP8 ─────────────────────────────────────────────────────────────────────────────────────


def parse_fp8(config: dict[str, Any]) -> Schemes:
    """Parse blocks (DeepSeek, Qwen), a scale for a matrix (AutoFP8) or for each output (FBGEMM)."""
    kind = str(config.get("fmt") or "e4m3").lower()
    if kind not in FP8_TYPES:
        raise_unsupported(f"FP8 {kind}", "which is not read (e4m3 is)")
    if str(config.get("scale_fmt") or "float") not in ("float", "ue8m0"):
        raise_unsupported("FP8", f"with scales as {config['scale_fmt']}, which are not read")
    if str(config.get("expert_dtype") or "fp8") != "fp8":
        raise_unsupported("FP8", f"with experts as {config['expert_dtype']}, which are not read")
    blocks = config.get("weight_block_size") is not None
    block = block_shape(config, "weight_block_size") if blocks else (0, 0)
    if config.get("quant_method") == "fbgemm_fp8":
        block = (1, 0)
    scheme = Scheme(layout="fp8", label="FP8", block=block)
    excluded = get_strings(config, "modules_to_not_convert") or get_strings(
        config, "ignored_layers"
    )
    rules: list[tuple[Match, Scheme | None]] = [(match_module(name), None) for name in excluded]
    rules += [(match_head, None), (match_all, scheme)]
    return Schemes(method="fp8", rules=tuple(rules))


def match_module(name: str) -> Match:
    """Return the rule for modules that are `name`, are inside it, or end with it, as in
    transformers.

    "model.layers.1" matches model.layers.1.mlp, not model.layers.11.mlp.
    """
    return lambda module: module.endswith(name) or (module + ".").startswith(name + ".")


# ── MXFP4 of gpt-oss ────────────────────────────────────────────────────────────────────────


def parse_mxfp4(config: dict[str, Any]) -> Schemes:
    """Parse gpt-oss's config: experts, except those that `modules_to_not_convert` matches."""
    scheme = Scheme(layout="mxfp4-blocks", label="MXFP4", bits=4, group=32)
    where = "modules_to_not_convert"
    excluded = get_strings(config, where)
    rules: list[tuple[Match, Scheme | None]] = [
        (match_pattern(rf"(?:{name}|.*\.{name})(?:\.|$)", where), None) for name in excluded
    ]
    rules.append((lambda module: ".mlp.experts." in module, scheme))
    return Schemes(method="mxfp4", rules=tuple(rules))


PARSERS: dict[str, Callable[[dict[str, Any]], Schemes]] = {
    "compressed-tensors": parse_compressed_tensors,
    "gptq": parse_gptq,
    "awq": parse_awq,
    "fp8": parse_fp8,
    "mxfp4": parse_mxfp4,
}
"""Quantization method → parser of its config."""
