"""The suite `text`: bits per byte and last words with their intervals, ready to be paired.

It is given a `core.scoring.Model` and the data folder. It promises every passage's value, and that
intervals come from blocks of neighbouring passages, drawn again: neighbours are not independent.
"""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np

from headway.core.errors import UsageError
from headway.core.scoring import Model
from headway.evals import divergence
from headway.evals.divergence import Divergence
from headway.evals.pairs import NATS, POINTS, RELATIVE, Paired
from headway.evals.statistics import Values, interval, paired_bootstrap, wilson
from headway.evals.text import (
    TEXTS,
    Advance,
    LastWords,
    TextScore,
    Window,
    read_lambada,
    read_text,
    score_last_words,
    score_text,
    windows,
)

DIVERGENCE_WINDOWS = 200
"""Windows of each text that are compared token by token, unless --windows says otherwise."""

MOST_BLOCKS = 500
"""A text of 9,200 windows is drawn again in blocks of 19."""


class Corpora(msgspec.Struct, kw_only=True):
    """What is scored: names with their windows, and the passages for last words."""

    texts: dict[str, str]
    lambada: list[str]
    limit: int | None

    def cut(self, name: str, limit: int | None) -> list[Window]:
        """The windows of a text, or `limit` of them."""
        return windows(self.texts[name], limit=limit)

    @property
    def num_windows(self) -> int:
        """Steps of the bar."""
        return sum(len(self.cut(name, self.limit)) for name in self.texts) + len(self.lambada)


BITS, SHARE, NATS_A_TOKEN, RATIO = "bits per byte", "share", "nats per token", "ratio"


class Figure(msgspec.Struct, kw_only=True):
    """One figure with its 95% interval; `unit` is one of the four below."""

    name: str
    unit: str
    value: float
    low: float
    high: float
    items: int


class TextReport(msgspec.Struct, kw_only=True):
    """Figures, and every passage behind them in its order."""

    limit: int | None
    figures: list[Figure]
    texts: list[TextScore]
    last_words: LastWords


def read_corpora(data: str, limit: int | None) -> Corpora:
    """The texts of the data folder; UsageError names a file that is missing."""
    if not data:
        raise UsageError(
            "The suite text needs texts.",
            "--data FOLDER, which holds text/val.txt, eval/wikitext-2 and eval/lambada.",
        )
    folder = Path(data)
    texts = {name: read_text(folder, name) for name in TEXTS}
    return Corpora(texts=texts, lambada=read_lambada(folder, limit), limit=limit)


def ask(model: Model, corpora: Corpora, advance: Advance) -> TextReport:
    """Score everything; `advance` is called once a passage."""
    texts = [
        score_text(model, text, name=name, limit=corpora.limit, advance=advance)
        for name, text in corpora.texts.items()
    ]
    last_words = score_last_words(model, corpora.lambada, advance=advance)
    return TextReport(
        limit=corpora.limit,
        figures=[*map(bits_figure, texts), last_words_figure(last_words)],
        texts=texts,
        last_words=last_words,
    )


def bits_figure(text: TextScore) -> Figure:
    """Bits per byte; the interval is of passages drawn again."""
    bits = blocks([passage.nats / math.log(2) for passage in text.passages])
    num_bytes = blocks([passage.num_bytes for passage in text.passages])
    low, high = interval(paired_bootstrap(bits, num_bytes))
    return Figure(
        name=text.name,
        unit=BITS,
        value=text.bits_per_byte,
        low=low,
        high=high,
        items=len(text.passages),
    )


def last_words_figure(found: LastWords) -> Figure:
    """The share of right last words."""
    low, high = wilson(found.num_right, len(found.items))
    return Figure(
        name=found.name,
        unit=SHARE,
        value=found.accuracy,
        low=low,
        high=high,
        items=len(found.items),
    )


def blocks(values: Sequence[float]) -> Values:
    """Sums of neighbours, at most MOST_BLOCKS of them: with 2, [1, 2, 3, 4, 5] is [6, 9]."""
    size = -(-len(values) // MOST_BLOCKS)
    found: Values = np.add.reduceat(np.array(values, dtype=float), range(0, len(values), size))
    return found


def text_pairs(first: TextReport, second: TextReport) -> Iterator[Paired]:
    """Texts and last words whose passages are the same in both."""
    before = {text.name: text for text in first.texts}
    for b in second.texts:
        a = before.get(b.name)
        if a is None or [p.num_bytes for p in a.passages] != [p.num_bytes for p in b.passages]:
            continue
        of_a, of_b = (blocks([p.nats for p in text.passages]) for text in (a, b))
        yield Paired(
            name=f"bits per byte, {b.name}",
            kind=RELATIVE,
            first=a.bits_per_byte,
            second=b.bits_per_byte,
            items=len(b.passages),
            loss=of_b - of_a,
            weight=of_a,
        )
    a_words, b_words = first.last_words, second.last_words
    if [i.word for i in a_words.items] == [i.word for i in b_words.items]:
        right_a, right_b = (
            np.array([float(item.right) for item in found.items]) for found in (a_words, b_words)
        )
        yield Paired(
            name=f"last words, {b_words.name}",
            kind=POINTS,
            first=a_words.accuracy,
            second=b_words.accuracy,
            items=len(right_b),
            loss=right_a - right_b,
        )


class DivergenceReport(msgspec.Struct, kw_only=True):
    """B against A token by token: `method` says whether KL is exact or a lower bound."""

    method: str
    figures: list[Figure]
    texts: list[Divergence]


def diverge(first: Model, second: Model, corpora: Corpora, advance: Advance) -> DivergenceReport:
    """What the second lost against the first, token by token, on each text."""
    limit = corpora.limit or DIVERGENCE_WINDOWS
    found = [
        divergence.compare(first, second, corpora.cut(name, limit), name=name, advance=advance)
        for name in corpora.texts
    ]
    return DivergenceReport(
        method=found[0].method,
        figures=[figure for each in found for figure in divergence_figures(each)],
        texts=found,
    )


def divergence_figures(found: Divergence) -> Iterator[Figure]:
    """KL(A ‖ B), agreement of the likeliest token, Σ min(p, q) and the ratio of perplexities."""
    passages = found.passages
    rows: list[tuple[str, str, float, list[float]]] = [
        ("KL", NATS_A_TOKEN, found.kl, [each.kl for each in passages]),
        ("same likeliest token", SHARE, found.agreement, [each.agreed for each in passages]),
    ]
    if found.overlap is not None:
        rows.append(("Σ min(p, q)", SHARE, found.overlap, [each.overlap or 0 for each in passages]))
    more = [each.nats - each.reference_nats for each in passages]
    rows.append(("perplexity, B / A", RATIO, found.perplexity_ratio, more))
    tokens = blocks([each.num_tokens for each in passages])
    for name, unit, value, sums in rows:
        low, high = interval(paired_bootstrap(blocks(sums), tokens))
        if unit == RATIO:
            low, high = math.exp(low), math.exp(high)
        yield Figure(
            name=f"{found.name}: {name}",
            unit=unit,
            value=value,
            low=low,
            high=high,
            items=len(passages),
        )


def divergence_pairs(found: DivergenceReport) -> Iterator[Paired]:
    """KL(A ‖ B) in nats a token is the loss itself."""
    for each in found.texts:
        yield Paired(
            name=f"KL, {each.name}",
            kind=NATS,
            first=None,
            second=each.kl,
            items=len(each.passages),
            loss=blocks([passage.kl for passage in each.passages]),
            weight=blocks([passage.num_tokens for passage in each.passages]),
        )
