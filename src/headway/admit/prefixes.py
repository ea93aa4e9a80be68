"""Prompt prefixes that an engine has computed lately, as the server remembers them.

The server decides on admission without asking the engine, so it keeps hashes of the prompts that
have had a first token, page by page and by owner, at most as many pages as the engine has KV memory
for. This is an estimate: the engine may have evicted other pages than those forgotten here.
Worked example, pages of 64: a system prompt of 1,500 tokens and a question of 150 were computed. Of
the same system prompt with another question 1,472 tokens are cached, and 178 are to be computed.
"""

from collections import OrderedDict

PAGE_TOKENS = 64
MAX_PAGES = 65_536
"""Upper bound of the pages remembered, however large the KV memory is: four million tokens in about
seven megabytes. The least recently used pages are dropped first."""


class ComputedPrefixes:
    """LRU set of page hashes; each hash covers the owner, its page and all pages before it."""

    def __init__(self, max_pages: int = MAX_PAGES) -> None:
        self.max_pages = max_pages
        self._pages: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._pages)

    def reset(self, num_tokens: int) -> None:
        """Forget all pages: an engine starts with empty KV memory for `num_tokens` tokens."""
        self.max_pages = min(max(num_tokens // PAGE_TOKENS, 1), MAX_PAGES)
        self._pages.clear()

    def num_cached(self, pages: list[int], num_tokens: int) -> int:
        """Return how many of the first tokens of a prompt are cached, never its last token.

        The prompt has `num_tokens` tokens in `pages`; pages that match become the most recent.
        """
        count = 0
        for page in pages:
            if page not in self._pages:
                break
            self._pages.move_to_end(page)
            count += PAGE_TOKENS
        return min(count, max(num_tokens - 1, 0))

    def add(self, pages: list[int]) -> None:
        """Remember the pages of a computed prompt."""
        for page in pages:
            self._pages[page] = None
            self._pages.move_to_end(page)
        while len(self._pages) > self.max_pages:
            self._pages.popitem(last=False)


def page_hashes(salt: str, prompt: list[int]) -> list[int]:
    """Return one hash for each whole page of a prompt, of that page and all before it."""
    page, pages = hash(salt), list[int]()
    for start in range(0, len(prompt) - PAGE_TOKENS + 1, PAGE_TOKENS):
        page = hash((page, *prompt[start : start + PAGE_TOKENS]))
        pages.append(page)
    return pages
