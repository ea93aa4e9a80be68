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
from headway.evals.pairs import NATS, PERPLEXITY, POINTS, POSITIONS, RELATIVE, Paired
from headway.evals.statistics import Values, interval, paired_bootstrap, wilson
from headway.evals.text import (
    CONTEXT_CHARS,
    LAMBADA,
    STRIDE_CHARS,
    TEXTS,
    Advance,
    LastWords,
    Passage,
    TextScore,
    Window,
    read_data,
    read_lambada,
    score_last_words,
    score_windows,
    spread,
    windows,
)
from headway.spec.embedded import general_text

GENERAL = "general"
"""The text that comes along, scored where --data names none."""
MOST_BLOCKS = 500
"""A text of 9,200 windows is drawn again in blocks of 19."""


class Corpora(msgspec.Struct, kw_only=True):
    """What is scored: names with their windows, and the passages for last words."""

    texts: dict[str, str]
    lambada: list[str]
    limit: int | None
    passages: dict[str, list[Window]] = {}
    """By name what is in passages already: code behind its prompts."""

    @property
    def names(self) -> list[str]:
        """Of all that is cut into windows."""
        return [*self.texts, *self.passages]

    def cut(self, name: str) -> list[Window]:
        """The windows of a text, `limit` of them at most."""
        if name in self.passages:
            return spread(self.passages[name], self.limit)
        return windows(self.texts[name], limit=self.limit)

    @property
    def num_windows(self) -> int:
        """Steps of the bar."""
        return sum(len(self.cut(name)) for name in self.names) + len(self.lambada)


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
    last_words: LastWords | None = None

    @classmethod
    def of(
        cls, texts: list[TextScore], last_words: LastWords | None, limit: int | None
    ) -> "TextReport":
        """The report of these scores, with their figures."""
        figures = [bits_figure(text) for text in texts]
        figures += [last_words_figure(last_words)] if last_words else []
        return cls(limit=limit, figures=figures, texts=texts, last_words=last_words)


def read_corpora(data: str, limit: int | None) -> Corpora:
    """The text that comes along, a file of the user's own, or the texts of a data folder.

    UsageError where a folder has none of them, or a file cannot be read.
    """
    found = text_corpora(data, limit)
    short = [name for name in found.names if not found.cut(name)]
    if short:
        raise UsageError(
            f"The text {short[0]} has no more than {CONTEXT_CHARS} characters: all are context.",
            "Give a longer text.",
        )
    return found


def text_corpora(data: str, limit: int | None) -> Corpora:
    """The same, of any length."""
    path = Path(data)
    if not data:
        return Corpora(texts={GENERAL: general_text()}, lambada=[], limit=limit)
    if path.is_file():
        return Corpora(texts={path.stem: read_data(path)}, lambada=[], limit=limit)
    texts = {n: read_data(path / file) for n, file in TEXTS.items() if (path / file).exists()}
    if not texts:
        raise UsageError(
            f"--data {data} has no text.",
            f"Give a file of text, or a folder with one of {', '.join(TEXTS.values())}.",
        )
    lambada = read_lambada(path, limit) if (path / LAMBADA).exists() else []
    return Corpora(texts=texts, lambada=lambada, limit=limit)


def ask(model: Model, corpora: Corpora, advance: Advance) -> TextReport:
    """Score everything; `advance` is called once a passage."""
    texts = [
        TextScore(
            name=name,
            context_chars=CONTEXT_CHARS,
            stride_chars=STRIDE_CHARS,
            passages=score_windows(model, corpora.cut(name), advance),
        )
        for name in corpora.names
    ]
    return TextReport.of(texts, last_words_of(model, corpora, advance), corpora.limit)


def last_words_of(model: Model, corpora: Corpora, advance: Advance) -> LastWords | None:
    """LAMBADA's last words; None where its passages are not at hand."""
    if not corpora.lambada:
        return None
    return score_last_words(model, corpora.lambada, advance=advance)


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


def text_pairs(
    first: TextReport, second: TextReport, compared: frozenset[str] = frozenset()
) -> Iterator[Paired]:
    """Texts and last words whose passages are the same in both.

    Those in `compared` are left out: their tokens say more.
    """
    before = {text.name: text for text in first.texts}
    for b in second.texts:
        a = before.get(b.name)
        if b.name in compared:
            continue
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
            required=True,
        )
    a_words, b_words = first.last_words, second.last_words
    if a_words is None or b_words is None:
        return
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


def compare(
    first: Model, second: Model, corpora: Corpora, advance: Advance
) -> tuple[TextReport, TextReport, DivergenceReport]:
    """Both models on each text in one pass, and what the second lost token by token.

    Raises UsageError where they do not cut a text into the same tokens.
    """
    found, scores = [], []
    for name in corpora.names:
        cut = corpora.cut(name)
        found.append(divergence.compare(first, second, cut, name=name, advance=advance))
        scores.append(both_scores(found[-1], cut))
    divergences = DivergenceReport(
        method=found[0].method,
        figures=[figure for each in found for figure in divergence_figures(each)],
        texts=found,
    )
    of_a, of_b = (
        TextReport.of(list(texts), last_words_of(model, corpora, advance), corpora.limit)
        for model, texts in zip((first, second), zip(*scores, strict=True), strict=True)
    )
    return of_a, of_b, divergences


def both_scores(found: Divergence, cut: Sequence[Window]) -> tuple[TextScore, TextScore]:
    """The bits of A and of B on windows that were compared token by token."""
    a, b = (
        TextScore(
            name=found.name,
            context_chars=CONTEXT_CHARS,
            stride_chars=STRIDE_CHARS,
            passages=[
                Passage(
                    nats=nats,
                    num_bytes=len(window.target.encode()),
                    num_tokens=each.num_tokens,
                )
                for window, each in zip(cut, found.passages, strict=True)
                for nats in ((each.reference_nats, each.nats)[side],)
            ],
        )
        for side in (0, 1)
    )
    return a, b


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
    """KL(A ‖ B), positions whose likeliest token differs, and the perplexity of B over A's."""
    for each in found.texts:
        tokens = blocks([passage.num_tokens for passage in each.passages])
        ratio = each.perplexity_ratio
        rows: list[tuple[str, str, float | None, float, list[float]]] = [
            ("KL", NATS, None, each.kl, [p.kl for p in each.passages]),
            ("same top token", POSITIONS, 1.0, each.agreement, [p.differed for p in each.passages]),
            ("perplexity", PERPLEXITY, each.reference_perplexity,
             each.reference_perplexity * ratio, [p.nats - p.reference_nats for p in each.passages]),
        ]  # fmt: skip
        for name, kind, first, second, sums in rows:
            yield Paired(
                name=f"{name}, {each.name}",
                kind=kind,
                first=first,
                second=second,
                items=len(each.passages),
                loss=blocks(sums),
                weight=tokens,
                required=True,
            )
