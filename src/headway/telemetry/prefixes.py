"""Where prompts of one application stop sharing their prefix, and what stands there.

Given prompts as token ids or words it groups them by what they begin with and finds, for each
group, how far all go together and who leaves earlier. A date at token 212 of a system prompt costs
the cache everything behind it: "request 17 differs from the others at token 212: a date in the
system prompt; 840 tokens behind it are alike again". No I/O; `decode` turns pieces into text.
"""

import re
from collections import Counter
from collections.abc import Callable, Sequence

import msgspec

MIN_SHARED = 8
"""Fewer pieces in common are no application's prefix: a template's first tokens, an accident."""
MAJORITY = 0.8
"""Who leaves when so many go on differs from the others; below that the group parts."""
MIN_GROUP = 2
REACH = 64
"""How far behind a difference prompts are looked through to be alike again."""
AROUND = 24
"""Pieces around a difference that are shown to the patterns."""
MOST_OUTLIERS = 20
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
"""What a differing text looks like, the most telling pattern first."""

Pieces = Sequence[int] | Sequence[str]
Decode = Callable[[Pieces], str]


class Parting(msgspec.Struct, kw_only=True):
    """Request `request` leaves the others at piece `at`; `alike_after` pieces behind are alike."""

    request: int
    at: int
    text: str
    others: str
    looks_like: str
    alike_after: int
    said: str


class Sharing(msgspec.Struct, kw_only=True):
    """One application: prompts that begin alike. They part at piece `shared`."""

    requests: int
    unit: str
    shared: int
    median_length: float
    looks_like: str
    example: str
    alike_after: int
    said: str
    outliers: list[Parting] = []


def words(text: str) -> list[str]:
    """Words, runs of blanks and marks; joined they are the text again."""
    return re.findall(r"\w+|\s+|[^\w\s]", text)


def join_words(pieces: Pieces) -> str:
    """The text of words; of ids their numbers."""
    if pieces and isinstance(pieces[0], int):
        return " ".join(map(str, pieces))
    return "".join(map(str, pieces))


def find_sharing(
    prompts: Sequence[Pieces],
    *,
    names: Sequence[int] | None = None,
    system: Sequence[int] | None = None,
    decode: Decode | None = None,
    unit: str = "tokens",
) -> list[Sharing]:
    """The applications among `prompts`, the largest first.

    `names[i]` is the request's number (default i), `system[i]` how many of its pieces are the
    system prompt; without `decode` ids are not given a kind.
    """
    view = View(prompts, names or range(len(prompts)), system, decode, unit)
    found: list[Sharing] = []
    waiting = [(list(range(len(prompts))), 0)]
    while waiting:
        members, start = waiting.pop()
        if len(members) >= MIN_GROUP:
            sharing, others = view.follow(members, start)
            waiting += others
            if sharing is not None:
                found.append(sharing)
    return sorted(found, key=lambda sharing: -sharing.requests)


class View:
    """The prompts, and how they are spoken of."""

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
    ) -> tuple[Sharing | None, list[tuple[list[int], int]]]:
        """Go along with the majority from `start`; returns the application and other groups."""
        at = start
        outliers: list[tuple[int, int]] = []
        others: list[tuple[list[int], int]] = []
        while True:
            groups = self._by_next(members, at)
            value, going = max(groups.items(), key=lambda item: len(item[1]))
            if value is None or len(going) < MIN_GROUP:
                break
            leaving = [i for i in members if i not in set(going)] if len(groups) > 1 else []
            if leaving and len(going) < MAJORITY * len(members):
                if at >= MIN_SHARED and self._alike_again(list(groups.values()), at):
                    break
                branches = [g for v, g in groups.items() if v is not None and len(g) >= MIN_GROUP]
                if not self._go_on(branches, at):
                    break
                return None, [(branch, at) for branch in branches]
            if leaving and at < MIN_SHARED:
                others.append((leaving, 0))
            else:
                outliers += [(i, at) for i in leaving]
            members, at = going, at + 1
        if at < MIN_SHARED:
            return None, others
        return self._sharing(members, at, outliers), others

    def _by_next(self, members: list[int], at: int) -> dict[int | str | None, list[int]]:
        """Next piece → who has it; None for those that end here."""
        groups: dict[int | str | None, list[int]] = {}
        for i in members:
            prompt = self._prompts[i]
            groups.setdefault(prompt[at] if at < len(prompt) else None, []).append(i)
        return groups

    def _go_on(self, branches: list[list[int]], at: int) -> bool:
        """Whether the groups are applications of their own: most share a prefix's worth more."""
        inside = [
            branch
            for branch in branches
            if common(self._prompts[branch[0]], self._prompts[branch[-1]], at, at) >= MIN_SHARED
        ]
        return len(inside) >= 2

    def _alike_again(self, groups: list[list[int]], at: int) -> int:
        """Pieces alike behind a difference: the median over groups beside the largest."""
        first, *rest = sorted(groups, key=len, reverse=True)
        counts = sorted(self.alike_after(first[0], group[0], at) for group in rest[:9])
        return counts[len(counts) // 2] if counts else 0

    def alike_after(self, a: int, b: int, at: int) -> int:
        """Pieces of two prompts that are alike behind their difference at `at`."""
        first, second = self._prompts[a], self._prompts[b]
        i = j = at
        alike = 0
        for _ in range(MIN_SHARED):
            offsets = resume(first, second, i, j)
            if offsets is None:
                break
            i, j = i + offsets[0], j + offsets[1]
            run = common(first, second, i, j)
            alike, i, j = alike + run, i + run, j + run
        return alike

    def _sharing(self, members: list[int], at: int, outliers: list[tuple[int, int]]) -> Sharing:
        """What is said of one application."""
        groups = list(self._by_next(members, at).values())
        alike = self._alike_again(groups, at) if len(groups) > 1 else 0
        one, other = members[0], groups[-1][0]
        kinds = Counter(self.kind(group[0], at) for group in groups[:9])
        kind = kinds.most_common(1)[0][0] if len(groups) > 1 else ""
        lengths = sorted(len(self._prompts[i]) for i in members)
        total = len(members) + len(outliers)
        said = f"{total} requests share their first {at} {self._unit}"
        if len(groups) > 1:
            said += f" and part there{self._place(one, at)}: {kind or 'their own text'}"
        if alike:
            said += f"; {alike} {self._unit} behind it are alike again and cannot be reused"
        return Sharing(
            requests=total,
            unit=self._unit,
            shared=at,
            median_length=float(lengths[len(lengths) // 2]),
            looks_like=kind,
            example=f"{self.shown(one, at)} | {self.shown(other, at)}" if len(groups) > 1 else "",
            alike_after=alike,
            said=said + ".",
            outliers=[self._parting(i, one, place) for i, place in outliers[:MOST_OUTLIERS]],
        )

    def _parting(self, i: int, other: int, at: int) -> Parting:
        """What is said of one request that leaves early."""
        kind, alike = self.kind(i, at), self.alike_after(other, i, at)
        said = (
            f"Request {self._names[i]} differs from the others at {self._unit.removesuffix('s')} "
            f"{at}: {kind or 'another text'}{self._place(i, at)}"
        )
        if alike:
            said += f"; {alike} {self._unit} behind it are alike again"
        return Parting(
            request=self._names[i],
            at=at,
            text=self.shown(i, at),
            others=self.shown(other, at),
            looks_like=kind,
            alike_after=alike,
            said=said + ".",
        )

    def _place(self, i: int, at: int) -> str:
        """Where the difference lies, where that is known."""
        return " in the system prompt" if self._system and at < self._system[i] else ""

    def shown(self, i: int, at: int) -> str:
        """A few pieces from the difference on."""
        return self._decode(self._prompts[i][at : at + MIN_SHARED])

    def kind(self, i: int, at: int) -> str:
        """What the text at the difference looks like; "" when like nothing, or it is unreadable.

        Only the pattern that covers the difference counts: in "on 2026-11-21" it is at "21" that
        two days differ, and the date around it is what is named.
        """
        if not self._readable:
            return ""
        prompt = self._prompts[i]
        before = self._decode(prompt[max(0, at - AROUND) : at])
        text = before + self._decode(prompt[at : at + AROUND])
        place = len(before) + (len(text[len(before) :]) - len(text[len(before) :].lstrip()))
        for name, pattern in KINDS:
            for match in pattern.finditer(text):
                if match.start() <= place < match.end():
                    return name
        return ""


def common(first: Pieces, second: Pieces, i: int, j: int) -> int:
    """How many pieces are alike from i in the first and j in the second on."""
    count = 0
    for a, b in zip(first[i:], second[j:]):
        if a != b:
            break
        count += 1
    return count


def resume(first: Pieces, second: Pieces, i: int, j: int) -> tuple[int, int] | None:
    """The nearest offsets behind a difference from which MIN_SHARED pieces are alike, or None."""
    n = MIN_SHARED
    runs: dict[tuple[object, ...], int] = {}
    for a in range(min(REACH, len(first) - i - n + 1)):
        runs.setdefault(tuple(first[i + a : i + a + n]), a)
    found = [
        (runs[key], b)
        for b in range(min(REACH, len(second) - j - n + 1))
        if (key := tuple(second[j + b : j + b + n])) in runs
    ]
    return min(found, key=sum, default=None)
