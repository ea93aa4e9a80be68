"""The suite `text`: bits per byte and last words, with intervals, in a form that can be paired.

Consecutive passages are not independent, so intervals come from a bootstrap over blocks of them.
"""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np

from headway.core.errors import UsageError
from headway.core.scoring import ScoringModel
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
    TextWindow,
    read_data,
    read_lambada,
    score_last_words,
    score_windows,
    spread,
    windows,
)
from headway.spec.embedded import general_text

GENERAL = "general"
"""Name of the text inside the package, which is scored if --data is not given."""
MAX_BLOCKS = 500
"""Maximum number of bootstrap blocks: a text of 9,200 windows has blocks of 19."""


class Corpora(msgspec.Struct, kw_only=True):
    """The texts to score, by name, and the LAMBADA passages for last words."""

    texts: dict[str, str]
    lambada: list[str]
    limit: int | None
    passages: dict[str, list[TextWindow]] = {}
    """Texts that are already windows: HumanEval's solutions after their prompts."""

    @property
    def names(self) -> list[str]:
        """Names of all texts."""
        return [*self.texts, *self.passages]

    def cut(self, name: str) -> list[TextWindow]:
        """Return the windows of a text, at most `limit`."""
        if name in self.passages:
            return spread(self.passages[name], self.limit)
        return windows(self.texts[name], limit=self.limit)

    @property
    def num_windows(self) -> int:
        """Number of steps of the progress bar."""
        return sum(len(self.cut(name)) for name in self.names) + len(self.lambada)


BITS, SHARE, NATS_A_TOKEN, RATIO = "bits per byte", "share", "nats per token", "ratio"


class TextFigure(msgspec.Struct, kw_only=True):
    """One figure with its 95% interval; `unit` is BITS, SHARE, NATS_A_TOKEN or RATIO."""

    name: str
    unit: str
    value: float
    low: float
    high: float
    items: int


class TextReport(msgspec.Struct, kw_only=True):
    """Figures, and the passages behind them, in order."""

    limit: int | None
    figures: list[TextFigure]
    texts: list[TextScore]
    last_words: LastWords | None = None

    @classmethod
    def of(
        cls, texts: list[TextScore], last_words: LastWords | None, limit: int | None
    ) -> "TextReport":
        """Build the report of these scores."""
        figures = [bits_figure(text) for text in texts]
        figures += [last_words_figure(last_words)] if last_words else []
        return cls(limit=limit, figures=figures, texts=texts, last_words=last_words)


def read_corpora(data: str, limit: int | None) -> Corpora:
    """Read the text inside the package, a file of the user's own, or the texts of a data folder.

    Raises UsageError if a folder has no text, a file cannot be read, or a text is too short.
    """
    corpora = text_corpora(data, limit)
    too_short = [name for name in corpora.names if not corpora.cut(name)]
    if too_short:
        raise UsageError(
            f"The text {too_short[0]} has at most {CONTEXT_CHARS} characters: all are context.",
            "Give a longer text.",
        )
    return corpora


def text_corpora(data: str, limit: int | None) -> Corpora:
    """Read the texts without a check of their length."""
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


def ask(model: ScoringModel, corpora: Corpora, advance: Advance) -> TextReport:
    """Score all texts; `advance` is called after each passage."""
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


def last_words_of(model: ScoringModel, corpora: Corpora, advance: Advance) -> LastWords | None:
    """Score LAMBADA's last words; None if the data folder has no LAMBADA."""
    if not corpora.lambada:
        return None
    return score_last_words(model, corpora.lambada, advance=advance)


def bits_figure(text: TextScore) -> TextFigure:
    """Return bits per byte with a bootstrap interval."""
    bits = blocks([passage.nats / math.log(2) for passage in text.passages])
    num_bytes = blocks([passage.num_bytes for passage in text.passages])
    low, high = interval(paired_bootstrap(bits, num_bytes))
    return TextFigure(
        name=text.name,
        unit=BITS,
        value=text.bits_per_byte,
        low=low,
        high=high,
        items=len(text.passages),
    )


def last_words_figure(last_words: LastWords) -> TextFigure:
    """Return the share of right last words."""
    low, high = wilson(last_words.num_right, len(last_words.items))
    return TextFigure(
        name=last_words.name,
        unit=SHARE,
        value=last_words.accuracy,
        low=low,
        high=high,
        items=len(last_words.items),
    )


def blocks(values: Sequence[float]) -> Values:
    """Return sums of consecutive values in at most MAX_BLOCKS blocks: with 2, [1, 2, 3, 4, 5] → [6,
    9]."""
    size = -(-len(values) // MAX_BLOCKS)
    sums: Values = np.add.reduceat(np.array(values, dtype=float), range(0, len(values), size))
    return sums


def text_pairs(
    first: TextReport, second: TextReport, compared: frozenset[str] = frozenset()
) -> Iterator[Paired]:
    """Yield a measure for each text, and for last words, whose passages are the same in both
    reports.

    Texts in `compared` are skipped: they have measures by token.
    """
    by_name = {text.name: text for text in first.texts}
    for b in second.texts:
        a = by_name.get(b.name)
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
            np.array([float(item.right) for item in words.items]) for words in (a_words, b_words)
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
    figures: list[TextFigure]
    texts: list[Divergence]


def compare(
    first: ScoringModel, second: ScoringModel, corpora: Corpora, advance: Advance
) -> tuple[TextReport, TextReport, DivergenceReport]:
    """Score and compare both models token by token; UsageError if they tokenize differently."""
    results, scores = [], []
    for name in corpora.names:
        cut = corpora.cut(name)
        results.append(divergence.compare(first, second, cut, name=name, advance=advance))
        scores.append(both_scores(results[-1], cut))
    divergences = DivergenceReport(
        method=results[0].method,
        figures=[figure for each in results for figure in divergence_figures(each)],
        texts=results,
    )
    of_a, of_b = (
        TextReport.of(list(texts), last_words_of(model, corpora, advance), corpora.limit)
        for model, texts in zip((first, second), zip(*scores, strict=True), strict=True)
    )
    return of_a, of_b, divergences


def both_scores(result: Divergence, cut: Sequence[TextWindow]) -> tuple[TextScore, TextScore]:
    """Return the bits of A and of B on windows that were compared token by token."""
    a, b = (
        TextScore(
            name=result.name,
            context_chars=CONTEXT_CHARS,
            stride_chars=STRIDE_CHARS,
            passages=[
                Passage(
                    nats=nats,
                    num_bytes=len(window.target.encode()),
                    num_tokens=each.num_tokens,
                )
                for window, each in zip(cut, result.passages, strict=True)
                for nats in ((each.reference_nats, each.nats)[side],)
            ],
        )
        for side in (0, 1)
    )
    return a, b


def divergence_figures(result: Divergence) -> Iterator[TextFigure]:
    """Yield KL(A ‖ B), agreement of the most likely token, Σ min(p, q) and the ratio of
    perplexities."""
    passages = result.passages
    rows: list[tuple[str, str, float, list[float]]] = [
        ("KL", NATS_A_TOKEN, result.kl, [each.kl for each in passages]),
        ("same likeliest token", SHARE, result.agreement, [each.agreed for each in passages]),
    ]
    if result.overlap is not None:
        rows.append(
            ("Σ min(p, q)", SHARE, result.overlap, [each.overlap or 0 for each in passages])
        )
    more = [each.nats - each.reference_nats for each in passages]
    rows.append(("perplexity, B / A", RATIO, result.perplexity_ratio, more))
    tokens = blocks([each.num_tokens for each in passages])
    for name, unit, value, sums in rows:
        low, high = interval(paired_bootstrap(blocks(sums), tokens))
        if unit == RATIO:
            low, high = math.exp(low), math.exp(high)
        yield TextFigure(
            name=f"{result.name}: {name}",
            unit=unit,
            value=value,
            low=low,
            high=high,
            items=len(passages),
        )


def divergence_pairs(report: DivergenceReport) -> Iterator[Paired]:
    """Yield measures: KL(A ‖ B), positions with different most likely tokens, perplexity of B over
    A's."""
    for each in report.texts:
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
