"""Which prompt prefixes an upstream has seen, in pages of bytes.

    page 0 of 256 bytes ─► key 0 = hash(salt, page 0)
    page 1              ─► key 1 = hash(key 0, page 1)

Equal keys mean equal prefixes. Each upstream keeps as many pages as its cache holds, in LRU order;
they are dropped when it restarts.
"""

from collections import OrderedDict

PAGE_BYTES = 256
MAX_PAGES = 2048
"""Pages per prompt: bytes beyond half a megabyte are not compared."""


def page_keys(salt: str, prompt: bytes) -> list[int]:
    """Return the keys of the full pages of a prompt: 64 bits each, valid in this process only."""
    key, keys = hash(salt), []
    for at in range(0, min(len(prompt), MAX_PAGES * PAGE_BYTES) - PAGE_BYTES + 1, PAGE_BYTES):
        key = hash((key, prompt[at : at + PAGE_BYTES]))
        keys.append(key)
    return keys


class PageHistory:
    """Pages that one upstream has seen, least recently used first."""

    def __init__(self, max_bytes: int) -> None:
        self.max_pages = max_bytes // PAGE_BYTES
        self._pages: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._pages)

    def prefix_bytes(self, keys: list[int]) -> int:
        """Return the bytes of the longest prefix that was seen."""
        count = 0
        for key in keys:
            if key not in self._pages:
                break
            count += 1
        return count * PAGE_BYTES

    def add(self, keys: list[int]) -> None:
        """Add the pages of a prompt; its first pages are evicted last."""
        for key in reversed(keys):
            self._pages[key] = None
            self._pages.move_to_end(key)
        while len(self._pages) > self.max_pages:
            self._pages.popitem(last=False)

    def forget(self) -> None:
        """Drop all pages, because the upstream restarted."""
        self._pages.clear()
