"""Stored responses, within a bound of memory: retrieved, continued or deleted by id.

They are in memory, the least recently used are dropped first, and a restart drops all. An entry has
its own input and output; a conversation is the chain of `previous_response_id`. Entries are found
by key name and id, so no key reads, replaces or deletes an entry of another one. The event loop
puts and drops entries while the threads that prepare prompts look them up.
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
ResponseKey = tuple[str, str]
"""The owner of a response and its id."""
ENTRY_BYTES = 400
"""Bytes of an entry besides its JSON: objects, ids, its place in the table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredResponse:
    """One response: its object and its input items as JSON, and the task that generates it."""

    response_id: str
    owner: str
    previous_id: str | None
    items: bytes
    response: bytes = b""
    task: asyncio.Task[None] | None = None

    @property
    def key(self) -> ResponseKey:
        """Key of the entry in the store."""
        return self.owner, self.response_id

    @property
    def size(self) -> int:
        """Bytes of memory."""
        return ENTRY_BYTES + len(self.items) + len(self.response)

    def input_items(self) -> list[dict[str, Any]]:
        items: list[dict[str, Any]] = msgspec.json.decode(self.items)
        return items

    def output_items(self) -> list[dict[str, Any]]:
        items: list[dict[str, Any]] = msgspec.json.decode(self.response)["output"]
        return items


class ResponseStore:
    """Entries by owner and id, the most recently used last."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.num_bytes = 0
        self.tasks: set[asyncio.Task[None]] = set()
        """Tasks of background responses, stored or already dropped."""
        self._lock = threading.Lock()
        self._entries: OrderedDict[ResponseKey, StoredResponse] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, entry: StoredResponse) -> None:
        """Store `entry` in place of one with the same key; drop the oldest beyond the bound."""
        with self._lock:
            self._drop(entry.key)
            self._entries[entry.key] = entry
            self.num_bytes += entry.size
            while self.num_bytes > self.limit_bytes and self._entries:
                self._drop(next(iter(self._entries)))

    def _drop(self, key: ResponseKey) -> None:
        """Drop an entry, if stored; the caller holds the lock."""
        entry = self._entries.pop(key, None)
        if entry is not None:
            self.num_bytes -= entry.size

    def find(self, response_id: str, owner: str) -> StoredResponse | None:
        """Return the entry of `owner` with this id, if stored."""
        with self._lock:
            entry = self._entries.get((owner, response_id))
            if entry is not None:
                self._entries.move_to_end(entry.key)
            return entry

    def get(self, response_id: str, owner: str) -> StoredResponse:
        """Return the entry; RequestError 404 without one."""
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
        """Drop a response and cancel its task; RequestError 404 without one."""
        entry = self.get(response_id, owner)
        with self._lock:
            self._drop(entry.key)
        if entry.task is not None:
            entry.task.cancel()

    def chain(self, response_id: str | None, owner: str) -> list[StoredResponse]:
        """Return the chain of responses up to `response_id`, the first one first."""
        entries: list[StoredResponse] = []
        while response_id is not None:
            entry = self.find(response_id, owner)
            if entry is None or len(entries) == MAX_CHAIN:
                raise RequestError(
                    f"The response {response_id[:80]!r} is not stored here"
                    f"{' any more' if entries else ''}; send the conversation as input.",
                    param="previous_response_id",
                    code="previous_response_not_found",
                )
            entries.append(entry)
            response_id = entry.previous_id
        return entries[::-1]

    def items(self, item_ids: Iterable[str], owner: str) -> dict[str, dict[str, Any]]:
        """Return the stored items by id: msg_<response>_0 is of resp_<response>.

        Each response is read once, however many of its items are asked for.
        """
        ids = set(item_ids)
        items: dict[str, dict[str, Any]] = {}
        for stem in {item_id.partition("_")[2].rpartition("_")[0] for item_id in ids}:
            entry = self.find("resp_" + stem, owner)
            for item in [*entry.input_items(), *entry.output_items()] if entry else ():
                if item.get("id") in ids:
                    items.setdefault(item["id"], item)
        return items

    def check_integrity(self) -> None:
        """Assert the byte counts and the keys."""
        assert self.num_bytes == sum(entry.size for entry in self._entries.values())
        assert self.num_bytes <= self.limit_bytes
        assert all(key == entry.key for key, entry in self._entries.items())
