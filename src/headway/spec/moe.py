"""Experts as configs spell them: an ExpertsSpec, and which layers have experts."""

from typing import Any

from headway.spec.parts import ExpertsSpec
from headway.spec.values import flag, number, positive, wrong

Experts = tuple[ExpertsSpec | None, list[bool]]
"""The experts of a model, and for each layer whether it has them."""


def read_experts(
    config: dict[str, Any], count: int, active: int, width: tuple[str, int], **more: Any
) -> ExpertsSpec:
    """The experts of a config; `count`, `active` and `width` (key, number) are used without keys.

    transformers 5 spells `num_experts` as `num_local_experts`.
    """
    spelled = "num_local_experts" if "num_local_experts" in config else "num_experts"
    experts = ExpertsSpec(
        count=positive(config, spelled, default=count),
        active=positive(config, "num_experts_per_tok", default=active),
        intermediate_size=positive(config, width[0], default=width[1]),
        **more,
    )
    if experts.active > experts.count:
        raise wrong("num_experts_per_tok", f"at most {spelled} ({experts.count})", experts.active)
    return experts


def no_experts(config: dict[str, Any], num_layers: int) -> Experts:
    return None, [False] * num_layers


def qwen3_moe(config: dict[str, Any], num_layers: int) -> Experts:
    normalize = flag(config, "norm_topk_prob")
    width = ("moe_intermediate_size", 768)
    return in_some(config, num_layers, read_experts(config, 128, 8, width, normalize=normalize))


def qwen2_moe(config: dict[str, Any], num_layers: int) -> Experts:
    """Experts beside one that all tokens visit, behind a gate of its own."""
    shared = shared_expert(config, 5632)
    shared["normalize"] = flag(config, "norm_topk_prob")
    width = ("moe_intermediate_size", 1408)
    return in_some(config, num_layers, read_experts(config, 60, 4, width, **shared))


def qwen3_next(config: dict[str, Any], num_layers: int) -> Experts:
    """More and smaller ones, beside a shared one as Qwen2-MoE has it."""
    shared = shared_expert(config, 512)
    shared["normalize"] = flag(config, "norm_topk_prob", default=True)
    width = ("moe_intermediate_size", 512)
    return in_some(config, num_layers, read_experts(config, 512, 10, width, **shared))


def qwen35_moe(config: dict[str, Any], num_layers: int) -> Experts:
    """Experts as Qwen3-Next has them, in every layer."""
    shared = shared_expert(config, 512) | {"normalize": True}
    width = ("moe_intermediate_size", 512)
    return read_experts(config, 256, 8, width, **shared), [True] * num_layers


def shared_expert(config: dict[str, Any], width: int) -> dict[str, Any]:
    """Qwen's expert that all tokens visit."""
    size = positive(config, "shared_expert_intermediate_size", default=width)
    return {"shared": 1, "shared_intermediate_size": size, "shared_gate": True}


def in_some(config: dict[str, Any], num_layers: int, experts: ExpertsSpec) -> Experts:
    """Qwen: experts in every `decoder_sparse_step`-th layer not among `mlp_only_layers`."""
    dense = config.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise wrong("mlp_only_layers", "a list of layers", dense)
    step = positive(config, "decoder_sparse_step", default=1)
    sparse = [i not in dense and (i + 1) % step == 0 for i in range(num_layers)]
    return (experts if any(sparse) else None), sparse


def mixtral(config: dict[str, Any], num_layers: int) -> Experts:
    """Experts in every layer, as wide as `intermediate_size`; a softmax over the visited ones."""
    width = ("intermediate_size", 14336)
    return read_experts(config, 8, 2, width, normalize=True), [True] * num_layers


def gpt_oss(config: dict[str, Any], num_layers: int) -> Experts:
    """Experts as Mixtral has them, with biases."""
    width = ("intermediate_size", 2880)
    experts = read_experts(config, 128, 4, width, normalize=True, biased=True)
    return experts, [True] * num_layers


def lfm2_moe(config: dict[str, Any], num_layers: int) -> Experts:
    """A sigmoid for each; a bias may choose, and does not weigh. The first layers are dense."""
    experts = read_experts(
        *(config, 32, 4, ("moe_intermediate_size", 1792)),
        normalize=flag(config, "norm_topk_prob", default=True),
        scoring="sigmoid",
        corrected=flag(config, "use_expert_bias", default=True),
        scale=number(config, "routed_scaling_factor", default=1.0),
    )
    sparse = behind_dense(config, num_layers, "num_dense_layers", 2)
    return (experts if any(sparse) else None), sparse


def behind_dense(config: dict[str, Any], num_layers: int, key: str, default: int) -> list[bool]:
    """Which layers have experts: all behind the first so many, as `key` says."""
    dense = config.get(key, default)
    if isinstance(dense, bool) or not isinstance(dense, int) or not 0 <= dense <= num_layers:
        raise wrong(key, f"a number of layers up to {num_layers}", dense)
    return [i >= dense for i in range(num_layers)]


def granite_hybrid(config: dict[str, Any], num_layers: int) -> Experts:
    """Experts as wide as `intermediate_size`, beside a shared MLP; or none."""
    if not has_granite_experts(config):
        return no_experts(config, num_layers)
    experts = read_experts(
        *(config, 8, 2, ("intermediate_size", 11008)),
        normalize=True,
        shared=1,
        shared_intermediate_size=positive(config, "shared_intermediate_size", default=1024),
    )
    return experts, [True] * num_layers


def has_granite_experts(config: dict[str, Any]) -> bool:
    """Whether a Granite has experts beside its shared MLP: 0 of them are none."""
    return bool(config.get("num_local_experts", 8) != 0)
