"""Models of which only some layers attend, and the others keep states: Qwen3-Next, Granite 4."""

from typing import Any

from headway.core.errors import UnsupportedModelError
from headway.spec.parts import ExpertsSpec
from headway.spec.rope import FULL
from headway.spec.state import StateSpec
from headway.spec.values import flag, positive, wrong

STATE = "linear_attention"
SPELLED = {"mamba": STATE, "attention": FULL}
"""Kinds of layers as Granite's configs name them → as Qwen's do."""
INFINITE = {"__float__": "Infinity"}
"""How transformers 5 writes a number that JSON has none for."""
GRANITE, QWEN = "GraniteMoeHybridForCausalLM", "Qwen3NextForCausalLM"


def readable(config: dict[str, Any]) -> dict[str, Any]:
    """The config of a hybrid with one name for each kind of layer, others as they are.

    Without experts Granite's MLP is its shared one. A quarter of Qwen's heads turn.
    """
    if config.get("architectures") == [QWEN]:
        return {"partial_rotary_factor": 0.25} | config
    if config.get("architectures") != [GRANITE]:
        return config
    renamed = dict(config)
    kinds = config.get("layer_types") or config.get("layers_block_type")
    if isinstance(kinds, list):
        renamed["layer_types"] = [SPELLED.get(str(kind), kind) for kind in kinds]
    if not has_experts(config):
        renamed["intermediate_size"] = positive(config, "shared_intermediate_size", default=1024)
    return renamed


def has_experts(config: dict[str, Any]) -> bool:
    """Whether a Granite has experts beside its shared MLP: 0 of them are none."""
    return bool(config.get("num_local_experts", 8) != 0)


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
    """Qwen3-Next's gated delta rule."""
    states = StateSpec(
        rule="delta",
        heads=positive(config, "linear_num_value_heads", default=32),
        groups=positive(config, "linear_num_key_heads", default=16),
        key_dim=positive(config, "linear_key_head_dim", default=128),
        value_dim=positive(config, "linear_value_head_dim", default=128),
        conv=positive(config, "linear_conv_kernel_dim", default=4),
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


def qwen_experts(config: dict[str, Any], num_layers: int) -> tuple[ExpertsSpec | None, list[bool]]:
    """Experts as Qwen3-MoE has them, beside one that all tokens visit, behind a gate of its own."""
    spelled = "num_local_experts" if "num_local_experts" in config else "num_experts"
    experts = ExpertsSpec(
        count=positive(config, spelled, default=512),
        active=positive(config, "num_experts_per_tok", default=10),
        intermediate_size=positive(config, "moe_intermediate_size", default=512),
        normalize=flag(config, "norm_topk_prob", default=True),
        shared=1,
        shared_intermediate_size=positive(config, "shared_expert_intermediate_size", default=512),
        shared_gate=True,
    )
    if experts.active > experts.count:
        raise wrong("num_experts_per_tok", f"at most {spelled} ({experts.count})", experts.active)
    dense = config.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise wrong("mlp_only_layers", "a list of layers", dense)
    step = positive(config, "decoder_sparse_step", default=1)
    sparse = [i not in dense and (i + 1) % step == 0 for i in range(num_layers)]
    return (experts if any(sparse) else None), sparse


def granite_experts(
    config: dict[str, Any], num_layers: int
) -> tuple[ExpertsSpec | None, list[bool]]:
    """Experts as wide as `intermediate_size`, beside the shared MLP; or none."""
    if not has_experts(config):
        return None, [False] * num_layers
    experts = ExpertsSpec(
        count=positive(config, "num_local_experts", default=8),
        active=positive(config, "num_experts_per_tok", default=2),
        intermediate_size=positive(config, "intermediate_size", default=11008),
        normalize=True,
        shared=1,
        shared_intermediate_size=positive(config, "shared_intermediate_size", default=1024),
    )
    if experts.active > experts.count:
        most = f"at most num_local_experts ({experts.count})"
        raise wrong("num_experts_per_tok", most, experts.active)
    return experts, [True] * num_layers
