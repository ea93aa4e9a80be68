"""The queues before the engines of one model: one for each, and which of them a request joins."""

from collections.abc import Iterator
from dataclasses import dataclass

from headway.admit.forecast import Forecast, QueueEntry
from headway.admit.route import Candidate, choose_engine
from headway.admit.seen import Seen
from headway.core.records import StepRecord


@dataclass(slots=True)
class Line:
    """The queue before one engine, what that has computed, and how many requests it holds.

    `takes` is false while it is dead: newcomers go to the others. `begins` is false where it goes
    on with what others have begun: newcomers go there only where nobody else is.
    """

    forecast: Forecast
    seen: Seen | None
    num_requests: int = 0
    takes: bool = True
    begins: bool = True

    def measured(
        self, entry: QueueEntry, lengths: list[int], pages: list[list[int]] | None
    ) -> None:
        """The prompts of `entry`, as far as this engine would have to compute them."""
        found = None
        if self.seen is not None and pages is not None:
            found = [*map(self.seen.found, pages, lengths)]
        self.forecast.measured(entry, lengths, found)


class Lines:
    """Every entry is in one of them, the one that its `engine` says."""

    def __init__(self, lines: list[Line]) -> None:
        self.of = lines
        self.remember = any(line.seen is not None for line in lines)
        """Whether it is known what engines have computed."""

    @property
    def entries(self) -> Iterator[QueueEntry]:
        """All that wait, before whichever engine."""
        for line in self.of:
            yield from line.forecast.entries

    @property
    def taking(self) -> list[int]:
        """The engines that take requests; all where none does, for the first that is back."""
        every = range(len(self.of))
        taking = [n for n in every if self.of[n].takes] or list(every)
        return [n for n in taking if self.of[n].begins] or taking

    def line_of(self, entry: QueueEntry) -> Line:
        """The queue that it stands in."""
        return self.of[entry.engine]

    def count(self, **like: object) -> int:
        """Prompts that wait of entries with these fields: count(user="alice")."""
        return sum(line.forecast.count(**like) for line in self.of)

    # ── of a request ────────────────────────────────────────────────────────────────────────

    def enter(self, entry: QueueEntry) -> None:
        """A request is here; before its prompts are known it stands where the fewest are."""
        entry.engine = min(self.taking, key=lambda n: self.of[n].num_requests)
        line = self.line_of(entry)
        line.num_requests += 1
        line.forecast.enter(entry)

    def place(self, entry: QueueEntry, lengths: list[int], pages: list[list[int]] | None) -> None:
        """Choose the engine that is to answer, by its queue and by what it has computed.

        `pages` of each prompt, as of `seen.pages_of`; None where they are not known.
        """
        taking = self.taking
        if len(taking) > 1:
            candidates = []
            for number in taking:
                line = self.of[number]
                line.measured(entry, lengths, pages)
                held = line.num_requests - (number == entry.engine)
                candidates.append(Candidate(line.forecast.wait_s(entry), held))
            self._hand_over(entry, taking[choose_engine(candidates)])
        self.line_of(entry).measured(entry, lengths, pages)

    def leave(self, entry: QueueEntry) -> None:
        """The request is over."""
        line = self.line_of(entry)
        line.num_requests -= 1
        line.forecast.leave(entry)

    def _hand_over(self, entry: QueueEntry, engine: int) -> None:
        old, new = self.line_of(entry), self.of[engine]
        old.num_requests -= 1
        new.num_requests += 1
        old.forecast.hand_over(entry, new.forecast)
        entry.engine = engine

    # ── of an engine ────────────────────────────────────────────────────────────────────────

    def on_record(self, record: StepRecord) -> None:
        """An engine has made a step."""
        self.of[record.engine].forecast.on_record(record)

    def on_began(self, engine: int, kv_tokens: int) -> None:
        """An engine is ready: it has computed nothing yet, and has room for so many tokens."""
        line = self.of[engine]
        line.takes = True
        if line.seen is not None:
            line.seen.start_over(kv_tokens)

    def on_gone(self, engine: int) -> None:
        """An engine has died."""
        self.of[engine].takes = False

    def on_moved(self, engine_id: int, engine: int) -> None:
        """The request of this number is answered by `engine` from now on."""
        for line in self.of:
            entry = line.forecast.entry_of(engine_id)
            if entry is not None:
                self._hand_over(entry, engine)
                return

    def on_handed(self, engine_id: int, engine: int) -> None:
        """`engine` goes on with the request of this number, whose first token is here.

        Where others of its prompts wait for theirs, it stands where they wait.
        """
        for line in self.of:
            entry = line.forecast.entry_of(engine_id)
            if entry is not None and entry not in line.forecast.entries:
                self._hand_over(entry, engine)

    def on_roles(self, begins: list[bool]) -> None:
        """These engines begin requests, the others go on with them."""
        for line, own in zip(self.of, begins, strict=True):
            line.begins = own

    def check_integrity(self) -> None:
        """Every entry stands in its own queue; counts of the queues."""
        for number, line in enumerate(self.of):
            line.forecast.check_integrity()
            assert all(entry.engine == number for entry in line.forecast.entries)
            assert line.num_requests >= 0
