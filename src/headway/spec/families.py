"""What sets a supported architecture apart from Llama: one row each, read by `read.py`.

A row says which keys its config has beyond Llama's, what they default to when they are missing
(checkpoints often leave out what transformers' own classes default to) and which layers look back
through a window.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from headway.core.errors import UnsupportedModelError
from headway.spec import deepseek, hybrid, moe
from headway.spec.altup import AltUpSpec
from headway.spec.model import LayerSpec
from headway.spec.parts import LatentSpec
from headway.spec.rope import FULL, WINDOW
from headway.spec.state import StateSpec
from headway.spec.values import flag, number, optional_number, positive, switches, wrong

Kinds = Callable[[dict[str, Any], int], list[str]]


def all_full(config: dict[str, Any], num_layers: int) -> list[str]:
    """Every layer sees everything."""
    return [FULL] * num_layers


def all_window(config: dict[str, Any], num_layers: int) -> list[str]:
    """Every layer has the window (Mistral, Phi-3)."""
    return [WINDOW] * num_layers


def every(period: int) -> Kinds:
    """One full layer after `period` - 1 with a window: Gemma 2's 2, Gemma 3's 6."""

    def kinds(config: dict[str, Any], num_layers: int) -> list[str]:
        step = positive(config, "sliding_window_pattern", default=period)
        return [WINDOW if (i + 1) % step else FULL for i in range(num_layers)]

    return kinds


def every_fifth_full(config: dict[str, Any], num_layers: int) -> list[str]:
    """Gemma 3n: a full layer after four with a window."""
    return [WINDOW if (i + 1) % 5 else FULL for i in range(num_layers)]


def alternating(config: dict[str, Any], num_layers: int) -> list[str]:
    """gpt-oss: a window in the first layer and every other one after it."""
    return [FULL if i % 2 else WINDOW for i in range(num_layers)]


def when_used(config: dict[str, Any], num_layers: int) -> list[str]:
    """Qwen: when `use_sliding_window`, the layers from `max_window_layers` on."""
    if not flag(config, "use_sliding_window"):
        return [FULL] * num_layers
    first = config.get("max_window_layers", 28)
    if isinstance(first, bool) or not isinstance(first, int) or first < 0:
        raise wrong("max_window_layers", "an integer from 0 on", first)
    return [FULL if i < first else WINDOW for i in range(num_layers)]


def odd_when_used(config: dict[str, Any], num_layers: int) -> list[str]:
    """Qwen2-MoE: when `use_sliding_window`, every other one of the first `max_window_layers`."""
    first = [kind == FULL for kind in when_used(config, num_layers)]
    used = flag(config, "use_sliding_window")
    return [WINDOW if used and first[i] and i % 2 == 0 else FULL for i in range(num_layers)]


def all_when_used(config: dict[str, Any], num_layers: int) -> list[str]:
    """Qwen3-MoE: when `use_sliding_window`, every layer."""
    return [WINDOW if flag(config, "use_sliding_window") else FULL] * num_layers


def all_rotate(config: dict[str, Any], num_layers: int) -> list[bool]:
    return [True] * num_layers


def three_of_four_rotate(config: dict[str, Any], num_layers: int) -> list[bool]:
    """SmolLM3: `no_rope_layers` holds a 1 for each layer with a rope; else all but every fourth."""
    given = switches(config, "no_rope_layers", num_layers)
    period = positive(config, "no_rope_layer_interval", default=4)
    return given or [(i + 1) % period != 0 for i in range(num_layers)]


def nope_when_used(config: dict[str, Any], num_layers: int) -> list[str]:
    """SmolLM3: when `use_sliding_window`, the layers without a rope."""
    used = flag(config, "use_sliding_window")
    rotates = three_of_four_rotate(config, num_layers)
    return [WINDOW if used and not rotate else FULL for rotate in rotates]


SWITCHED = (when_used, odd_when_used, all_when_used, nope_when_used)
"""Rules for layers that have no window, whatever `layer_types` says, unless the switch is on."""


def no_scales(config: dict[str, Any]) -> dict[str, float]:
    return {}


def gemma_scales(config: dict[str, Any]) -> dict[str, float]:
    """Embeddings times √hidden, queries by a width of their own, soft caps on scores and logits."""
    return {
        "embedding_scale": math.sqrt(positive(config, "hidden_size")),
        "attention_scale": number(config, "query_pre_attn_scalar", default=256) ** -0.5,
    }


def gemma2_scales(config: dict[str, Any]) -> dict[str, float]:
    return gemma_scales(config) | {
        "attention_softcap": optional_number(config, "attn_logit_softcapping", absent=50.0),
        "logits_softcap": optional_number(config, "final_logit_softcapping", absent=30.0),
    }


def gemma3_scales(config: dict[str, Any]) -> dict[str, float]:
    return gemma_scales(config) | {
        "attention_softcap": optional_number(config, "attn_logit_softcapping"),
        "logits_softcap": optional_number(config, "final_logit_softcapping"),
    }


def gemma3n_width(config: dict[str, Any]) -> dict[str, Any]:
    """The config with one `intermediate_size`, which it may give by layer."""
    widths = config.get("intermediate_size")
    if not isinstance(widths, list) or not widths:
        return config
    if any(each != widths[0] for each in widths):
        raise UnsupportedModelError(
            "intermediate_size is another one in each layer, which is not supported.",
            "Give a model whose layers are alike.",
        )
    return config | {"intermediate_size": widths[0]}


def gemma3n_scales(config: dict[str, Any]) -> dict[str, float]:
    """Embeddings times √hidden, scores as they are, a soft cap on logits."""
    return {
        "embedding_scale": math.sqrt(positive(config, "hidden_size")),
        "attention_scale": 1.0,
        "logits_softcap": optional_number(config, "final_logit_softcapping", absent=30.0),
    }


def altup_streams(config: dict[str, Any]) -> AltUpSpec:
    """The streams and the rows of each layer."""
    streams = positive(config, "altup_num_inputs", default=4)
    active = config.get("altup_active_idx", 0)
    if isinstance(active, bool) or not isinstance(active, int) or not 0 <= active < streams:
        raise wrong("altup_active_idx", f"an index below {streams}", active)
    return AltUpSpec(
        streams=streams,
        active=active,
        scaled=flag(config, "altup_correct_scale", default=True),
        per_layer_size=positive(config, "hidden_size_per_layer_input", default=256),
        per_layer_vocab=positive(config, "vocab_size_per_layer_input", default=262144),
        laurel_rank=positive(config, "laurel_rank", default=64),
    )


def shared_layers(
    config: dict[str, Any], kinds: list[str], plain: tuple[LayerSpec, ...]
) -> tuple[LayerSpec, ...]:
    """The layers, with whose keys and values they read, and how many neurons stay silent.

    Of 35 layers the last 15 read: those with a window those of layer 18, full ones those of 19.
    """
    count = len(plain)
    shared = config.get("num_kv_shared_layers", 15)
    if isinstance(shared, bool) or not isinstance(shared, int) or not 0 <= shared < count:
        raise wrong("num_kv_shared_layers", f"a number of layers below {count}", shared)
    owners = count - shared
    last = {kind: i for i, kind in enumerate(kinds[:owners])}
    if not set(kinds) <= last.keys():
        raise wrong("num_kv_shared_layers", "such that a layer of each kind is left", shared)
    silent = sparsities(config, count)
    return tuple(
        replace(layer, kv_from=last[kinds[i]] if i >= owners else None, sparsity=silent[i])
        for i, layer in enumerate(plain)
    )


def sparsities(config: dict[str, Any], count: int) -> list[float]:
    """The share of each layer's neurons that are silent: 0.95 in the first ten of more layers."""
    given = config.get("activation_sparsity_pattern")
    if given is None:
        given = [0.95 if i < 10 < count else 0.0 for i in range(count)]
    right = isinstance(given, list) and len(given) == count
    if not right or not all(type(each) in (int, float) and 0 <= each < 1 for each in given):
        raise wrong("activation_sparsity_pattern", f"{count} numbers of 0 to below 1", given)
    return [float(each) for each in given]


def granite_scales(config: dict[str, Any]) -> dict[str, float]:
    """Four multipliers in place of learned scales (muP)."""
    return {
        "embedding_scale": number(config, "embedding_multiplier", default=1.0),
        "attention_scale": number(config, "attention_multiplier", default=1.0),
        "residual_scale": number(config, "residual_multiplier", default=1.0),
        "logits_scale": 1.0 / number(config, "logits_scaling", default=1.0),
    }


def gpt_oss_gates(config: dict[str, Any]) -> dict[str, float]:
    """Gates and ups that are clamped, and the gain of the gate's sigmoid."""
    return {
        "swiglu_alpha": number(config, "swiglu_alpha", default=1.702),
        "swiglu_limit": number(config, "swiglu_limit", default=7.0),
    }


def no_altup(config: dict[str, Any]) -> AltUpSpec | None:
    return None


def as_they_are(
    config: dict[str, Any], kinds: list[str], layers: tuple[LayerSpec, ...]
) -> tuple[LayerSpec, ...]:
    return layers


def no_states(config: dict[str, Any]) -> StateSpec | None:
    return None


def no_latent(config: dict[str, Any]) -> LatentSpec | None:
    return None


MINISTRAL_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One row a supported architecture: where it differs from Llama."""

    qkv_bias: bool | None = None
    """True or False when it is fixed; None reads `attention_bias`, for all four projections."""
    qkv_bias_key: str = ""
    """The key that says so of a config, where there is one."""
    attention_bias: bool = False
    """What `attention_bias` is when it is missing."""
    rope: dict[str, Any] = field(default_factory=dict)
    """The rope's own keys, when none is given."""
    sink_logits: bool = False
    tied: bool = False
    theta: float = 10000.0
    local_theta: float | None = None
    window: int = 0
    kinds: Kinds = all_full
    rotates: Callable[[dict[str, Any], int], list[bool]] = all_rotate
    activation_key: str = "hidden_act"
    activations: tuple[str, ...] = ("silu",)
    qk_norm: Literal["none", "head", "row"] = "none"
    norms: int = 2
    norm_offset: float = 0.0
    norm_eps: float = 1e-6
    head_dim: int = 0
    scales: Callable[[dict[str, Any]], dict[str, float]] = no_scales
    experts: Callable[[dict[str, Any], int], moe.Experts] = moe.no_experts
    latent: Callable[[dict[str, Any]], LatentSpec | None] = no_latent
    altup: Callable[[dict[str, Any]], AltUpSpec | None] = no_altup
    layers: Callable[[dict[str, Any], list[str], tuple[LayerSpec, ...]], tuple[LayerSpec, ...]] = (
        as_they_are
    )
    v_norm: bool = False
    states: Callable[[dict[str, Any]], StateSpec | None] = no_states
    output_gate: bool = False
    scaled_windows: bool = True
    """Whether the rope of window layers is scaled as that of full ones."""
    query_scaling: bool = False
    """Whether queries grow with their position (`llama_4_scaling_beta`)."""
    translate: Callable[[dict[str, Any]], dict[str, Any]] = dict
    """The config with Llama's names for keys that have others."""


GEMMA = Family(
    tied=True,
    window=4096,
    activation_key="hidden_activation",
    activations=("gelu_tanh",),
    norms=4,
    norm_offset=1.0,
    head_dim=256,
    kinds=every(2),
    scales=gemma2_scales,
)
QWEN_HYBRID = Family(
    kinds=hybrid.every_fourth_full,
    qk_norm="head",
    norm_offset=1.0,
    head_dim=256,
    states=hybrid.delta,
    translate=hybrid.quarter_rope,
    output_gate=True,
)
LFM2 = Family(
    qkv_bias=False,
    tied=True,
    theta=1e6,
    kinds=hybrid.named_full,
    qk_norm="head",
    states=hybrid.short_convolution,
)
FAMILIES = {
    "LlamaForCausalLM": Family(),
    "MistralForCausalLM": Family(qkv_bias=False, window=4096, kinds=all_window),
    "MixtralForCausalLM": Family(
        qkv_bias=False, theta=1e6, kinds=all_window, norm_eps=1e-5, experts=moe.mixtral
    ),
    "Ministral3ForCausalLM": Family(
        qkv_bias=False,
        rope=MINISTRAL_ROPE,
        kinds=all_window,
        norm_eps=1e-5,
        head_dim=128,
        query_scaling=True,
    ),
    "Qwen2ForCausalLM": Family(qkv_bias=True, window=4096, kinds=when_used),
    "Qwen2MoeForCausalLM": Family(
        qkv_bias=True,
        qkv_bias_key="qkv_bias",
        window=4096,
        kinds=odd_when_used,
        experts=moe.qwen2_moe,
    ),
    "Qwen3ForCausalLM": Family(window=4096, kinds=when_used, qk_norm="head", head_dim=128),
    "Qwen3MoeForCausalLM": Family(
        window=4096, kinds=all_when_used, qk_norm="head", experts=moe.qwen3_moe
    ),
    "Gemma2ForCausalLM": GEMMA,
    "Gemma3ForCausalLM": Family(
        tied=True,
        theta=1e6,
        local_theta=10000.0,
        window=4096,
        kinds=every(6),
        activation_key="hidden_activation",
        activations=("gelu_tanh",),
        qk_norm="head",
        norms=4,
        norm_offset=1.0,
        head_dim=256,
        scales=gemma3_scales,
    ),
    "Gemma3nForCausalLM": Family(
        tied=True,
        theta=1e6,
        local_theta=10000.0,
        window=512,
        kinds=every_fifth_full,
        activation_key="hidden_activation",
        activations=("gelu_tanh",),
        qk_norm="head",
        v_norm=True,
        norms=4,
        head_dim=256,
        scales=gemma3n_scales,
        altup=altup_streams,
        layers=shared_layers,
        translate=gemma3n_width,
    ),
    "Phi3ForCausalLM": Family(qkv_bias=False, kinds=all_window, norm_eps=1e-5),
    "Olmo2ForCausalLM": Family(qk_norm="row", norm_eps=1e-5),
    "Olmo3ForCausalLM": Family(
        qk_norm="row",
        norm_eps=1e-5,
        theta=5e5,
        window=4096,
        kinds=every(4),
        scaled_windows=False,
    ),
    "GraniteForCausalLM": Family(scales=granite_scales),
    "GraniteMoeHybridForCausalLM": Family(
        kinds=hybrid.all_states,
        rotates=hybrid.rotate_when_named,
        scales=granite_scales,
        experts=moe.granite_hybrid,
        states=hybrid.mamba2,
        translate=hybrid.granite,
    ),
    "Qwen3NextForCausalLM": replace(QWEN_HYBRID, experts=moe.qwen3_next),
    "Qwen3_5ForCausalLM": QWEN_HYBRID,
    "Qwen3_5MoeForCausalLM": replace(
        QWEN_HYBRID, experts=moe.qwen35_moe, translate=hybrid.qwen35_moe
    ),
    "Lfm2ForCausalLM": replace(LFM2, translate=hybrid.lfm2),
    "Lfm2MoeForCausalLM": replace(LFM2, translate=hybrid.lfm2_moe, experts=moe.lfm2_moe),
    "SmolLM3ForCausalLM": Family(
        tied=True, theta=2e6, kinds=nope_when_used, rotates=three_of_four_rotate
    ),
    "DeepseekV2ForCausalLM": Family(
        latent=deepseek.latent, scales=deepseek.scales, experts=deepseek.v2_experts
    ),
    "DeepseekV3ForCausalLM": Family(
        latent=deepseek.latent, scales=deepseek.scales, experts=deepseek.v3_experts
    ),
    "GptOssForCausalLM": Family(
        attention_bias=True,
        theta=150000.0,
        rope=GPT_OSS_ROPE,
        window=128,
        kinds=alternating,
        norm_eps=1e-5,
        head_dim=64,
        sink_logits=True,
        scales=gpt_oss_gates,
        experts=moe.gpt_oss,
    ),
}
"""Architecture, as config.json names it → its row; the other half is `runtime.models.MODELS`."""


def layer_kinds(config: dict[str, Any], family: Family, num_layers: int) -> list[str]:
    """FULL or WINDOW for each layer: `layer_types` when the config has it, else the family's rule.

    A window that the family does not know is refused: full attention would give other tokens
    without a word.
    """
    given = config.get("layer_types")
    if given is None or (family.kinds in SWITCHED and not flag(config, "use_sliding_window")):
        given = family.kinds(config, num_layers)
    if not isinstance(given, list) or len(given) < num_layers:
        raise wrong("layer_types", f"a list of {num_layers} kinds of attention", given)
    known = (FULL,) if family.kinds is all_full else (FULL, WINDOW)
    if family.states is not no_states:
        known = (FULL, hybrid.STATE)
    for kind in given[:num_layers]:
        if kind not in known:
            raise UnsupportedModelError(
                f"A layer of kind {str(kind)[:40]!r} (layer_types) is not supported here.",
                f"Supported are: {', '.join(known)}.",
            )
    if family.kinds is all_full and flag(config, "use_sliding_window"):
        raise UnsupportedModelError(
            "A sliding window (use_sliding_window) is not part of this architecture.",
            "Set use_sliding_window to false if full attention is what you want.",
        )
    return given[:num_layers]


def window_size(config: dict[str, Any], family: Family) -> int:
    """Tokens a window layer sees; 0 when the config switches windows off with null."""
    if "sliding_window" not in config:
        return family.window
    off = family.kinds in SWITCHED and not flag(config, "use_sliding_window")
    if config["sliding_window"] is None or (off and config["sliding_window"] == 0):
        return 0
    return positive(config, "sliding_window")
