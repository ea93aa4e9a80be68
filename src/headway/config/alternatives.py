"""What weights and KV would take with other options that this server could be started with.

The rules that resolve a server's settings are applied to each option, so that none is offered that
would be refused. Qwen2.5-0.5B in bf16 on a CPU with native kernels: 988 MB of weights a step, 494
with `--quantization int8`, 392 with `--quantization int4`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import fields
from math import inf

from headway.config.attention_choice import choose_kv_dtype
from headway.config.options import EngineOptions, ServerOptions
from headway.config.quantization_choice import choose_quantization, measures_formats
from headway.core.errors import UsageError
from headway.spec import DTYPE_BYTES, ModelSpec
from headway.spec.formats import FORMATS
from headway.spec.kv_format import ROUNDED
from headway.spec.quantization import bytes_per_weight, measured_int4_bytes, plain_parameters

TABLES = (EngineOptions, ServerOptions)


def has_option(flag: str) -> bool:
    """Whether a server of this version takes the option: "--kv-memory" yes, "--warp" no."""
    name = flag.removeprefix("--").replace("-", "_")
    return any(name == row.name for table in TABLES for row in fields(table))


def highest(flag: str) -> float:
    """The most that the option may be: 4096 of "--max-num-seqs", inf where nothing bounds it."""
    name = flag.removeprefix("--").replace("-", "_")
    bounds = [row.metadata["high"] for table in TABLES for row in fields(table) if row.name == name]
    return next((bound for bound in bounds if bound is not None), inf)


def weight_choices(settings: Mapping[str, str], model: ModelSpec) -> dict[str, int]:
    """Option → bytes of weights that a step reads with it; `settings` is `Settings.to_stats()`."""
    dtype = settings.get("dtype", "")
    if dtype not in DTYPE_BYTES:
        return {}
    bytes_by_option = dict(quantized(settings, model, dtype))
    if DTYPE_BYTES[dtype] > 2 and settings.get("quantization") == "none":
        bytes_by_option["--dtype bfloat16"] = model.step_weight_bytes("bfloat16")
    return bytes_by_option


def quantized(
    settings: Mapping[str, str], model: ModelSpec, dtype: str
) -> Iterator[tuple[str, int]]:
    """The formats that this device and these kernels take, but the server's own."""
    own = settings.get("quantization", "")
    for format in FORMATS[1:]:
        if own.startswith(format):  # of int4 the bytes are the profile's, which is not read here
            continue
        options = EngineOptions(quantization=format)
        try:
            quantization, _ = choose_quantization(
                options, settings["device"], settings["kernels"], model
            )
        except (UsageError, KeyError):
            continue
        measured = measures_formats(options, settings["device"]) and model.experts is None
        if measured and quantization.packed:
            plain = plain_parameters(model) - model.table_parameters
            num_bytes = measured_int4_bytes(model) + plain * DTYPE_BYTES[dtype]
        else:
            share = bytes_per_weight(quantization, model, dtype) / DTYPE_BYTES[dtype]
            num_bytes = round(model.step_weight_bytes(dtype) * share)
        yield f"--quantization {format}", num_bytes


def kv_choices(settings: Mapping[str, str], model: ModelSpec) -> dict[str, int]:
    """Option → bytes of KV a token with it."""
    bytes_by_option = {}
    for name in ROUNDED:
        options = EngineOptions(kv_cache_dtype=name)
        backend = settings.get("attention_backend", "")
        try:
            kv_dtype, _ = choose_kv_dtype(options, backend, settings.get("dtype", ""), model)
        except UsageError:
            continue
        bytes_by_option[f"--kv-cache-dtype {name}"] = model.kv_bytes_per_token(kv_dtype)
    return bytes_by_option
