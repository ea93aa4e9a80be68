"""A decoder-only transformer in numbers, and what follows from them without torch or weights.

How many parameters and bytes, how many FLOPs a token costs, which KV groups there are and how
many bytes a token takes in each. Worked example, Llama-3.1-8B: 8,030,261,248 parameters;
2 · 32 layers · 8 heads · 128 dims · 2 bytes = 131,072 KV bytes a token.
"""

from dataclasses import dataclass, replace
from math import ceil
from typing import Literal

from headway.spec.altup import AltUpSpec
from headway.spec.formats import Format
from headway.spec.kv_format import kv_format
from headway.spec.parts import ExpertsSpec, LatentSpec, RopeSpec
from headway.spec.state import StateSpec

BOUND_BYTES = 2
"""Of a number that bounds keys: bfloat16."""
DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
STATE_WINDOW = 2
"""What a token sees of a state group: itself and the token before, which left the state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """One layer: the tokens it sees back (0 is all), which of the ropes turns it, its MLP.

    A layer with a window may see the first `sinks` tokens besides. A layer without a rope (None)
    tells positions apart by the causal mask alone (NoPE). `query_rope` turns its queries where that
    is another than its keys'. `kv_dtype` is the format of its keys and
    values where that is another than the cache's. With `kv_from` it has none, and reads those of
    that earlier layer, which sees as much. `sparsity` is the share of neurons that are silent,
    those whose gates are least. `whole` says that it reads everything, whatever others may leave
    unread. With `bounds` it keeps of each block of so many tokens the least and the greatest number
    of its keys, by channel, so that a row can choose the blocks that it reads. One that `chooses`
    keeps of a computed prompt some tokens alone. With `state` it does not attend, and keeps a
    state.
    """

    window: int = 0
    sinks: int = 0
    kv_dtype: str = ""
    rope: int | None = 0
    query_rope: int | None = None
    sparse: bool = False
    kv_from: int | None = None
    sparsity: float = 0.0
    whole: bool = False
    bounds: int = 0
    chooses: bool = False
    state: bool = False


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
    is_open: bool = False
    """Whether it holds the blocks of the other groups that are not rounded yet."""
    num_readers: int = 0
    """Further layers that read what these keep."""
    value_dim: int = 0
    """Where it is not 0, a value is so many first numbers of its key, and takes no memory."""
    bounds: int = 0
    """Where it is not 0, each block of so many tokens keeps two numbers for each channel of K."""
    chooses: bool = False
    """Whether a computed prompt shrinks to the tokens that its layers choose to keep."""
    states: StateSpec | None = None
    """Where it is not None, a block holds no tokens, but the state behind the last one in it."""
    rank: int = 0
    ranks: int = 1
    """The rank whose part this is, where a context lies on several: `spec.context_shards`."""

    @property
    def kind(self) -> Literal["full", "window", "open", "state"]:
        if self.is_open:
            return "open"
        if self.states is not None:
            return "state"
        return "window" if self.window else "full"

    def bytes_per_token(self, kv_dtype: str) -> int:
        """Layers · kv_heads · bytes of K and V of a head: 64 of bfloat16 are 256, of int8 136.

        None for states, which take as much however many tokens there are.
        """
        if self.states is not None:
            return 0
        format = kv_format(self.kv_dtype or kv_dtype)
        head = format.bytes_per_token(self.head_dim)
        if self.value_dim:
            head = ceil(format.k.bytes_per_token(self.head_dim))
        if self.bounds:
            head += ceil(2 * BOUND_BYTES * self.head_dim / self.bounds)
        own = len(self.layers) * self.num_kv_heads * head
        own += self.state_bytes
        return own + sum(rider.bytes_per_token(kv_dtype) for rider in self.riders)

    @property
    def slot_bytes(self) -> int:
        """What a sequence takes beside its tokens: its states; 0 for keys and values."""
        return len(self.layers) * self.states.num_bytes if self.states else 0

    def block_bytes(self, kv_dtype: str, block_size: int) -> int:
        """What a block takes: so many tokens, or a state."""
        return self.slot_bytes or self.bytes_per_token(kv_dtype) * block_size

    def bytes_read_per_token(
        self, kv_dtype: str, share: float = 1.0, kept_share: float = 1.0
    ) -> float:
        """What a step reads of a token: as often as there are layers that do.

        Of keys that have bounds a decode reads a `share`, and all of the bounds; of layers that
        choose, the `kept_share`.
        """
        times, held = 1 + self.num_readers / len(self.layers), self.bytes_per_token(kv_dtype)
        times *= kept_share if self.chooses else 1
        keys = replace(self, bounds=0).bytes_per_token(kv_dtype) if self.bounds else held
        return (keys * (share if self.bounds else 1) + held - keys) * times

    def attended_tokens(self, context: int) -> int:
        """Tokens of a context that the next token reads here: all, or the window and the sinks."""
        return min(context, self.window + self.sinks) if self.window else context


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Dimensions of a decoder-only transformer; lengths in tokens, sizes in elements.

    `quantization` is the method by which the checkpoint is quantized, one of METHODS, GGUF or "";
    `formats` are those of layers that it holds rounded, by name, as in `Quantization`; with the
    path of a `profile` they are those that its plain weights are rounded to as they are read.
    The scales are 1 and the soft caps 0 where a family has none; `norm_offset` is what a norm
    adds to its weight, `norms` how many of hidden size a layer has. `sink_logits`: each query head
    has a learned logit that takes its share of the softmax and gives nothing. A `swiglu_limit`
    clamps gates and ups, and `swiglu_alpha` is the gain of the gate's sigmoid. With `latent`
    attention `head_dim` is that of a query, and there is one KV head, the latent row. `v_norm`:
    the values of a head are normed, without a weight. `states` are the numbers of layers that keep
    some. With an `output_gate` what attention gives is multiplied by a sigmoid of as many numbers.
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
    profile: str = ""
    experts: ExpertsSpec | None = None
    latent: LatentSpec | None = None
    altup: AltUpSpec | None = None
    states: StateSpec | None = None
    output_gate: bool = False
    v_norm: bool = False
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
    def num_states(self) -> int:
        """How many layers keep a state."""
        return sum(layer.state for layer in self.layers)

    @property
    def num_attention(self) -> int:
        """How many layers attend."""
        return self.num_layers - self.num_states

    @property
    def length_rope(self) -> RopeSpec | None:
        """The rope whose frequencies follow from a request's lengths; all that do change alike."""
        return next((rope for rope in self.ropes if rope.depends_on_length), None)

    @property
    def default_len(self) -> int:
        """The context in tokens that is served by default.

        With LongRoPE the original one: a longer one costs requests without max_tokens, which may
        reach all of it, the factors for short sequences.
        """
        rope = self.length_rope
        if rope is not None and rope.kind == "longrope":
            return min(self.max_len, rope.original_max_len)
        return self.max_len

    @property
    def rope_dim(self) -> int:
        """Numbers of a head that a rope is given, of which it turns its share."""
        return self.latent.rope_dim if self.latent else self.head_dim

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def q_rows(self) -> int:
        """Outputs of a layer's matrix of queries, which the output gate's are among."""
        return self.q_size * (1 + self.output_gate)

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    # ── parameters and bytes ────────────────────────────────────────────────────────────────

    @property
    def embedding_parameters(self) -> int:
        """Elements of the token embedding, vocab · hidden."""
        return self.vocab_size * self.hidden_size

    @property
    def attention_matrices(self) -> list[tuple[str, list[int], int]]:
        """(name, outputs of its parts, inputs) of each linear layer of one layer's attention."""
        hidden, q, kv, latent = self.hidden_size, self.q_size, self.kv_size, self.latent
        if latent is None:
            return [("qkv", [self.q_rows, kv, kv], hidden), ("out", [hidden], q)]
        queries = [("q", [q], hidden)]
        if latent.q_rank:
            queries = [("q_down", [latent.q_rank], hidden), ("q_up", [q], latent.q_rank)]
        values = self.num_heads * latent.value_dim
        return [
            *queries,
            ("kv_down", [latent.key_dim], hidden),
            ("kv_up", [self.num_heads * latent.nope_dim + values], latent.rank),
            ("out", [hidden], values),
        ]

    @property
    def attention_parameters(self) -> int:
        """Elements of one layer's linear layers of attention, with their biases."""
        biases = (self.q_rows + 2 * self.kv_size) * self.qkv_bias
        if self.latent is not None:
            biases = (self.latent.q_rank + self.latent.key_dim) * self.qkv_bias
        matrices = sum(sum(parts) * inputs for _, parts, inputs in self.attention_matrices)
        return matrices + biases + self.hidden_size * self.o_bias

    @property
    def norm_parameters(self) -> int:
        """Elements beside matrices of one layer's attention: norms of queries and keys, sinks."""
        per_head = {"none": 0, "head": 2 * self.head_dim, "row": self.q_size + self.kv_size}
        more = self.num_heads * self.sink_logits
        more += self.latent.q_rank + self.latent.rank if self.latent else 0
        return per_head[self.qk_norm] + more

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
            return self.gated_parameters(self.intermediate_size)
        held = self.experts.count if num_experts is None else num_experts
        each = self.hidden_size + self.experts.biased + self.experts.corrected
        shared = self.gated_parameters(self.experts.shared_size)
        shared += self.hidden_size * self.experts.shared_gate
        return each * self.experts.count + held * self.expert_parameters + shared

    def gated_parameters(self, inner: int) -> int:
        """Elements of a gated MLP of this width."""
        biases = (2 * inner + self.hidden_size) * self.mlp_bias if inner else 0
        return 3 * self.hidden_size * inner + biases

    @property
    def num_parameters(self) -> int:
        """All elements; a tied head is counted once."""
        embeddings = self.embedding_parameters * (1 if self.tied else 2)
        layers = self.num_attention * (self.attention_parameters + self.norm_parameters)
        layers += self.num_layers * self.norms * self.hidden_size
        if self.states is not None:
            layers += self.num_states * self.states.parameters(self.hidden_size)
        mlps = sum(self.mlp_parameters(layer.sparse) for layer in self.layers)
        other = self.side_parameters + self.table_parameters
        return embeddings + layers + mlps + self.hidden_size + other - self.shared_parameters

    @property
    def shared_parameters(self) -> int:
        """Elements that layers do not have because they read the keys and values of others."""
        norm = self.head_dim if self.qk_norm == "head" else 0
        each = 2 * self.kv_size * (self.hidden_size + self.qkv_bias) + norm
        return each * sum(layer.kv_from is not None for layer in self.layers)

    @property
    def side_parameters(self) -> int:
        """Elements of AltUp, but for its table: of all layers, and around them."""
        if self.altup is None:
            return 0
        layers = self.num_layers * self.altup.layer_parameters(self.hidden_size)
        return layers + self.altup.model_parameters(self.hidden_size, self.num_layers)

    @property
    def table_parameters(self) -> int:
        """Elements of the table in which tokens look up a row for each layer."""
        return self.altup.table_parameters(self.num_layers) if self.altup else 0

    @property
    def active_parameters(self) -> int:
        """Elements a single token multiplies: linear layers, its own experts, the head."""
        active = self.experts.active if self.experts else 0
        mlps = sum(self.mlp_parameters(layer.sparse, active) for layer in self.layers)
        layers = self.num_attention * self.attention_parameters - self.shared_parameters
        if self.states is not None:
            layers += self.num_states * self.states.matrix_parameters(self.hidden_size)
        return layers + mlps + self.embedding_parameters + self.side_parameters

    def weight_bytes(self, dtype: str | None = None) -> int:
        """Bytes of the weights in `dtype` (the checkpoint's own when None)."""
        return self.num_parameters * DTYPE_BYTES[dtype or self.dtype]

    def step_weight_bytes(self, dtype: str | None = None, experts_read: int | None = None) -> int:
        """Bytes of weights a decode step reads: all but the embedding table, which is looked up.

        Of the experts only the `experts_read` that were hit, over all layers; all when None.
        """
        read = self.num_parameters - (0 if self.tied else self.embedding_parameters)
        read -= self.table_parameters
        if self.experts is not None and experts_read is not None:
            missed = self.num_sparse * self.experts.count - experts_read
            read -= missed * self.expert_parameters
        return read * DTYPE_BYTES[dtype or self.dtype]

    # ── FLOPs ───────────────────────────────────────────────────────────────────────────────

    def flops(self, num_tokens: int, context: int = 0, num_sampled: int | None = None) -> int:
        """FLOPs to advance `num_tokens` tokens that each see `context` tokens on average.

        2 a weight and token; the head only for `num_sampled` rows (all when None); attention
        costs `attended_flops` · seen a token and layer. The lookup costs nothing.
        """
        sampled = num_tokens if num_sampled is None else num_sampled
        head = 2 * sampled * self.embedding_parameters
        linear = 2 * num_tokens * (self.active_parameters - self.embedding_parameters)
        attended = sum(
            (len(group.layers) + group.num_readers) * group.attended_tokens(context)
            for group in self.kv_groups
            if group.states is None
        )
        states = self.num_states * self.states.flops if self.states else 0
        return linear + head + num_tokens * (attended * self.attended_flops + states)

    @property
    def attended_flops(self) -> int:
        """FLOPs of one token in one layer for each token that it sees: 4 · heads · head_dim.

        Of latent attention a head's score takes the whole row and its sum the row's first part:
        2 · heads · (576 + 512) for DeepSeek.
        """
        if self.latent is not None:
            return 2 * self.num_heads * (self.latent.key_dim + self.latent.rank)
        return 4 * self.q_size

    # ── KV ──────────────────────────────────────────────────────────────────────────────────

    @property
    def kv_groups(self) -> tuple[KVGroupSpec, ...]:
        """The KV groups, in the order of their first layers: one for each window, sinks, format,
        bounds, and whether it chooses.

        Gemma 3 1B: layers 0 … 4, 6 … 10, … in a group of window 512, and 5, 11, … in a full one.
        Layers that keep a state are the last group.
        """
        owners = {
            i: (layer.window, layer.sinks, layer.kv_dtype, layer.bounds, layer.chooses)
            for i, layer in enumerate(self.layers)
            if layer.kv_from is None and not layer.state
        }
        read = [owners[layer.kv_from] for layer in self.layers if layer.kv_from is not None]
        groups = [
            KVGroupSpec(
                layers=tuple(i for i, each in owners.items() if each == kind),
                num_readers=read.count(kind),
                num_kv_heads=self.num_kv_heads,
                head_dim=self.latent.key_dim if self.latent else self.head_dim,
                window=kind[0],
                sinks=kind[1],
                value_dim=self.latent.rank if self.latent else 0,
                kv_dtype=kind[2],
                bounds=kind[3],
                chooses=kind[4],
            )
            for kind in dict.fromkeys(owners.values())
        ]
        if self.states is not None:
            state_layers = tuple(i for i, layer in enumerate(self.layers) if layer.state)
            states = KVGroupSpec(
                layers=state_layers,
                num_kv_heads=self.states.heads,
                head_dim=self.states.value_dim,
                window=STATE_WINDOW,
                states=self.states,
            )
            groups.append(states)
        return tuple(groups)

    @property
    def slot_bytes(self) -> int:
        """What a sequence takes beside its tokens, in all layers."""
        return sum(group.slot_bytes for group in self.kv_groups)

    def kv_bytes_per_token(self, kv_dtype: str | None = None) -> int:
        """KV bytes one token takes over all groups, while all of them hold it."""
        return sum(group.bytes_per_token(kv_dtype or self.dtype) for group in self.kv_groups)
