"""DeepSeek V2 and V3: latent attention, and experts chosen in groups beside shared ones.

The defaults of missing keys are those of transformers' classes; what those leave out of the
published code (a normalization in V2, experts in some layers alone) is refused by name.
"""

from typing import Any

from headway.core.errors import UnsupportedModelError
from headway.spec.moe import behind_dense
from headway.spec.parts import ExpertsSpec, LatentSpec
from headway.spec.rope import yarn_gain
from headway.spec.values import flag, mapping, number, positive, wrong


def latent(config: dict[str, Any]) -> LatentSpec:
    """The widths of latent attention; `q_lora_rank` null: queries without a bottleneck."""
    heads = positive(config, "num_attention_heads")
    if positive(config, "num_key_value_heads", default=heads) != heads:
        given = config["num_key_value_heads"]
        raise wrong("num_key_value_heads", f"num_attention_heads ({heads})", given)
    whole = "q_lora_rank" in config and config["q_lora_rank"] is None
    return LatentSpec(
        rank=positive(config, "kv_lora_rank", default=512),
        rope_dim=positive(config, "qk_rope_head_dim", default=64),
        nope_dim=positive(config, "qk_nope_head_dim", default=128),
        value_dim=positive(config, "v_head_dim", default=128),
        q_rank=0 if whole else positive(config, "q_lora_rank", default=1536),
        interleaved=flag(config, "rope_interleave", default=True),
    )


def scales(config: dict[str, Any]) -> dict[str, float]:
    """1 / √(width of a query), times YaRN's gain squared where `mscale_all_dim` asks for it."""
    latent_spec = latent(config)
    scale = (latent_spec.nope_dim + latent_spec.rope_dim) ** -0.5
    rope = mapping(config, "rope_parameters") or mapping(config, "rope_scaling")
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        gain = rope.get("mscale_all_dim") and number(rope, "mscale_all_dim")
        scale *= yarn_gain(number(rope, "factor"), gain) ** 2 if gain else 1.0
    return {"attention_scale": scale}


def v2_experts(config: dict[str, Any], num_layers: int) -> tuple[ExpertsSpec | None, list[bool]]:
    """A softmax over all; the best ones, of all groups or of those with the best single expert."""
    expect(config, "scoring_func", "softmax")
    if flag(config, "norm_topk_prob"):
        raise unsupported("norm_topk_prob", True, "false")
    method = config.get("topk_method") or "greedy"
    if method not in ("greedy", "group_limited_greedy"):
        raise unsupported("topk_method", method, "greedy, group_limited_greedy")
    limited = method == "group_limited_greedy"
    experts = ExpertsSpec(
        count=positive(config, "n_routed_experts", default=64),
        active=positive(config, "num_experts_per_tok"),
        intermediate_size=positive(config, "moe_intermediate_size", default=1407),
        normalize=False,
        exact_router=True,
        shared=shared(config, 2),
        groups=positive(config, "n_group") if limited else 1,
        active_groups=positive(config, "topk_group") if limited else 1,
        scale=number(config, "routed_scaling_factor", default=1.0),
    )
    return checked(experts), sparse(config, num_layers, 0)


def v3_experts(config: dict[str, Any], num_layers: int) -> tuple[ExpertsSpec | None, list[bool]]:
    """A sigmoid for each; a bias that balances their load chooses, and does not weigh.

    The groups are those whose two best experts add up to the most.
    """
    expect(config, "scoring_func", "sigmoid")
    expect(config, "topk_method", "noaux_tc")
    experts = ExpertsSpec(
        count=positive(config, "n_routed_experts", default=256),
        active=positive(config, "num_experts_per_tok", default=8),
        intermediate_size=positive(config, "moe_intermediate_size", default=2048),
        normalize=flag(config, "norm_topk_prob", default=True),
        exact_router=True,
        scoring="sigmoid",
        corrected=True,
        shared=shared(config, 1),
        groups=positive(config, "n_group", default=8),
        active_groups=positive(config, "topk_group", default=4),
        scale=number(config, "routed_scaling_factor", default=2.5),
    )
    return checked(experts), sparse(config, num_layers, 3)


def shared(config: dict[str, Any], default: int) -> int:
    """`n_shared_experts`, whose widths add up; null and 0 are none."""
    given = config.get("n_shared_experts", default)
    return positive(config, "n_shared_experts", default=default) if given else 0


def sparse(config: dict[str, Any], num_layers: int, default: int) -> list[bool]:
    """Which layers have experts: all behind the first `first_k_dense_replace`."""
    layers = behind_dense(config, num_layers, "first_k_dense_replace", default)
    if positive(config, "moe_layer_freq", default=1) != 1:
        raise unsupported("moe_layer_freq", config["moe_layer_freq"], "1")
    return layers


def checked(experts: ExpertsSpec) -> ExpertsSpec:
    """The experts, where groups divide them and hold as many as a token visits."""
    if experts.count % experts.groups or experts.active_groups > experts.groups:
        groups = f"{experts.active_groups} of {experts.groups}"
        raise wrong("n_group, topk_group", f"groups of {experts.count} experts", groups)
    size = experts.count // experts.groups
    if experts.active > experts.active_groups * size or (experts.corrected and size < 2):
        most = experts.active_groups * size
        raise wrong(
            "num_experts_per_tok", f"at most {most}, of groups of 2 or more", experts.active
        )
    return experts


def expect(config: dict[str, Any], key: str, value: str) -> None:
    """UnsupportedModelError unless the key is missing or has this value."""
    if config.get(key) not in (None, value):
        raise unsupported(key, config[key], value)


def unsupported(key: str, value: object, known: str) -> UnsupportedModelError:
    """The error for a way of choosing experts that is not read."""
    return UnsupportedModelError(
        f"{key} {str(value)[:40]} is not supported for this architecture.",
        f"Supported is: {known}.",
    )
