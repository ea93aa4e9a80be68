"""Rows of training tokens, drawn from several sources by share.

A source has all its documents concatenated, a loss weight per token, and the starts of documents; a
training row begins at one of them. The rows of a step depend only on seed and step.
"""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from headway.core.errors import UsageError

Document = list[tuple[list[int], float]]
"""Pieces of a document: token ids, and the loss weight of each of them."""
SEED_STRIDE = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSource:
    """N tokens, their loss weights, document starts, and the source's share.

    `left_out` counts empty documents, which an evaluation tests.
    """

    name: str
    share: float
    tokens_N: Tensor
    weights_N: Tensor
    starts: Tensor
    left_out: int = 0

    @staticmethod
    def of(name: str, share: float, documents: Iterable[Document]) -> "TokenSource":
        """[[([7, 8], 0), ([9], 1)], [([5], 1)]] → tokens 7 8 9 5, weights 0 0 1 1, starts 0 3."""
        tokens, counts, starts, left_out = array("i"), array("f"), array("i"), 0
        for document in documents:
            if not document:
                left_out += 1
                continue
            starts.append(len(tokens))
            for ids, weight in document:
                tokens.extend(ids)
                counts.extend([weight] * len(ids))
        return TokenSource(
            name=name,
            share=share,
            tokens_N=torch.tensor(tokens, dtype=torch.int32),
            weights_N=torch.tensor(counts, dtype=torch.float16),
            starts=torch.tensor(starts, dtype=torch.int32),
            left_out=left_out,
        )

    def rows(self, count: int, length: int, generator: torch.Generator) -> tuple[Tensor, ...]:
        """Return inputs (count, length), the tokens that follow them, and their loss weights."""
        usable = int(torch.searchsorted(self.starts, len(self.tokens_N) - length))
        picked = self.starts[torch.randint(usable, (count,), generator=generator)]
        index = picked[:, None] + torch.arange(length + 1)
        tokens = self.tokens_N[index].long()
        return tokens[:, :-1], tokens[:, 1:], self.weights_N[index][:, 1:].float()


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """Sources and how rows are drawn from them: `num_rows` of `length` tokens a step."""

    sources: list[TokenSource]
    num_rows: int
    length: int
    seed: int

    def __post_init__(self) -> None:
        for source in self.sources:
            if len(source.tokens_N) <= self.length:
                raise UsageError(
                    f"{source.name} has {len(source.tokens_N)} tokens, less than one row.",
                    f"Give more text, or rows shorter than {self.length} tokens (--row-length).",
                )
        if self.num_rows < len(self.sources):
            raise UsageError(
                f"{self.num_rows} rows a step cannot hold {len(self.sources)} sources.",
                "Raise --step-tokens or lower --row-length.",
            )

    @property
    def shares(self) -> list[float]:
        """Shares of the sources, which sum to 1."""
        total = sum(source.share for source in self.sources)
        return [source.share / total for source in self.sources]

    def split(self) -> list[int]:
        """Return the rows per source, at least one: 9 rows with shares 0.7 and 0.3 are 6 and 3."""
        counts = [max(1, int(share * self.num_rows)) for share in self.shares]
        while sum(counts) < self.num_rows:
            short = [s * self.num_rows - c for s, c in zip(self.shares, counts, strict=True)]
            counts[short.index(max(short))] += 1
        while sum(counts) > self.num_rows:
            counts[counts.index(max(counts))] -= 1
        return counts

    def batch(self, step: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return inputs, targets and their weights of a step, (B, T), in the order of the
        sources."""
        generator = torch.Generator().manual_seed(self.seed * SEED_STRIDE + step)
        parts = [
            source.rows(count, self.length, generator)
            for source, count in zip(self.sources, self.split(), strict=True)
        ]
        inputs, targets, weights = (torch.cat(part) for part in zip(*parts, strict=True))
        return inputs, targets, weights
