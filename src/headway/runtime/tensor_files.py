"""Read tensors of safetensors files on demand, as views of memory maps."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from headway.core.errors import CheckpointError
from headway.runtime.checkpoint_files import TensorEntry, read_entries, shown


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turn errors of the file system or the format into CheckpointErrors."""
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path.name} cannot be read: {shown(error)}.", "Copy the file again."
        ) from error


def check_finite(name: str, weight: Tensor) -> None:
    """Raise CheckpointError where a weight holds NaN or an infinity; its sum is tested first."""
    if weight.is_floating_point() and weight.element_size() > 1 and weight.device.type != "meta":
        total = weight.sum(dtype=torch.float32)
        if not bool(total.isfinite()) and not bool(weight.isfinite().all()):
            raise CheckpointError(
                f"{shown(name)} holds numbers that are not finite (NaN or infinity).",
                "Copy the weights again; where they were trained or converted, look for an "
                "overflow.",
            )


class TensorFiles:
    """The tensors of several files by name; a context manager that closes the files."""

    def __init__(self, files: list[Path]) -> None:
        self.entries: dict[str, TensorEntry] = {}
        for path in files:
            for name, entry in read_entries(path).items():
                if name in self.entries:
                    raise CheckpointError(
                        f"{shown(name)} is in {self.entries[name].path.name} and in {path.name}.",
                        "Remove the files that are of another model.",
                    )
                self.entries[name] = entry
        self._open: dict[Path, Any] = {}
        self._stack = ExitStack()

    def __enter__(self) -> "TensorFiles":
        return self

    def __exit__(self, *_: object) -> None:
        self._open.clear()
        self._stack.close()

    def read(self, name: str) -> Tensor:
        """Read one tensor; its file stays open until the end."""
        return self._read(self.entries[name].path, name)

    def _read(self, path: Path, name: str) -> Tensor:
        with readable(path):
            if path not in self._open:
                self._open[path] = self._stack.enter_context(safe_open(path, framework="pt"))
            tensor: Tensor = self._open[path].get_tensor(name)
            return tensor


Cut = Callable[[Tensor], Tensor]


class CutFiles(TensorFiles):
    """`TensorFiles` where a tensor of a file holds several; `pieces(name, shape)` lists them."""

    def __init__(
        self,
        files: list[Path],
        pieces: Callable[[str, Callable[[], Sequence[int]]], list[tuple[str, Cut]]],
    ) -> None:
        super().__init__(files)
        self._stored: dict[str, tuple[str, Cut]] = {}
        stored, self.entries = self.entries, {}
        for name, entry in stored.items():
            for piece, cut in pieces(name, lambda entry=entry: entry.shape):  # type: ignore[misc]
                if piece in self.entries:
                    raise CheckpointError(
                        f"{shown(name)} holds {shown(piece)}, which is there twice.",
                        "Remove the files that are of another model.",
                    )
                shape = tuple(cut(torch.empty(entry.shape, device="meta")).shape)
                self.entries[piece] = TensorEntry(entry.path, entry.dtype, shape)
                self._stored[piece] = name, cut

    def read(self, name: str) -> Tensor:
        """Read one piece; its file stays open until the end."""
        stored, cut = self._stored[name]
        return cut(self._read(self.entries[name].path, stored))
