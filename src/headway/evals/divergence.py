"""How far a model's expectations are from a reference model's on the same text.

It is given two models with one tokenizer and windows of text, and compares what both expect at
every position of the targets. For two folders every probability is at hand and the figures are
exact. Over a URL only the 20 likeliest are told: all tokens that are not in both lists are then
taken as one, whose divergence is never more than the true one (data-processing inequality). Worked
example, where only a and b are told by both:

    reference  a 0.5   b 0.3   the rest 0.2      KL = 0.5 ln(0.5 / 0.4) + 0.3 ln(0.3 / 0.3)
    model      a 0.4   b 0.3   the rest 0.3           + 0.2 ln(0.2 / 0.3) = 0.0305 nats
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeGuard

import numpy as np

from headway.core.errors import UsageError
from headway.core.scoring import Model, Score, WholeModel
from headway.evals.text import (
    BATCH,
    Advance,
    Window,
    nats,
    num_shared,
    quietly,
    score_targets,
)

TOP = 20
"""How many alternatives a server tells: ours, vLLM's and OpenAI's limit."""
EXACT, APPROXIMATE = "exact", f"top-{TOP} lower bound"
LEAST = 1e-9
"""Probabilities of the rest are not taken below this: sums of rounded numbers pass one."""
REPLACEMENT = "\ufffd"

Alternatives = Mapping[str | int, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One window: sums over its `num_tokens` positions. `overlap` is None where it is not known.

    `kl` is KL(reference ‖ model) in nats, `agreed` counts positions with the same likeliest token,
    `overlap` sums Σ min(p, q), the share of drafted tokens that speculative sampling accepts.
    """

    num_tokens: int
    kl: float
    agreed: int
    overlap: float | None
    reference_nats: float
    nats: float

    @property
    def differed(self) -> int:
        """Positions whose likeliest token is another."""
        return self.num_tokens - self.agreed


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """All windows, in their order; `method` says whether the figures are exact."""

    name: str
    reference: str
    method: str
    passages: list[Compared]

    @property
    def num_tokens(self) -> int:
        return sum(each.num_tokens for each in self.passages)

    @property
    def kl(self) -> float:
        """Nats a token."""
        return sum(each.kl for each in self.passages) / self.num_tokens

    @property
    def agreement(self) -> float:
        """Share of positions where both have the same likeliest token."""
        return sum(each.agreed for each in self.passages) / self.num_tokens

    @property
    def overlap(self) -> float | None:
        """Mean of Σ min(p, q); None over a URL."""
        known = [each.overlap for each in self.passages if each.overlap is not None]
        return sum(known) / self.num_tokens if len(known) == len(self.passages) else None

    @property
    def reference_perplexity(self) -> float:
        """e^(nats a token) by the reference."""
        return math.exp(sum(each.reference_nats for each in self.passages) / self.num_tokens)

    @property
    def perplexity_ratio(self) -> float:
        """Perplexity of the model over the reference's: 1.02 is 2% worse."""
        more = sum(each.nats - each.reference_nats for each in self.passages)
        return math.exp(more / self.num_tokens)


def compare(
    reference: Model,
    model: Model,
    windows: Sequence[Window],
    *,
    name: str = "",
    approximate: bool = False,
    advance: Advance = quietly,
) -> Divergence:
    """What `model` lost against `reference` on the targets of `windows`.

    Raises UsageError when the two do not cut the text into the same tokens. `approximate` uses the
    likeliest tokens alone although everything is known.
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
        first, second = (score_targets(each, batch, top=TOP) for each in (reference, model))
        for a, b in zip(first, second, strict=True):
            passages.append(compare_likeliest(a, b))
            advance()
    return Divergence(
        name=name or model.name, reference=reference.name, method=APPROXIMATE, passages=passages
    )


def is_whole(model: Model) -> TypeGuard[WholeModel]:
    """Whether every probability is at hand."""
    return hasattr(model, "distributions")


def compare_exactly(reference: WholeModel, model: WholeModel, window: Window) -> Compared:
    """Both models' distributions before each token of the target."""
    text = window.context + window.target
    ids = reference.encode(text)
    if ids != model.encode(text):
        raise other_tokens()
    begin = num_shared(reference.encode(window.context), ids)
    return compare_tokens(reference, model, ids, begin)


def compare_tokens(
    reference: WholeModel, model: WholeModel, token_ids: list[int], begin: int
) -> Compared:
    """The same on tokens: those from place `begin` on are judged; the very first never is."""
    begin = max(begin, 1)
    p_TV, q_TV = (each.distributions(token_ids)[begin - 1 : -1] for each in (reference, model))
    if p_TV.shape != q_TV.shape:
        raise UsageError(
            f"The models have {p_TV.shape[1]} and {q_TV.shape[1]} tokens.",
            "Compare models with one tokenizer.",
        )
    kl_T, agreed_T, overlap_T = compare_rows(p_TV, q_TV)
    places, following = np.arange(len(p_TV)), np.array(token_ids[begin:])
    return Compared(
        num_tokens=len(p_TV),
        kl=float(kl_T.sum()),
        agreed=int(agreed_T.sum()),
        overlap=float(overlap_T.sum()),
        reference_nats=-float(p_TV[places, following].sum(dtype=np.float64)),
        nats=-float(q_TV[places, following].sum(dtype=np.float64)),
    )


def compare_rows(p_TV: np.ndarray, q_TV: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """KL(p ‖ q), whether the likeliest token is the same, and Σ min(p, q), of each row.

    >>> p, q = np.log([[0.5, 0.3, 0.2]]), np.log([[0.4, 0.3, 0.3]])
    >>> [round(float(x[0]), 4) for x in compare_rows(p, q)]
    [0.0305, 1.0, 0.9]
    """
    p = np.exp(p_TV, dtype=np.float64)
    kl = p * (p_TV.astype(np.float64) - q_TV)
    overlap = np.minimum(p, np.exp(q_TV, dtype=np.float64))
    return kl.sum(-1), p_TV.argmax(-1) == q_TV.argmax(-1), overlap.sum(-1)


def compare_likeliest(reference: Score, model: Score) -> Compared:
    """The lower bound from the alternatives that both tell."""
    if len(reference.logprobs) != len(model.logprobs) or (
        reference.token_ids and model.token_ids and reference.token_ids != model.token_ids
    ):
        raise other_tokens()
    kinds = {type(key) for score in (reference, model) for top in score.top[:1] for key in top}
    if len(kinds) > 1:
        raise UsageError(
            "One of the models tells token ids and the other texts.",
            "Compare two folders or two URLs.",
        )
    pairs = [(a, b) for a, b in zip(reference.top, model.top, strict=True) if a and b]
    return Compared(
        num_tokens=len(pairs),
        kl=sum(lumped_kl(a, b) for a, b in pairs),
        agreed=sum(likeliest(a) == likeliest(b) for a, b in pairs),
        overlap=None,
        reference_nats=nats(reference),
        nats=nats(model),
    )


def likeliest(top: Alternatives) -> str | int:
    return max(top, key=lambda key: top[key])


def lumped_kl(p: Alternatives, q: Alternatives) -> float:
    """KL(p ‖ q) where all tokens that are not in both are one.

    Texts with half a character are among them: two tokens may look alike.
    """
    shared = [key for key in p if key in q and not (isinstance(key, str) and REPLACEMENT in key)]
    total = sum(math.exp(p[key]) * (p[key] - q[key]) for key in shared)
    rest_p, rest_q = (max(LEAST, 1 - sum(math.exp(x[key]) for key in shared)) for x in (p, q))
    return total + rest_p * math.log(rest_p / rest_q)


def other_tokens() -> UsageError:
    return UsageError(
        "The two models cut the text into different tokens.",
        "Compare models with one tokenizer; bits per byte compares any two.",
    )
