"""A model's dimensions as it is served, with what options say of its layers' keys and values."""

from headway.config.cache_config import DEFAULT_BLOCK_SIZE
from headway.config.kv_keep import with_choosing
from headway.config.kv_layers import narrowed, with_exact_layers
from headway.config.kv_read import with_bounds
from headway.config.options import EngineOptions
from headway.config.resolve import choose_dtype
from headway.spec import ModelSpec


def with_exact(whole: ModelSpec, options: EngineOptions) -> ModelSpec:
    """`whole` with the layers that no rounding touches; nothing of it is lossy."""
    dtype, _ = choose_dtype(options, whole)
    return with_exact_layers(
        whole, options.kv_cache_dtype_skip_layers, options.kv_cache_dtype, dtype
    )


def as_served(whole: ModelSpec, options: EngineOptions) -> ModelSpec:
    """`whole` with exact, narrowed and choosing layers; UsageError for what does not fit."""
    spec = narrowed(with_exact(whole, options), options.kv_layers)
    spec = with_bounds(spec, options.kv_read, options.block_size or DEFAULT_BLOCK_SIZE)
    return with_choosing(spec, options.kv_keep)
