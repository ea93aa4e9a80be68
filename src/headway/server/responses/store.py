"""Stored responses: what can be asked for again, gone on from, or taken back, within a bound.

In memory, the least recently used first to go; a restart forgets all of them. An entry keeps its
own input and output; a conversation is the chain of `previous_response_id`. Each is found by the
name of the key that made it and its id, so that no key reads, replaces or deletes an entry of
another, whatever ids it sends. The event loop keeps and drops entries while the threads that
prepare prompts look for them.
"""

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec

from headway.core.errors import RequestError

MAX_CHAIN = 10_000
Place = tuple[str, str]
"""The owner of a response and its id."""
ENTRY_BYTES = 400
"""What an entry holds besides its JSON: objects, ids, its place in the table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One response: its object and its input items, as JSON; `task` still generates it."""

    response_id: str
    owner: str
    previous_id: str | None
    items: bytes
    response: bytes = b""
    task: asyncio.Task[None] | None = None

    @property
    def place(self) -> Place:
        """Where it is kept."""
        return self.owner, self.response_id

    @property
    def size(self) -> int:
        """Bytes of memory."""
        return ENTRY_BYTES + len(self.items) + len(self.response)

    def input_items(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = msgspec.json.decode(self.items)
        return found

    def output_items(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = msgspec.json.decode(self.response)["output"]
        return found


class ResponseStore:
    """Entries by owner and id, the most recently used last."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.num_bytes = 0
        self.tasks: set[asyncio.Task[None]] = set()
        """What is generated in the background, stored or already forgotten."""
        self._lock = threading.Lock()
        self._entries: OrderedDict[Place, Entry] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, entry: Entry) -> None:
        """Keep `entry`, in place of its owner's with the same id; the oldest make room."""
        with self._lock:
            self._drop(entry.place)
            self._entries[entry.place] = entry
            self.num_bytes += entry.size
            while self.num_bytes > self.limit_bytes and self._entries:
                self._drop(next(iter(self._entries)))

    def _drop(self, place: Place) -> None:
        """Forget an entry, if it is there; the caller holds the lock."""
        entry = self._entries.pop(place, None)
        if entry is not None:
            self.num_bytes -= entry.size

    def find(self, response_id: str, owner: str) -> Entry | None:
        """The entry, if it is there and `owner`'s."""
        with self._lock:
            entry = self._entries.get((owner, response_id))
            if entry is not None:
                self._entries.move_to_end(entry.place)
            return entry

    def get(self, response_id: str, owner: str) -> Entry:
        """The entry; RequestError 404 without one."""
        entry = self.find(response_id, owner)
        if entry is None:
            raise RequestError(
                f"There is no response {response_id[:80]!r}.",
                param="response_id",
                code="response_not_found",
                status=404,
            )
        return entry

    def delete(self, response_id: str, owner: str) -> None:
        """Forget a response and end what still generates it; RequestError 404 without one."""
        entry = self.get(response_id, owner)
        with self._lock:
            self._drop(entry.place)
        if entry.task is not None:
            entry.task.cancel()

    def chain(self, response_id: str | None, owner: str) -> list[Entry]:
        """The responses that lead up to and include `response_id`, the first one first."""
        found: list[Entry] = []
        while response_id is not None:
            entry = self.find(response_id, owner)
            if entry is None or len(found) == MAX_CHAIN:
                raise RequestError(
                    f"The response {response_id[:80]!r} is not stored here"
                    f"{' any more' if found else ''}; send the conversation as input.",
                    param="previous_response_id",
                    code="previous_response_not_found",
                )
            found.append(entry)
            response_id = entry.previous_id
        return found[::-1]

    def items(self, item_ids: Iterable[str], owner: str) -> dict[str, dict[str, Any]]:
        """Those of the items that are stored: msg_<response>_0 is of resp_<response>.

        Each response is read once, however many of its items are asked for.
        """
        wanted = set(item_ids)
        found: dict[str, dict[str, Any]] = {}
        for stem in {item_id.partition("_")[2].rpartition("_")[0] for item_id in wanted}:
            entry = self.find("resp_" + stem, owner)
            for item in [*entry.input_items(), *entry.output_items()] if entry else ():
                if item.get("id") in wanted:
                    found.setdefault(item["id"], item)
        return found

    def check_integrity(self) -> None:
        """Raise AssertionError where the books are wrong."""
        assert self.num_bytes == sum(entry.size for entry in self._entries.values())
        assert self.num_bytes <= self.limit_bytes
        assert all(place == entry.place for place, entry in self._entries.items())
