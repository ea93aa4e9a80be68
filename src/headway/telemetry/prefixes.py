"""Shared prefixes of prompts: where the prompts of one application begin to differ, and by what.

Prompts (token ids or words) are grouped by their beginnings; each group has the length of its
common prefix and the outliers that differ earlier. A date at token 212 of a system prompt makes the
rest of it useless for the cache: "request 17 differs from the others at token 212: a date in the
system prompt; 840 tokens behind it are alike again". No I/O; `decode` turns pieces into text.

For the live view the server stores the beginnings of a few prompts (`RecentPrompts`) and compares
them when `/stats` is read, outside the event loop and at most for a small share of the time. The
result has numbers and kinds, never text of a prompt.
"""

import re
from collections import Counter, deque
from collections.abc import Callable, Sequence

import msgspec

from headway.core.clock import Clock

MIN_SHARED_PIECES = 8
"""Shortest prefix of an application; less may be the first tokens of a template, or chance."""
MAJORITY_SHARE = 0.8
"""Share of a group that must agree on the next piece; the rest are outliers. Below it splits."""
MIN_GROUP = 2
RESUME_SEARCH_PIECES = 64
"""Pieces behind a difference in which an alike part is searched."""
CONTEXT_PIECES = 24
"""Pieces on each side of a difference that the patterns see."""
MAX_OUTLIERS = 20
MAX_PROMPTS, MAX_TOKENS = 32, 2048
MAX_GROUPS_SHOWN = 5
MAX_TIME_SHARE = 0.02
"""Largest share of the time for comparing prompts."""
MONTHS = "jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec"
KINDS: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (name, re.compile(pattern, re.IGNORECASE if name != "a name" else 0))
    for name, pattern in (
        ("a UUID", r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"),
        ("a date", r"\d{4}-\d{1,2}-\d{1,2}|\d{1,2}[./]\d{1,2}[./]\d{2,4}"),
        (
            "a date",
            rf"(?:\d{{1,2}}\.? )?(?:{MONTHS})[a-z]*\.? \d{{1,2}}(?:st|nd|rd|th)?(?:,? \d{{4}})?"
            rf"|\d{{1,2}}\.? (?:{MONTHS})[a-z]*\.?(?: \d{{4}})?"
            r"|(?:mon|tues|wednes|thurs|fri|satur|sun)day",
        ),
        ("a time", r"\d{1,2}:\d{2}(?::\d{2})?(?:\.\d+)?"),
        ("an e-mail address", r"[\w.+-]+@[\w-]+\.[\w.]+"),
        ("a URL", r"https?://\S+"),
        ("a hexadecimal id", r"\b(?=[0-9a-f]*\d)(?=[0-9a-f]*[a-f])[0-9a-f]{8,}\b"),
        ("a number", r"\d[\d.,]*"),
        ("a name", r"\b[A-Z][a-z]+(?: [A-Z][a-z]+)*\b"),
    )
)
"""Kinds of differing text, the most specific pattern first."""

Pieces = Sequence[int] | Sequence[str]
Decode = Callable[[Pieces], str]


class PrefixOutlier(msgspec.Struct, kw_only=True):
    """Request that differs from its group at piece `at`; `alike_after` later pieces are alike."""

    request: int
    at: int
    text: str
    others: str
    looks_like: str
    alike_after: int
    sentence: str


class SharedPrefix(msgspec.Struct, kw_only=True):
    """One application: prompts that are alike up to piece `shared`."""

    requests: int
    unit: str
    shared: int
    median_length: float
    looks_like: str
    example: str
    alike_after: int
    sentence: str
    outliers: list[PrefixOutlier] = []


def words(text: str) -> list[str]:
    """Split a text into words, runs of blanks and single marks; joined they are the text again."""
    return re.findall(r"\w+|\s+|[^\w\s]", text)


def join_words(pieces: Pieces) -> str:
    """Return the text of words, or the numbers of ids separated by blanks."""
    if pieces and isinstance(pieces[0], int):
        return " ".join(map(str, pieces))
    return "".join(map(str, pieces))


def find_shared_prefixes(
    prompts: Sequence[Pieces],
    *,
    names: Sequence[int] | None = None,
    system: Sequence[int] | None = None,
    decode: Decode | None = None,
    unit: str = "tokens",
) -> list[SharedPrefix]:
    """Return the applications among `prompts`, the largest first.

    `names[i]` is the number of the request (default i), `system[i]` the number of its pieces that
    belong to the system prompt. Without `decode` a difference between ids gets no kind.
    """
    view = PrefixSearch(prompts, names or range(len(prompts)), system, decode, unit)
    applications: list[SharedPrefix] = []
    waiting = [(list(range(len(prompts))), 0)]
    while waiting:
        members, start = waiting.pop()
        if len(members) >= MIN_GROUP:
            sharing, others = view.follow(members, start)
            waiting += others
            if sharing is not None:
                applications.append(sharing)
    return sorted(applications, key=lambda sharing: -sharing.requests)


class PrefixSearch:
    """Search for shared prefixes in one list of prompts."""

    def __init__(
        self,
        prompts: Sequence[Pieces],
        names: Sequence[int],
        system: Sequence[int] | None,
        decode: Decode | None,
        unit: str,
    ) -> None:
        self._prompts = prompts
        self._names = names
        self._system = system
        self._decode = decode or join_words
        self._readable = decode is not None or any(p and isinstance(p[0], str) for p in prompts)
        self._unit = unit

    def follow(
        self, members: list[int], start: int
    ) -> tuple[SharedPrefix | None, list[tuple[list[int], int]]]:
        """Follow the majority from piece `start`; return (application or None, other groups)."""
        at = start
        outliers: list[tuple[int, int]] = []
        others: list[tuple[list[int], int]] = []
        while True:
            groups = self._by_next(members, at)
            value, going = max(groups.items(), key=lambda item: len(item[1]))
            if value is None or len(going) < MIN_GROUP:
                break
            leaving = [i for i in members if i not in set(going)] if len(groups) > 1 else []
            if leaving and len(going) < MAJORITY_SHARE * len(members):
                if at >= MIN_SHARED_PIECES and self._alike_again(list(groups.values()), at):
                    break
                branches = [g for v, g in groups.items() if v is not None and len(g) >= MIN_GROUP]
                if not self._should_split(branches, at):
                    break
                return None, [(branch, at) for branch in branches]
            if leaving and at < MIN_SHARED_PIECES:
                others.append((leaving, 0))
            else:
                outliers += [(i, at) for i in leaving]
            members, at = going, at + 1
        if at < MIN_SHARED_PIECES:
            return None, others
        return self._shared_prefix(members, at, outliers), others

    def _by_next(self, members: list[int], at: int) -> dict[int | str | None, list[int]]:
        """Return next piece → prompts that have it; None → prompts that end here."""
        groups: dict[int | str | None, list[int]] = {}
        for i in members:
            prompt = self._prompts[i]
            groups.setdefault(prompt[at] if at < len(prompt) else None, []).append(i)
        return groups

    def _should_split(self, branches: list[list[int]], at: int) -> bool:
        """Return whether at least two branches are applications of their own."""
        inside = [
            branch
            for branch in branches
            if common_length(self._prompts[branch[0]], self._prompts[branch[-1]], at, at)
            >= MIN_SHARED_PIECES
        ]
        return len(inside) >= 2

    def _alike_again(self, groups: list[list[int]], at: int) -> int:
        """Return the pieces alike behind a difference: the median of the groups to the largest."""
        first, *rest = sorted(groups, key=len, reverse=True)
        counts = sorted(self.alike_after(first[0], group[0], at) for group in rest[:9])
        return counts[len(counts) // 2] if counts else 0

    def alike_after(self, a: int, b: int, at: int) -> int:
        """Return the number of pieces of two prompts alike behind their difference at `at`."""
        first, second = self._prompts[a], self._prompts[b]
        i = j = at
        alike = 0
        for _ in range(MIN_SHARED_PIECES):
            offsets = next_alike(first, second, i, j)
            if offsets is None:
                break
            i, j = i + offsets[0], j + offsets[1]
            run = common_length(first, second, i, j)
            alike, i, j = alike + run, i + run, j + run
        return alike

    def _shared_prefix(
        self, members: list[int], at: int, outliers: list[tuple[int, int]]
    ) -> SharedPrefix:
        """Return the description of one application."""
        groups = list(self._by_next(members, at).values())
        alike = self._alike_again(groups, at) if len(groups) > 1 else 0
        one, other = members[0], groups[-1][0]
        kinds = Counter(self.kind(group[0], at) for group in groups[:9])
        kind = kinds.most_common(1)[0][0] if len(groups) > 1 else ""
        lengths = sorted(len(self._prompts[i]) for i in members)
        total = len(members) + len(outliers)
        sentence = f"{total} requests share their first {at} {self._unit}"
        if len(groups) > 1:
            sentence += f" and part there{self._format_place(one, at)}: {kind or 'their own text'}"
        if alike:
            sentence += f"; {alike} {self._unit} behind it are alike again and cannot be reused"
        return SharedPrefix(
            requests=total,
            unit=self._unit,
            shared=at,
            median_length=float(lengths[len(lengths) // 2]),
            looks_like=kind,
            example=f"{self.excerpt(one, at)} | {self.excerpt(other, at)}"
            if len(groups) > 1
            else "",
            alike_after=alike,
            sentence=sentence + ".",
            outliers=[self._outlier(i, one, place) for i, place in outliers[:MAX_OUTLIERS]],
        )

    def _outlier(self, i: int, other: int, at: int) -> PrefixOutlier:
        """Return the description of a request that differs before the others."""
        kind, alike = self.kind(i, at), self.alike_after(other, i, at)
        sentence = (
            f"Request {self._names[i]} differs from the others at {self._unit.removesuffix('s')} "
            f"{at}: {kind or 'another text'}{self._format_place(i, at)}"
        )
        if alike:
            sentence += f"; {alike} {self._unit} behind it are alike again"
        return PrefixOutlier(
            request=self._names[i],
            at=at,
            text=self.excerpt(i, at),
            others=self.excerpt(other, at),
            looks_like=kind,
            alike_after=alike,
            sentence=sentence + ".",
        )

    def _format_place(self, i: int, at: int) -> str:
        """Return " in the system prompt" where a difference is known to lie there, else ""."""
        return " in the system prompt" if self._system and at < self._system[i] else ""

    def excerpt(self, i: int, at: int) -> str:
        """Return the text of a few pieces from the difference on."""
        return self._decode(self._prompts[i][at : at + MIN_SHARED_PIECES])

    def kind(self, i: int, at: int) -> str:
        """Return the kind of text at a difference ("a date"), "" where no pattern matches.

        The match must cover the difference: two dates "2026-11-21" and "2026-11-22" differ at "21",
        and the whole date is matched.
        """
        if not self._readable:
            return ""
        prompt = self._prompts[i]
        before = self._decode(prompt[max(0, at - CONTEXT_PIECES) : at])
        text = before + self._decode(prompt[at : at + CONTEXT_PIECES])
        place = len(before) + (len(text[len(before) :]) - len(text[len(before) :].lstrip()))
        for name, pattern in KINDS:
            for match in pattern.finditer(text):
                if match.start() <= place < match.end():
                    return name
        return ""


def common_length(first: Pieces, second: Pieces, i: int, j: int) -> int:
    """Return the number of equal pieces from `first[i]` and `second[j]` on."""
    count = 0
    for a, b in zip(first[i:], second[j:]):
        if a != b:
            break
        count += 1
    return count


def next_alike(first: Pieces, second: Pieces, i: int, j: int) -> tuple[int, int] | None:
    """Return the nearest offsets behind a difference from which pieces are alike again, or None.

    At least `MIN_SHARED_PIECES` must be alike.
    """
    n = MIN_SHARED_PIECES
    runs: dict[tuple[object, ...], int] = {}
    for a in range(min(RESUME_SEARCH_PIECES, len(first) - i - n + 1)):
        runs.setdefault(tuple(first[i + a : i + a + n]), a)
    offsets = [
        (runs[key], b)
        for b in range(min(RESUME_SEARCH_PIECES, len(second) - j - n + 1))
        if (key := tuple(second[j + b : j + b + n])) in runs
    ]
    return min(offsets, key=sum, default=None)


class PrefixSharing(msgspec.Struct, kw_only=True):
    """Group of recent prompts with a shared prefix, as `/stats` shows it; no text of a prompt.

    `looks_like` is the kind of text at the difference (a date, a UUID …), `alike_after` the tokens
    behind it that are alike again but that a cache cannot reuse. `text` and `outliers` are
    sentences.
    """

    requests: int
    shared_tokens: int
    median_length: float
    looks_like: str
    alike_after: int
    text: str
    outliers: list[str]


class RecentPrompts:
    """The beginnings of the last prompts, and the prefixes that they share, refreshed on demand."""

    def __init__(self, clock: Clock) -> None:
        self.shared_prefixes: list[PrefixSharing] = []
        self._clock = clock
        self._prompts: deque[list[int]] = deque(maxlen=MAX_PROMPTS)
        self._fresh_until_s = -float("inf")
        self._num_prompts = self._num_compared = 0

    def remember(self, prompt: list[int]) -> None:
        """Store the beginning of a prompt in place of the oldest one."""
        self._prompts.append(prompt[:MAX_TOKENS])
        self._num_prompts += 1

    @property
    def due(self) -> bool:
        """Return whether there are new prompts and the time share allows a comparison."""
        return self._num_prompts > self._num_compared and self._clock.now_s() >= self._fresh_until_s

    def refresh(self, decode: Callable[[list[int]], str | None] | None) -> None:
        """Compare the prompts; `decode` is needed for the kinds of differences. Thread-safe."""
        started_s = self._clock.now_s()
        self._num_compared = self._num_prompts

        def as_text(ids: Pieces) -> str:
            return (decode and decode([int(i) for i in ids])) or ""

        groups = find_shared_prefixes(list(self._prompts), decode=as_text if decode else None)
        self.shared_prefixes = [
            PrefixSharing(
                requests=group.requests,
                shared_tokens=group.shared,
                median_length=group.median_length,
                looks_like=group.looks_like,
                alike_after=group.alike_after,
                text=group.sentence,
                outliers=[parting.sentence for parting in group.outliers],
            )
            for group in groups[:MAX_GROUPS_SHOWN]
        ]
        spent_s = self._clock.now_s() - started_s
        self._fresh_until_s = started_s + spent_s / MAX_TIME_SHARE
