"""Divergence of a model's token distributions from a reference model's on the same text.

Both models must have the same tokenizer. For two folders all probabilities are available and the
figures are exact. A URL returns only the 20 most likely tokens: all tokens that are not in both
lists are merged into one, whose KL is never above the exact one (data-processing inequality). For
example, if both servers return only a and b:

    reference  a 0.5   b 0.3   the rest 0.2      KL = 0.5 ln(0.5 / 0.4) + 0.3 ln(0.3 / 0.3)
    model      a 0.4   b 0.3   the rest 0.3           + 0.2 ln(0.2 / 0.3) = 0.0305 nats
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeGuard

import numpy as np

from headway.core.errors import UsageError
from headway.core.scoring import Score, ScoringModel, WholeModel
from headway.evals.text import (
    BATCH,
    Advance,
    TextWindow,
    nats,
    no_progress,
    num_shared,
    score_targets,
)

NUM_ALTERNATIVES = 20
"""Alternatives per position that a server returns: the limit of Headway, vLLM and OpenAI."""
EXACT, APPROXIMATE = "exact", f"top-{NUM_ALTERNATIVES} lower bound"
MIN_REST = 1e-9
"""Lower bound of the merged rest: rounded probabilities may sum to more than 1."""
REPLACEMENT = "\ufffd"

Alternatives = Mapping[str | int, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class PassageDivergence:
    """Sums over the `num_tokens` positions of one window. `overlap` is None if it is unknown.

    `kl` is KL(reference ‖ model) in nats, `agreed` counts positions with the same most likely
    token, `overlap` sums Σ min(p, q), the share of draft tokens that speculative sampling accepts.
    """

    num_tokens: int
    kl: float
    agreed: int
    overlap: float | None
    reference_nats: float
    nats: float

    @property
    def differed(self) -> int:
        """Number of positions with different most likely tokens."""
        return self.num_tokens - self.agreed


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """All windows in order; `method` says whether the figures are exact."""

    name: str
    reference: str
    method: str
    passages: list[PassageDivergence]

    @property
    def num_tokens(self) -> int:
        return sum(each.num_tokens for each in self.passages)

    @property
    def kl(self) -> float:
        """KL in nats per token."""
        return sum(each.kl for each in self.passages) / self.num_tokens

    @property
    def agreement(self) -> float:
        """Share of positions with the same most likely token."""
        return sum(each.agreed for each in self.passages) / self.num_tokens

    @property
    def overlap(self) -> float | None:
        """Mean of Σ min(p, q); None over a URL."""
        known = [each.overlap for each in self.passages if each.overlap is not None]
        return sum(known) / self.num_tokens if len(known) == len(self.passages) else None

    @property
    def reference_perplexity(self) -> float:
        """e^(nats per token) under the reference."""
        return math.exp(sum(each.reference_nats for each in self.passages) / self.num_tokens)

    @property
    def perplexity_ratio(self) -> float:
        """Perplexity of the model over that of the reference: 1.02 is 2% worse."""
        more = sum(each.nats - each.reference_nats for each in self.passages)
        return math.exp(more / self.num_tokens)


def compare(
    reference: ScoringModel,
    model: ScoringModel,
    windows: Sequence[TextWindow],
    *,
    name: str = "",
    approximate: bool = False,
    advance: Advance = no_progress,
) -> Divergence:
    """Compare `model` with `reference` on the targets of `windows`.

    With `approximate`, only the most likely tokens are used even if all probabilities are
    available. Raises UsageError if the two models tokenize the text differently.
    """
    if not windows:
        raise UsageError("There is no text to compare on.", "Give a longer text.")
    passages = []
    if is_whole(reference) and is_whole(model) and not approximate:
        for window in windows:
            passages.append(compare_exactly(reference, model, window))
            advance()
        return Divergence(
            name=name or model.name, reference=reference.name, method=EXACT, passages=passages
        )
    for at in range(0, len(windows), BATCH):
        batch = windows[at : at + BATCH]
        first, second = (
            score_targets(each, batch, top=NUM_ALTERNATIVES) for each in (reference, model)
        )
        for a, b in zip(first, second, strict=True):
            passages.append(compare_likeliest(a, b))
            advance()
    return Divergence(
        name=name or model.name, reference=reference.name, method=APPROXIMATE, passages=passages
    )


def is_whole(model: ScoringModel) -> TypeGuard[WholeModel]:
    """Whether the model returns all probabilities."""
    return hasattr(model, "distributions")


def compare_exactly(
    reference: WholeModel, model: WholeModel, window: TextWindow
) -> PassageDivergence:
    """Compare both models' distributions before each token of the target."""
    text = window.context + window.target
    ids = reference.encode(text)
    if ids != model.encode(text):
        raise tokenizer_mismatch()
    begin = num_shared(reference.encode(window.context), ids)
    return compare_tokens(reference, model, ids, begin)


def compare_tokens(
    reference: WholeModel, model: WholeModel, token_ids: list[int], begin: int
) -> PassageDivergence:
    """Compare on tokens from position `begin` on; the first token has no distribution before it."""
    begin = max(begin, 1)
    p_TV, q_TV = (each.distributions(token_ids)[begin - 1 : -1] for each in (reference, model))
    if p_TV.shape != q_TV.shape:
        cause = f"The models have {p_TV.shape[1]} and {q_TV.shape[1]} tokens."
        raise UsageError(cause, "Compare models with one tokenizer.")
    kl_T, agreed_T, overlap_T = compare_rows(p_TV, q_TV)
    places, following = np.arange(len(p_TV)), np.array(token_ids[begin:])
    return PassageDivergence(
        num_tokens=len(p_TV),
        kl=float(kl_T.sum()),
        agreed=int(agreed_T.sum()),
        overlap=float(overlap_T.sum()),
        reference_nats=-float(p_TV[places, following].sum(dtype=np.float64)),
        nats=-float(q_TV[places, following].sum(dtype=np.float64)),
    )


def compare_rows(p_TV: np.ndarray, q_TV: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return KL(p ‖ q), equality of the most likely token, and Σ min(p, q), for each row.

    >>> p, q = np.log([[0.5, 0.3, 0.2]]), np.log([[0.4, 0.3, 0.3]])
    >>> [round(float(x[0]), 4) for x in compare_rows(p, q)]
    [0.0305, 1.0, 0.9]
    """
    p = np.exp(p_TV, dtype=np.float64)
    kl = p * (p_TV.astype(np.float64) - q_TV)
    overlap = np.minimum(p, np.exp(q_TV, dtype=np.float64))
    return kl.sum(-1), p_TV.argmax(-1) == q_TV.argmax(-1), overlap.sum(-1)


def compare_likeliest(reference: Score, model: Score) -> PassageDivergence:
    """Return the lower bound from the alternatives that both models return."""
    if len(reference.logprobs) != len(model.logprobs) or (
        reference.token_ids and model.token_ids and reference.token_ids != model.token_ids
    ):
        raise tokenizer_mismatch()
    kinds = {type(key) for score in (reference, model) for top in score.top[:1] for key in top}
    if len(kinds) > 1:
        raise UsageError(
            "One of the models tells token ids and the other texts.",
            "Compare two folders or two URLs.",
        )
    pairs = [(a, b) for a, b in zip(reference.top, model.top, strict=True) if a and b]
    return PassageDivergence(
        num_tokens=len(pairs),
        kl=sum(merged_kl(a, b) for a, b in pairs),
        agreed=sum(likeliest(a) == likeliest(b) for a, b in pairs),
        overlap=None,
        reference_nats=nats(reference),
        nats=nats(model),
    )


def likeliest(top: Alternatives) -> str | int:
    return max(top, key=lambda key: top[key])


def merged_kl(p: Alternatives, q: Alternatives) -> float:
    """Return KL(p ‖ q) with all tokens that are not in both merged into one.

    Texts with a partial character are merged as well: two different tokens may have the same text.
    """
    shared = [key for key in p if key in q and not (isinstance(key, str) and REPLACEMENT in key)]
    total = sum(math.exp(p[key]) * (p[key] - q[key]) for key in shared)
    rest_p, rest_q = (max(MIN_REST, 1 - sum(math.exp(x[key]) for key in shared)) for x in (p, q))
    return total + rest_p * math.log(rest_p / rest_q)


def tokenizer_mismatch() -> UsageError:
    return UsageError(
        "The two models cut the text into different tokens.",
        "Compare models with one tokenizer; bits per byte compares any two.",
    )
