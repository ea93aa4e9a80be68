"""Decode steps as CUDA graphs: all operations of R rows are one launch, over inputs at fixed
addresses.

A graph repeats the operations that were captured, on the same addresses. So the inputs of all
graphs lie in one memory that is never moved, and a step writes them in one copy. There is a graph
for each (rows, tokens of context): a step takes the smallest that fits, and is padded with rows
that compute token 0 in the null block. Example with blocks of 16:

    5 decodes, the longest context 700      rows 8, context 2,048: tables 128 wide
    inputs    ids       [t t t t t 0 0 0]       positions  [… 0 0 0]
              slots     [s s s s s 0 0 0]       lengths    [… 1 1 1]
              temperature, min_p, top_k, top_p, a random number, the row of the state: a row each
    out       hidden states, flags of what is not finite, and tokens of 8 rows; 5 are the step's

Most rows use only temperature and filters: their graphs have head and sampling behind the forward.
Where a row has a grammar, penalties, other edits or log-probabilities, the step's graph ends with
the forward, and all rows are sampled behind it.

With our own kernels (`triton/`) the bits of a row depend neither on the number of rows nor on the
width of the table. Prompts and drafts run without a graph, as do steps without a captured one;
these graphs are captured when the engine is idle. All graphs share one memory pool, so the output
of a graph is valid until the next step.
"""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from headway.core.clock import SystemClock
from headway.core.plan import NULL_BLOCK
from headway.runtime.cuda.staging import ALIGNMENT

DRAW_INPUTS = ("greedy", "temperature", "min_p", "top_k", "top_p", "u")
"""The sampling inputs of a row, one number each."""
SHORTEST_CONTEXT_TOKENS, CONTEXT_FACTOR = 2048, 4
"""Tokens of the shortest contexts of graphs, and the factor to each next length."""
MAX_ROWS = 256


class GraphKey(NamedTuple):
    """The shape of a graph: rows, blocks per table, and whether it samples."""

    rows: int
    width: int
    draws: bool


class StepOut(NamedTuple):
    """Outputs of a decode step, a row each: hidden states, (R, H), flags of rows that are not
    finite, and tokens if it samples; with experts also the number of experts read."""

    hidden_RH: Tensor
    bad_R: Tensor
    chosen_R: Tensor | None
    experts_read: Tensor | None

    def first(self, count: int) -> "StepOut":
        """Return the outputs of the first rows."""
        chosen_R = None if self.chosen_R is None else self.chosen_R[:count]
        return StepOut(self.hidden_RH[:count], self.bad_R[:count], chosen_R, self.experts_read)


class Graph(Protocol):
    """Operations that are captured once and replayed."""

    def capture(self, run: Callable[[], StepOut]) -> StepOut:
        """Capture the operations of `run`; return its output, which each replay overwrites."""
        ...

    def replay(self) -> None:
        """Queue the operations again."""
        ...


class DeviceGraph:
    """A CUDA graph; all of them share one memory pool."""

    pool: Any = None

    def __init__(self) -> None:
        self._graph = torch.cuda.CUDAGraph()

    def capture(self, run: Callable[[], StepOut]) -> StepOut:
        """Run once, so that libraries and kernels are loaded, then run again to capture."""
        here, aside = torch.cuda.current_stream(), torch.cuda.Stream()
        aside.wait_stream(here)
        with torch.cuda.stream(aside):
            run()
        here.wait_stream(aside)
        if DeviceGraph.pool is None:
            DeviceGraph.pool = torch.cuda.graph_pool_handle()
        with torch.cuda.graph(self._graph, pool=DeviceGraph.pool):
            return run()

    def replay(self) -> None:
        self._graph.replay()


def row_counts(most: int) -> list[int]:
    """Return the numbers of rows that graphs are captured for, up to `most`.

    >>> row_counts(21)
    [1, 2, 4, 8, 16, 21]
    """
    counts, most = [1, 2, 4, *range(8, 64, 8), *range(64, MAX_ROWS, 16)], min(most, MAX_ROWS)
    return [*(count for count in counts if count < most), most]


def widths(most_blocks: int, block_size: int) -> list[int]:
    """Return the table widths of graphs, in blocks, up to the longest context.

    >>> widths(1000, 16)
    [128, 512, 1000]
    """
    width, result = -(-SHORTEST_CONTEXT_TOKENS // block_size), list[int]()
    while width < most_blocks:
        result.append(width)
        width *= CONTEXT_FACTOR
    return [*result, most_blocks]


@dataclass(slots=True, kw_only=True)
class CapturedGraph:
    """A graph and its output."""

    graph: Graph
    out: StepOut


@dataclass(slots=True, kw_only=True)
class Graphs:
    """The graphs of one model; `rows` and `widths` are the shapes to capture.

    `memory` holds the inputs of the current step, for every graph.
    """

    rows: list[int]
    widths: list[int]
    memory: Tensor
    make: Callable[[], Graph]
    captured: dict[GraphKey, CapturedGraph] = field(default_factory=dict)
    missing: dict[GraphKey, int] = field(default_factory=dict)
    """Keys without a graph, and how many steps lacked it."""
    num_bytes: int = 0
    """Device memory taken by captures."""
    seconds: float = 0.0

    def key_of(self, num_rows: int, width: int, draws: bool) -> GraphKey | None:
        """Return the smallest key that holds this many rows and blocks, None where none does."""
        if num_rows > self.rows[-1] or width > self.widths[-1]:
            return None
        rows = self.rows[bisect_left(self.rows, num_rows)]
        return GraphKey(rows, self.widths[bisect_left(self.widths, width)], draws)

    def replay(self, key: GraphKey) -> StepOut | None:
        """Replay the graph of `key`, whose inputs are in place; return its output, None without a
        graph.

        Where only the graph with the other value of `draws` exists, it is used; tokens that are not
        needed are dropped.
        """
        captured_graph = self.captured.get(key)
        if captured_graph is None:
            self.missing[key] = self.missing.get(key, 0) + 1
            captured_graph = self.captured.get(key._replace(draws=not key.draws))
        if captured_graph is None:
            return None
        captured_graph.graph.replay()
        return captured_graph.out if key.draws else captured_graph.out._replace(chosen_R=None)

    def capture(
        self, keys: list[GraphKey], prepare: Callable[[GraphKey], Callable[[], StepOut]]
    ) -> None:
        """Capture the missing keys, the largest first, so that its memory holds the others' too.

        `prepare` puts the inputs of a key in place and returns the function to capture.
        """
        clock = SystemClock()
        started_s, before = clock.now_s(), reserved_bytes(self.memory.device)
        for key in sorted(set(keys) - self.captured.keys(), reverse=True):
            graph = self.make()
            self.captured[key] = CapturedGraph(graph=graph, out=graph.capture(prepare(key)))
            self.missing.pop(key, None)
        self.num_bytes += reserved_bytes(self.memory.device) - before
        self.seconds += clock.now_s() - started_s

    def first_keys(self, draws: bool) -> list[GraphKey]:
        """Return the keys of the shortest contexts, which are captured at the start."""
        return [GraphKey(rows, self.widths[0], draws) for rows in self.rows]

    @property
    def summary(self) -> tuple[str, str]:
        """(number of graphs, their cost), for the start-up lines."""
        rows, most = f"{len(self.captured)} of decode steps", self.rows[-1]
        what = f"{self.num_bytes / 2**20:.0f} MiB, captured in {self.seconds:.1f} s"
        return rows, f"up to {most} rows; {what}"


def reserved_bytes(device: torch.device) -> int:
    """Return the bytes of a GPU that this process has reserved; 0 for other devices."""
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else 0


def input_bytes(key: GraphKey, num_groups: int) -> int:
    """Return the most bytes of the inputs of a key, in the layout of `Staging.send`."""
    rows, width, _ = key
    each = [8 * rows] * (3 + num_groups) + [4 * (rows + 1)] * 2 + [4 * rows * width] * num_groups
    each += [8 * rows] * len(DRAW_INPUTS)
    return sum(size + ALIGNMENT for size in each)


def pad_inputs(
    arrays: list[np.ndarray], rows: int, width: int, num_groups: int
) -> list[np.ndarray]:
    """Return ids, positions, slots by group, then tables by group, padded to `rows` and `width`.

    Padding rows compute token 0 at position 0, in slot 0 of the null block.
    """
    flat = [pad_array(array, (rows,)) for array in arrays[: 2 + num_groups]]
    tables = [pad_array(table_SB, (rows, width)) for table_SB in arrays[2 + num_groups :]]
    return [*flat, *(table_RB.astype(np.int32) for table_RB in tables)]


def pad_array(array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Return an array of this shape that begins with `array` and is NULL_BLOCK (0) elsewhere."""
    out = np.full(shape, NULL_BLOCK, array.dtype)
    out[tuple(slice(0, size) for size in array.shape)] = array
    return out
