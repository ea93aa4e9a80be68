"""Which upstream has seen which beginnings of prompts, in pages of bytes.

    page 0 of 256 bytes ─► key 0 = hash(salt, page 0)
    page 1              ─► key 1 = hash(key 0, page 1)

Equal keys mean equal bytes from the first on. Each upstream remembers as many pages as its cache
holds, the least recently used go first, and none after it has restarted.
"""

from collections import OrderedDict

PAGE_BYTES = 256
MAX_PAGES = 2048
"""Of one prompt: what lies behind half a megabyte is not compared."""


def page_keys(salt: str, prompt: bytes) -> list[int]:
    """The keys of the full pages of a prompt; 64 bits each, of this process alone."""
    key, keys = hash(salt), []
    for at in range(0, min(len(prompt), MAX_PAGES * PAGE_BYTES) - PAGE_BYTES + 1, PAGE_BYTES):
        key = hash((key, prompt[at : at + PAGE_BYTES]))
        keys.append(key)
    return keys


class PageHistory:
    """The pages that one upstream has seen."""

    def __init__(self, max_bytes: int) -> None:
        self.max_pages = max_bytes // PAGE_BYTES
        self._pages: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._pages)

    def prefix_bytes(self, keys: list[int]) -> int:
        """Bytes from the first on that it has seen."""
        count = 0
        for key in keys:
            if key not in self._pages:
                break
            count += 1
        return count * PAGE_BYTES

    def add(self, keys: list[int]) -> None:
        """It is sent a prompt with these pages; the first are the last to be forgotten."""
        for key in reversed(keys):
            self._pages[key] = None
            self._pages.move_to_end(key)
        while len(self._pages) > self.max_pages:
            self._pages.popitem(last=False)

    def forget(self) -> None:
        """It has restarted."""
        self._pages.clear()
