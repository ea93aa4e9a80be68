"""Rotary embeddings as configs spell them, old and new: one RopeSpec for each kind of layer.

transformers 5 writes `rope_parameters`, flat or by layer type; before that there were `rope_theta`
and `rope_scaling`, and Gemma 3's `rope_local_base_freq` for its window layers.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from headway.core.errors import ModelError, UnsupportedModelError
from headway.spec.parts import RopeSpec
from headway.spec.values import flag, mapping, number, numbers, optional_number, positive, wrong

FULL, WINDOW = "full_attention", "sliding_attention"
QUERY = "queries"
"""The rope of queries, where it is another than that of keys."""
MOST_POSITIONS = 2**31 - 1


def ropes_from_config(
    config: dict[str, Any],
    theta: float,
    local_theta: float | None,
    default: dict[str, Any],
    scaled_windows: bool = True,
) -> dict[str, RopeSpec]:
    """The rope of full and of window layers; the thetas and `default` are the family's own.

    `local_theta` is None for families whose window layers turn as the full ones do, but for the
    scaling where not `scaled_windows`.
    """
    given = mapping(config, "rope_parameters")
    nested = bool(given) and set(given) <= {FULL, WINDOW}
    flat = given or mapping(config, "rope_scaling") or default
    full = mapping(given, FULL) if nested else flat
    window = mapping(given, WINDOW) if nested else {}
    if local_theta is None and scaled_windows:
        full, window = full or window, window or full
    elif local_theta is not None:
        local = number(config, "rope_local_base_freq", default=local_theta)
        window = {"rope_theta": local} | window
    ropes = {FULL: read_rope(config, full, theta), WINDOW: read_rope(config, window, theta)}
    rules = {
        (rope.kind, rope.original_max_len) for rope in ropes.values() if rope.depends_on_length
    }
    if len(rules) > 1:
        raise UnsupportedModelError(
            "Full and window layers have rope scalings that change at different lengths.",
            "Give both the same rope_type and original_max_position_embeddings in config.json.",
        )
    return ropes


def query_rope(config: dict[str, Any], rope: RopeSpec, default: dict[str, Any]) -> RopeSpec:
    """Ministral 3: the rope of queries, which grow by `llama_4_scaling_beta` with the position."""
    given = mapping(config, "rope_parameters") or mapping(config, "rope_scaling") or default
    beta = optional_number(given, "llama_4_scaling_beta")
    if not beta:
        return rope
    original = positive(given, "original_max_position_embeddings")
    if rope.share != 1 or rope.kind in ("dynamic", "longrope"):
        raise UnsupportedModelError(
            f"llama_4_scaling_beta beside a rope of {rope.share} of a head or of the kind "
            f"{rope.kind} is not supported.",
            "Supported are: default, linear, llama3 and yarn, of whole heads.",
        )
    return replace(rope, query_beta=beta, original_max_len=original)


def read_rope(config: dict[str, Any], scaling: dict[str, Any], theta: float) -> RopeSpec:
    """One RopeSpec from its own keys, with the config's where it has none."""
    share = number(scaling, "partial_rotary_factor", default=config.get("partial_rotary_factor", 1))
    if share > 1:
        raise ModelError(
            f"config.json: partial_rotary_factor is {share}, more than the whole head.",
            "Copy config.json again from the model's source.",
        )
    base = number(scaling, "rope_theta", default=config.get("rope_theta") or theta)
    if base <= 1:
        raise wrong("rope_theta", "a number above 1", base)
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    kind = "longrope" if kind == "su" else kind  # as Phi-3's first configs have it
    if not isinstance(kind, str) or kind not in READERS:
        raise UnsupportedModelError(
            f"The rope scaling {str(kind)[:40]} is not supported.",
            f"Supported are: {', '.join(READERS)}.",
        )
    return RopeSpec(theta=base, kind=kind, share=share, **READERS[kind](config, scaling))  # type: ignore[arg-type]


def read_llama3(config: dict[str, Any], scaling: dict[str, Any]) -> dict[str, Any]:
    """Llama 3.1's three bands."""
    return {
        "factor": number(scaling, "factor"),
        "low_freq_factor": number(scaling, "low_freq_factor"),
        "high_freq_factor": number(scaling, "high_freq_factor"),
        "original_max_len": positive(scaling, "original_max_position_embeddings"),
    }


def read_dynamic(config: dict[str, Any], scaling: dict[str, Any]) -> dict[str, Any]:
    """NTK-aware scaling: theta grows with the context beyond max_position_embeddings."""
    return {
        "factor": number(scaling, "factor"),
        "original_max_len": positive(config, "max_position_embeddings", default=2048),
    }


def read_yarn(config: dict[str, Any], scaling: dict[str, Any]) -> dict[str, Any]:
    """YaRN (Peng et al. 2023), with DeepSeek's two mscale keys for the gain."""
    longest = positive(config, "max_position_embeddings", default=2048)
    original = positive(scaling, "original_max_position_embeddings", default=longest)
    factor = number(scaling, "factor", default=longest / original)
    gain = scaling.get("attention_factor")
    if gain is None and scaling.get("mscale") and scaling.get("mscale_all_dim"):
        gain = yarn_gain(factor, number(scaling, "mscale")) / yarn_gain(
            factor, number(scaling, "mscale_all_dim")
        )
    return {
        "factor": factor,
        "original_max_len": original,
        "beta_fast": number(scaling, "beta_fast", default=32.0),
        "beta_slow": number(scaling, "beta_slow", default=1.0),
        "truncate": flag(scaling, "truncate", default=True),
        "gain": number({"attention_factor": gain}, "attention_factor", yarn_gain(factor)),
    }


def read_longrope(config: dict[str, Any], scaling: dict[str, Any]) -> dict[str, Any]:
    """LongRoPE (Ding et al. 2024), as Phi-3 has it: two lists, one number a frequency."""
    key = "original_max_position_embeddings"
    longest = positive(config, "max_position_embeddings", default=2048)
    original = positive(scaling, key, default=config.get(key) or longest)
    stretches = longest > original > 1
    gain = math.sqrt(1 + math.log(longest / original) / math.log(original)) if stretches else 1.0
    return {
        "short_factors": numbers(scaling, "short_factor"),
        "long_factors": numbers(scaling, "long_factor"),
        "original_max_len": original,
        "gain": number(scaling, "attention_factor", default=gain),
    }


def yarn_gain(factor: float, mscale: float = 1.0) -> float:
    """0.1 · mscale · ln(factor) + 1: factor 4 → 1.139."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


READERS: dict[str, Callable[[dict[str, Any], dict[str, Any]], dict[str, Any]]] = {
    "default": lambda config, scaling: {},
    "linear": lambda config, scaling: {"factor": number(scaling, "factor")},
    "dynamic": read_dynamic,
    "llama3": read_llama3,
    "yarn": read_yarn,
    "longrope": read_longrope,
}


def longest_context(config: dict[str, Any], rope: RopeSpec) -> int:
    """max_position_embeddings, stretched by the scalings that are written beside the short one.

    Qwen2.5 with YaRN: 32,768 and a factor of 4 → 131,072.
    """
    longest = positive(config, "max_position_embeddings", default=2048)
    if rope.kind in ("dynamic", "yarn"):
        stretched = rope.original_max_len * rope.factor
        if stretched > MOST_POSITIONS:
            raise wrong("factor", f"such that the context is at most {MOST_POSITIONS}", rope.factor)
        return max(longest, int(stretched))
    return longest
