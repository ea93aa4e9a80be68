"""A decoder-only transformer in numbers, and what follows from them without torch or weights.

How many parameters and bytes, how many FLOPs a token costs, which KV groups there are and how
many bytes a token takes in each. Worked example, Llama-3.1-8B: 8,030,261,248 parameters;
2 · 32 layers · 8 heads · 128 dims · 2 bytes = 131,072 KV bytes a token.
"""

from dataclasses import dataclass
from typing import Literal

from headway.core.formats import Format
from headway.core.kv_format import kv_format

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """Rotary embedding: base `theta`, the `share` of each head it turns, and its scaling.

    `linear` divides positions by `factor`; `dynamic` stretches `theta` for the served context;
    `llama3` and `yarn` treat fast and slow frequencies apart, between the two limits that are
    named after them; `longrope` divides each frequency by a number of its own, of two lists the
    long one where the served context is beyond the original. `gain` multiplies cos and sin (YaRN's
    attention factor).
    """

    theta: float = 10000.0
    kind: RopeKind = "default"
    share: float = 1.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_len: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    gain: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """One layer: the tokens it sees back (0 is all), which of the ropes turns it, its MLP.

    A layer with a window may see the first `sinks` tokens besides. A layer without a rope (None)
    tells positions apart by the causal mask alone (NoPE).
    """

    window: int = 0
    sinks: int = 0
    rope: int | None = 0
    sparse: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsSpec:
    """A sparse MLP: `count` experts, of which a token visits `active`.

    `normalize` says that the weights of the visited ones are scaled to add up to 1; `biased`, that
    the router and each matrix of an expert have a bias.
    """

    count: int
    active: int
    intermediate_size: int
    normalize: bool
    biased: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class KVGroupSpec:
    """Layers that share one block table. `window` counts tokens and is 0 for kind `full`.

    Behind a window the first `sinks` tokens of a sequence are seen, too.
    """

    layers: tuple[int, ...]
    num_kv_heads: int
    head_dim: int
    window: int = 0
    sinks: int = 0
    riders: tuple["KVGroupSpec", ...] = ()
    """Groups of a drafter: K and V of the same tokens, in blocks of the same numbers."""
    state_bytes: int = 0
    """What a drafter keeps of the model's states for each token beside that."""
    kv_dtype: str = ""
    """Format of its keys and values where that is another than the cache's."""

    @property
    def kind(self) -> Literal["full", "window"]:
        return "window" if self.window else "full"

    def bytes_per_token(self, kv_dtype: str) -> int:
        """Layers · kv_heads · bytes of K and V of a head: 64 of bfloat16 are 256, of int8 136."""
        head = kv_format(self.kv_dtype or kv_dtype).bytes_per_token(self.head_dim)
        own = len(self.layers) * self.num_kv_heads * head
        own += self.state_bytes
        return own + sum(rider.bytes_per_token(kv_dtype) for rider in self.riders)

    def seen(self, context: int) -> int:
        """Tokens of a context that the next token reads here: all, or the window and the sinks."""
        return min(context, self.window + self.sinks) if self.window else context


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Dimensions of a decoder-only transformer; lengths in tokens, sizes in elements.

    `quantization` is the method by which the checkpoint is quantized, one of METHODS, GGUF or "";
    `formats` are those of layers that it holds rounded, by name, as in `Quantization`.
    The scales are 1 and the soft caps 0 where a family has none; `norm_offset` is what a norm
    adds to its weight, `norms` how many of hidden size a layer has. `sink_logits`: each query head
    has a learned logit that takes its share of the softmax and gives nothing. A `swiglu_limit`
    clamps gates and ups, and `swiglu_alpha` is the gain of the gate's sigmoid.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    max_len: int
    rms_norm_eps: float
    layers: tuple[LayerSpec, ...]
    ropes: tuple[RopeSpec, ...]
    tied: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    dtype: str
    quantization: str = ""
    formats: tuple[tuple[str, Format], ...] = ()
    experts: ExpertsSpec | None = None
    activation: Literal["silu", "gelu_tanh", "gelu"] = "silu"
    qk_norm: Literal["none", "head", "row"] = "none"
    norms: int = 2
    norm_offset: float = 0.0
    attention_scale: float
    attention_softcap: float = 0.0
    logits_softcap: float = 0.0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logits_scale: float = 1.0
    sink_logits: bool = False
    swiglu_limit: float = 0.0
    swiglu_alpha: float = 1.0
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def num_sparse(self) -> int:
        """How many layers have experts."""
        return sum(layer.sparse for layer in self.layers)

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    # ── parameters and bytes ────────────────────────────────────────────────────────────────

    @property
    def embedding_parameters(self) -> int:
        """Elements of the token embedding, vocab · hidden."""
        return self.vocab_size * self.hidden_size

    @property
    def attention_parameters(self) -> int:
        """Elements of one layer's four projections, with their biases."""
        hidden, q, kv = self.hidden_size, self.q_size, self.kv_size
        biases = (q + 2 * kv) * self.qkv_bias + hidden * self.o_bias
        return hidden * (q + 2 * kv) + q * hidden + biases

    @property
    def norm_parameters(self) -> int:
        """Elements of one layer's norms: on the stream, and on queries and keys; sink logits."""
        per_head = {"none": 0, "head": 2 * self.head_dim, "row": self.q_size + self.kv_size}
        sink_logits = self.num_heads * self.sink_logits
        return self.norms * self.hidden_size + per_head[self.qk_norm] + sink_logits

    @property
    def expert_parameters(self) -> int:
        """Elements of one expert of one layer; 0 for a dense model."""
        if self.experts is None:
            return 0
        hidden, inner = self.hidden_size, self.experts.intermediate_size
        return 3 * hidden * inner + (2 * inner + hidden) * self.experts.biased

    def mlp_parameters(self, sparse: bool, num_experts: int | None = None) -> int:
        """Elements of one layer's MLP; with experts the router's and `num_experts` of them."""
        if not sparse or self.experts is None:
            biases = (2 * self.intermediate_size + self.hidden_size) * self.mlp_bias
            return 3 * self.hidden_size * self.intermediate_size + biases
        held = self.experts.count if num_experts is None else num_experts
        router = (self.hidden_size + self.experts.biased) * self.experts.count
        return router + held * self.expert_parameters

    @property
    def num_parameters(self) -> int:
        """All elements; a tied head is counted once."""
        embeddings = self.embedding_parameters * (1 if self.tied else 2)
        layers = self.num_layers * (self.attention_parameters + self.norm_parameters)
        mlps = sum(self.mlp_parameters(layer.sparse) for layer in self.layers)
        return embeddings + layers + mlps + self.hidden_size

    @property
    def active_parameters(self) -> int:
        """Elements a single token multiplies: linear layers, its own experts, the head."""
        active = self.experts.active if self.experts else 0
        mlps = sum(self.mlp_parameters(layer.sparse, active) for layer in self.layers)
        return self.num_layers * self.attention_parameters + mlps + self.embedding_parameters

    def weight_bytes(self, dtype: str | None = None) -> int:
        """Bytes of the weights in `dtype` (the checkpoint's own when None)."""
        return self.num_parameters * DTYPE_BYTES[dtype or self.dtype]

    def step_weight_bytes(self, dtype: str | None = None, experts_read: int | None = None) -> int:
        """Bytes of weights a decode step reads: all but the embedding table, which is looked up.

        Of the experts only the `experts_read` that were hit, over all layers; all when None.
        """
        read = self.num_parameters - (0 if self.tied else self.embedding_parameters)
        if self.experts is not None and experts_read is not None:
            missed = self.num_sparse * self.experts.count - experts_read
            read -= missed * self.expert_parameters
        return read * DTYPE_BYTES[dtype or self.dtype]

    # ── FLOPs ───────────────────────────────────────────────────────────────────────────────

    def flops(self, num_tokens: int, context: int = 0, num_sampled: int | None = None) -> int:
        """FLOPs to advance `num_tokens` tokens that each see `context` tokens on average.

        2 a weight and token; the head only for `num_sampled` rows (all when None); attention
        costs 4 · seen · heads · head_dim a token and layer. The lookup costs nothing.
        """
        sampled = num_tokens if num_sampled is None else num_sampled
        head = 2 * sampled * self.embedding_parameters
        linear = 2 * num_tokens * (self.active_parameters - self.embedding_parameters)
        seen = sum(len(group.layers) * group.seen(context) for group in self.kv_groups)
        return linear + head + 4 * num_tokens * seen * self.q_size

    # ── KV ──────────────────────────────────────────────────────────────────────────────────

    @property
    def kv_groups(self) -> tuple[KVGroupSpec, ...]:
        """The KV groups, in the order of their first layers: one for each window and its sinks.

        Gemma 3 1B: layers 0 … 4, 6 … 10, … in a group of window 512, and 5, 11, … in a full one.
        """
        seen = [(layer.window, layer.sinks) for layer in self.layers]
        return tuple(
            KVGroupSpec(
                layers=tuple(i for i, sight in enumerate(seen) if sight == (window, sinks)),
                num_kv_heads=self.num_kv_heads,
                head_dim=self.head_dim,
                window=window,
                sinks=sinks,
            )
            for window, sinks in dict.fromkeys(seen)
        )

    def kv_bytes_per_token(self, kv_dtype: str | None = None) -> int:
        """KV bytes one token takes over all groups, while all of them hold it."""
        return sum(group.bytes_per_token(kv_dtype or self.dtype) for group in self.kv_groups)
