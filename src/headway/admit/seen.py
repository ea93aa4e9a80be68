"""Which beginnings of prompts the engine has computed lately: what it will probably find in memory.

The server decides on admission without asking the engine, so it remembers the prompts that had a
first token, page by page, by owner: no more pages than the engine has KV memory for. An estimate:
the engine may have evicted others than are forgotten here.
Worked example, pages of 64: a system prompt of 1,500 tokens and a question of 150 were computed;
the same with another question is seen up to 1,472, and 178 are to be computed.
"""

from collections import OrderedDict

PAGE_TOKENS = 64
MOST_PAGES = 65_536
"""Four million tokens, some seven megabytes: the most, however much KV memory there is. The least
recently used go first."""


class Seen:
    """Hashes of pages, each with all that comes before it, and whose they are."""

    def __init__(self, most_pages: int = MOST_PAGES) -> None:
        self.most_pages = most_pages
        self._pages: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._pages)

    def start_over(self, num_tokens: int) -> None:
        """An engine begins, with nothing in memory and room for so many tokens."""
        self.most_pages = min(max(num_tokens // PAGE_TOKENS, 1), MOST_PAGES)
        self._pages.clear()

    def found(self, pages: list[int], num_tokens: int) -> int:
        """How many tokens a prompt of `num_tokens` in these pages begins with that were computed,
        but for its last."""
        count = 0
        for page in pages:
            if page not in self._pages:
                break
            self._pages.move_to_end(page)
            count += PAGE_TOKENS
        return min(count, max(num_tokens - 1, 0))

    def add(self, pages: list[int]) -> None:
        """A prompt of these pages is computed."""
        for page in pages:
            self._pages[page] = None
            self._pages.move_to_end(page)
        while len(self._pages) > self.most_pages:
            self._pages.popitem(last=False)


def pages_of(salt: str, prompt: list[int]) -> list[int]:
    """One hash for each whole page, of it and all before it."""
    page, pages = hash(salt), list[int]()
    for start in range(0, len(prompt) - PAGE_TOKENS + 1, PAGE_TOKENS):
        page = hash((page, *prompt[start : start + PAGE_TOKENS]))
        pages.append(page)
    return pages
