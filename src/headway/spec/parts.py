"""Parts of a transformer in numbers: ropes, experts, latent attention."""

from dataclasses import dataclass
from typing import Literal

RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """Rotary embedding: base `theta`, the `share` of each head it turns, and its scaling.

    `linear` divides positions by `factor`; `dynamic` stretches `theta` for lengths beyond the
    original; `llama3` and `yarn` treat fast and slow frequencies apart, between the two limits that
    are named after them; `longrope` divides each frequency by a number of its own, of two lists the
    long one for lengths beyond the original. `gain` multiplies cos and sin (YaRN's attention
    factor). The rope of queries that grow with their position p also multiplies them by
    1 + query_beta · ln(1 + ⌊p / original_max_len⌋) (Ministral 3).
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
    query_beta: float = 0.0

    @property
    def depends_on_length(self) -> bool:
        """Whether the frequencies of a request follow from its lengths."""
        return self.kind == "dynamic" or self.short_factors != self.long_factors

    def scaled_len(self, num_prompt: int, longest: int) -> int:
        """The length in tokens that a request's frequencies are scaled for; 0: not scaled.

        `num_prompt` are the tokens of its prompt, `longest` those of prompt and answer at most, of
        which the last is never computed. LongRoPE has one list for all that stay within the
        original length and one for all beyond; dynamic NTK scales for each prompt's own length, as
        transformers computes both.
        """
        if self.kind == "longrope":
            return self.original_max_len + 1 if longest - 1 > self.original_max_len else 0
        return num_prompt if num_prompt > self.original_max_len else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsSpec:
    """A sparse MLP: `count` experts, of which a token visits `active`.

    `normalize` says that the weights of the visited ones are scaled to add up to 1; `biased`, that
    the router and each matrix of an expert have a bias; `exact_router`, that it multiplies in fp32.
    Weights are a softmax over all experts or a sigmoid of each, times `scale`. Where there are
    `groups`, a token visits the best `active_groups` of them. `corrected`: a learned number of each
    expert is added where experts and groups are chosen, and not to their weights. Every token
    visits `shared` more experts, which are one wide MLP.
    """

    count: int
    active: int
    intermediate_size: int
    normalize: bool
    biased: bool = False
    exact_router: bool = False
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    corrected: bool = False
    groups: int = 1
    active_groups: int = 1
    scale: float = 1.0
    shared: int = 0
    shared_intermediate_size: int = 0
    shared_gate: bool = False

    @property
    def shared_size(self) -> int:
        """The width of the shared experts' MLP."""
        return self.shared * (self.shared_intermediate_size or self.intermediate_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentSpec:
    """Latent attention (MLA): the keys and values of all heads come out of one row of `rank`.

    A head's key has `nope_dim` numbers out of that row and `rope_dim` rotated ones that all heads
    share, its value `value_dim` numbers. Queries come out of a row of `q_rank`, or with 0 out of
    the hidden states. Numbers that rotate together lie side by side where they are `interleaved`.
    """

    rank: int
    rope_dim: int
    nope_dim: int
    value_dim: int
    q_rank: int = 0
    interleaved: bool = True

    @property
    def key_dim(self) -> int:
        """What a token keeps in a layer, its value being a part of it: DeepSeek's 512 + 64."""
        return self.rank + self.rope_dim
