"""Models with states in most layers and attention in few: Qwen3-Next, Granite 4, LFM2."""

from typing import Any

from headway.core.errors import UnsupportedModelError
from headway.spec.moe import has_granite_experts
from headway.spec.rope import FULL
from headway.spec.state import StateSpec
from headway.spec.values import flag, number, positive, wrong

STATE = "linear_attention"
SPELLED = {"mamba": STATE, "attention": FULL, "conv": STATE}
"""Kinds of layers as the configs of Granite and LFM2 name them → as Qwen's do."""
INFINITE = {"__float__": "Infinity"}
"""How transformers 5 writes a number that JSON has none for."""


def quarter_rope(config: dict[str, Any]) -> dict[str, Any]:
    """A quarter of Qwen's heads turns."""
    return {"partial_rotary_factor": 0.25} | config


def qwen35_moe(config: dict[str, Any]) -> dict[str, Any]:
    """No layer is dense: the width of a dense one is not in the config."""
    width = positive(config, "moe_intermediate_size", default=512)
    return quarter_rope(config) | {"intermediate_size": width}


def granite(config: dict[str, Any]) -> dict[str, Any]:
    """Granite's config with Qwen's kinds of layers; without experts its MLP is the shared one."""
    renamed = dict(config)
    kinds = config.get("layer_types") or config.get("layers_block_type")
    if isinstance(kinds, list):
        renamed["layer_types"] = [SPELLED.get(str(kind), kind) for kind in kinds]
    if not has_granite_experts(config):
        renamed["intermediate_size"] = positive(config, "shared_intermediate_size", default=1024)
    return renamed


def lfm2(config: dict[str, Any]) -> dict[str, Any]:
    """LFM2's config with Llama's names; the width of its MLPs is two thirds of what it says."""
    inner = positive(config, "block_ff_dim", default=positive(config, "intermediate_size", 12288))
    if flag(config, "block_auto_adjust_ff_dim", default=True):
        multiple = positive(config, "block_multiple_of", default=256)
        inner = int(number(config, "block_ffn_dim_multiplier", default=1.0) * int(2 * inner / 3))
        inner = -(-inner // multiple) * multiple
    return lfm2_moe(config) | {"intermediate_size": inner}


def lfm2_moe(config: dict[str, Any]) -> dict[str, Any]:
    """The config of an LFM2 with experts with Llama's names."""
    tied = flag(config, "tie_word_embeddings", default=True)
    renamed = config | {
        "tie_word_embeddings": flag(config, "tie_embedding", default=tied),
        "rms_norm_eps": number(config, "norm_eps", default=1e-5),
    }
    kinds = config.get("layer_types")
    if isinstance(kinds, list):
        renamed["layer_types"] = [SPELLED.get(str(kind), kind) for kind in kinds]
    return renamed


def named_full(config: dict[str, Any], num_layers: int) -> list[str]:
    """LFM2: the layers of `full_attn_idxs` attend, the others keep states; all without it."""
    full = config.get("full_attn_idxs")
    if full is None:
        return [FULL] * num_layers
    if not isinstance(full, list):
        raise wrong("full_attn_idxs", "a list of layers", full)
    return [FULL if i in full else STATE for i in range(num_layers)]


def short_convolution(config: dict[str, Any]) -> StateSpec:
    """LFM2's convolution between two gates: what it keeps are its last inputs."""
    bias = flag(config, "conv_bias")
    states = StateSpec(
        rule="conv",
        heads=1,
        groups=1,
        key_dim=0,
        value_dim=positive(config, "hidden_size"),
        conv=positive(config, "conv_L_cache", default=3),
        conv_bias=bias,
        bias=bias,
    )
    return checked(states, "heads", "groups", 1)


def every_fourth_full(config: dict[str, Any], num_layers: int) -> list[str]:
    """Qwen3-Next: a full layer behind three that keep states."""
    step = positive(config, "full_attention_interval", default=4)
    return [STATE if (i + 1) % step else FULL for i in range(num_layers)]


def all_states(config: dict[str, Any], num_layers: int) -> list[str]:
    """Granite, where its config names no kinds."""
    return [STATE] * num_layers


def rotate_when_named(config: dict[str, Any], num_layers: int) -> list[bool]:
    """Granite: its layers turn nothing, unless `position_embedding_type` is rope."""
    kind = config.get("position_embedding_type")
    if kind not in (None, "nope", "rope"):
        raise UnsupportedModelError(
            f"position_embedding_type {str(kind)[:40]} is not supported.",
            "Supported are: rope, nope.",
        )
    return [kind == "rope"] * num_layers


def delta(config: dict[str, Any]) -> StateSpec:
    """The gated delta rule of Qwen3-Next; that of Qwen3.5 has matrices of its own for each part."""
    states = StateSpec(
        rule="delta",
        heads=positive(config, "linear_num_value_heads", default=32),
        groups=positive(config, "linear_num_key_heads", default=16),
        key_dim=positive(config, "linear_key_head_dim", default=128),
        value_dim=positive(config, "linear_value_head_dim", default=128),
        conv=positive(config, "linear_conv_kernel_dim", default=4),
        fused=config["architectures"] == ["Qwen3NextForCausalLM"],
    )
    return checked(states, "linear_num_value_heads", "linear_num_key_heads", states.groups)


def step_limits(config: dict[str, Any]) -> tuple[float, float]:
    """The least and the greatest step of a token."""
    given = config.get("time_step_limit") or (0.0, INFINITE)
    pair: list[Any] = list(given) if isinstance(given, list | tuple) else []
    limits = [float("inf") if each == INFINITE else each for each in pair]
    are_numbers = [type(each) in (int, float) for each in limits] == [True, True]
    if not are_numbers or not 0 <= limits[0] <= limits[1]:
        raise wrong("time_step_limit", "two numbers from 0 on", given)
    low, high = map(float, limits)
    return low, high


def mamba2(config: dict[str, Any]) -> StateSpec:
    """Granite's Mamba-2."""
    heads = positive(config, "mamba_n_heads", default=128)
    inner = positive(config, "mamba_expand", default=2) * positive(config, "hidden_size")
    given = config.get("mamba_d_head", "auto")
    size = inner // heads if given in (None, "auto") else positive(config, "mamba_d_head")
    if size * heads != inner:
        raise wrong("mamba_d_head", f"mamba_expand · hidden_size / {heads}", given)
    states = StateSpec(
        rule="mamba2",
        heads=heads,
        groups=positive(config, "mamba_n_groups", default=1),
        key_dim=positive(config, "mamba_d_state", default=256),
        value_dim=size,
        conv=positive(config, "mamba_d_conv", default=4),
        conv_bias=flag(config, "mamba_conv_bias", default=True),
        bias=flag(config, "mamba_proj_bias"),
        limits=step_limits(config),
    )
    return checked(states, "mamba_n_heads", "mamba_n_groups", states.groups)


def checked(states: StateSpec, heads: str, key: str, groups: int) -> StateSpec:
    """The states, where each key is that of as many heads."""
    if states.heads % groups:
        raise wrong(key, f"a divisor of {heads} ({states.heads})", groups)
    if states.conv < 2:
        raise UnsupportedModelError(
            "A convolution over one token is not supported.", "Supported are: two and more."
        )
    return states
