"""Finds windows by layer: each is measured alone, the best together is measured again.

It is given rows, which are prompts with the whole model's own right answers (and texts), and a
function that scores them under windows. The loss of windows is by how many nats a token they hold
these answers less likely than the whole model, in the kind of answer that loses most: a mean over
all of them would hide the one skill that looks further back. An answer is *changed* when another
token is likeliest somewhere in it, so that greedy decoding would say something else. A window that
fewer than `items` rows look beyond is not tried: nothing would show what it costs.

Losses of layers are taken to add up, so which windows lose least under a share of the KV is a
knapsack, solved exactly. Worked example, two layers, context 100, at most half of the 200 tokens:

    alone     window 20   window 50   whole       chosen: layer 0 whole, and layer 1 may see
    layer 0   0.9 nats    0.7         0           none of the rest: (100, 20) is 120 > 100.
    layer 1   0.1         0           0           (50, 50) and (50, 20) fit: (50, 50), 0.7 nats
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

from headway.core.errors import UsageError
from headway.core.scoring import Score
from headway.evals.questions import lookup_name, most_tokens
from headway.evals.skills.suite import LEVELS, SKILLS, lookups, untested_examples

SEED = 1
TEXT = "text"

Windows = tuple[int, ...]
"""By layer the tokens seen back, 0 for as many as the model's own layer."""
Chat = list[dict[str, str]]


@dataclass(frozen=True, slots=True)
class Row:
    """Tokens of which those from place `begin` on are judged, and what kind of answer they are."""

    kind: str
    token_ids: list[int]
    begin: int


@dataclass(frozen=True, slots=True)
class Lost:
    """What one kind of answer lost: nats a token, and how many of its `items` are `changed`."""

    nats: float
    changed: int
    items: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Losses:
    """By kind of answer."""

    kinds: Mapping[str, Lost]

    @property
    def worst_kind(self) -> str:
        """The kind that lost most."""
        return max(self.kinds, key=lambda kind: self.kinds[kind].nats)

    @property
    def worst(self) -> float:
        """Nats a token of that kind; never below 0."""
        return max(0.0, self.kinds[self.worst_kind].nats)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layers:
    """The model's layers as the search sees them: `seen` by layer at the context, in tokens."""

    seen: tuple[int, ...]
    sinks: int
    candidates: tuple[int, ...]
    judged: int
    """Tokens of the context that enough rows are as long as."""

    def choices(self, layer: int) -> list[int]:
        """Windows that leave a layer less than it sees, and rows look beyond, narrowest first."""
        beyond = min(self.seen[layer], self.judged)
        return [w for w in sorted(self.candidates) if w + self.sinks < beyond]

    def tokens(self, layer: int, window: int) -> int:
        """What the layer holds at the context."""
        return window + self.sinks if window else self.seen[layer]

    def share(self, windows: Windows) -> float:
        """Of the tokens that all layers of the model see."""
        held = sum(self.tokens(layer, window) for layer, window in enumerate(windows))
        return held / sum(self.seen)

    @property
    def narrowest(self) -> Windows:
        """The least that the candidates leave."""
        return tuple(min(self.choices(layer), default=0) for layer in range(len(self.seen)))


class Answering(Protocol):
    """What is asked of the whole model."""

    def answer_ids(
        self, chats: Sequence[Chat], *, max_tokens: int
    ) -> list[tuple[list[int], list[int], str] | None]:
        """Token ids of each prompt and of its greedy answer, and that; None where it is long."""
        ...


def rows_of(model: Answering, items: int, distances: Sequence[int]) -> Iterator[Row]:
    """The model's right answers to `items` of each skill and level, and to lookups at distances.

    None of them is asked when a model is evaluated.
    """
    cells = [
        (skill, untested_examples(skill, level, SEED), items)
        for skill in SKILLS
        for level in LEVELS
    ] + [(lookup_name(d), lookups(d, SEED, tested=False), items * len(LEVELS)) for d in distances]
    for kind, stream, count in cells:
        asked = list(islice(stream, count))
        replies = model.answer_ids([one.messages for one in asked], max_tokens=most_tokens(kind))
        for one, reply in zip(asked, replies, strict=True):
            if reply is not None and one.accepts(reply[2]):
                prompt, answer, _ = reply
                yield Row(kind, prompt + answer, len(prompt))


def text_rows(texts: Iterable[list[int]]) -> Iterator[Row]:
    """Rows of plain text: every token but the first is judged."""
    return (Row(TEXT, ids, 1) for ids in texts if len(ids) > 1)


def judged_length(rows: Sequence[Row], items: int) -> int:
    """What at least `items` rows are as long as: of 90, 70 and 20 tokens two are of 70; else 0."""
    lengths = sorted((len(row.token_ids) for row in rows), reverse=True)
    return lengths[items - 1] if len(lengths) >= items else 0


def losses(rows: Sequence[Row], whole: Sequence[Score], narrow: Sequence[Score]) -> Losses:
    """What the narrow model lost in each kind; both scored with their likeliest token."""
    nats: dict[str, float] = {}
    counts: dict[str, list[int]] = {}
    for row, a, b in zip(rows, whole, narrow, strict=True):
        places = range(row.begin, len(row.token_ids))
        lost = sum((a.logprobs[i] or 0.0) - (b.logprobs[i] or 0.0) for i in places)
        nats[row.kind] = nats.get(row.kind, 0.0) + lost
        count = counts.setdefault(row.kind, [0, 0, 0])
        count[0] += len(places)
        count[1] += any(a.top[i].keys() != b.top[i].keys() for i in places)
        count[2] += 1
    return Losses(
        kinds={k: Lost(nats[k] / tokens, changed, n) for k, (tokens, changed, n) in counts.items()}
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The windows that were chosen, what they lost together, and each window's loss alone."""

    windows: Windows
    lost: Losses
    alone: list[dict[int, float]]


def search(
    layers: Layers,
    most: float,
    max_loss: float,
    measure: Callable[[Windows], Losses],
    advance: Callable[[], None] = lambda: None,
) -> Found:
    """The windows of at most the share `most` that lose least, measured together.

    Raises UsageError where the candidates leave more than that. The loss may be above `max_loss`:
    then nothing under this share was found to hold it. `advance` is called once a layer.
    """
    if layers.narrowest == (0,) * len(layers.seen):
        raise UsageError(
            "The model answers too few questions right to measure windows on.",
            "Give --calibrate texts, and narrower --candidates.",
        )
    least = layers.share(layers.narrowest)
    if least > most:
        raise UsageError(
            f"The narrowest windows leave {least:.3f} of the KV, above --share {most:g}.",
            f"Ask for --share {least + 0.001:.3f} or more, or give narrower --candidates.",
        )
    alone = []
    for layer in range(len(layers.seen)):
        alone.append(alone_of(layers, layer, max_loss, measure))
        advance()
    windows = cheapest(layers, alone, most)
    return Found(windows=windows, lost=measure(windows), alone=alone)


def alone_of(
    layers: Layers, layer: int, max_loss: float, measure: Callable[[Windows], Losses]
) -> dict[int, float]:
    """By window what the layer loses when it alone is narrow; 0, the whole, loses nothing.

    A window that loses next to nothing needs no wider one beside it.
    """
    found = {0: 0.0}
    enough = max_loss / (4 * len(layers.seen))
    for window in layers.choices(layer):
        windows = [0] * len(layers.seen)
        windows[layer] = window
        found[window] = measure(tuple(windows)).worst
        if found[window] <= enough:
            break
    return found


def cheapest(layers: Layers, alone: Sequence[Mapping[int, float]], most: float) -> Windows:
    """Of all combinations within the share the one whose losses add up to least; exact.

    Equal losses: fewer tokens. Kept are the best by tokens held, and no combination that holds
    more and loses as much as another.
    """
    limit = most * sum(layers.seen)
    best: list[tuple[int, float, Windows]] = [(0, 0.0, ())]
    for layer, choices in enumerate(alone):
        grown = sorted(
            (held + layers.tokens(layer, window), lost + more, (*windows, window))
            for held, lost, windows in best
            for window, more in choices.items()
        )
        best = []
        for each in grown:
            if each[0] <= limit and (not best or each[1] < best[-1][1]):
                best.append(each)
    return best[-1][2]
