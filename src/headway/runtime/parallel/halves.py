"""The two halves of a layer on different ranks: attention on one, the MLPs on another.

Rank 0, which samples, has the embedding, norms, attention with its KV, and the head; rank 1 has the
MLPs of all layers, dense or with experts. The input of a layer's MLP is sent to rank 1, and its
output comes back (as in MegaScale-Infer, Zhu et al. 2025):

    rank 0   norm, attention, norm ── rows (T, H) ──▶   rank 1   MLP ── rows (T, H) ──▶   rank 0

Each product is computed on one rank, so the numbers are those of one rank. The ranks work in turns.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from headway.runtime.native.lower import recordable
from headway.runtime.parallel.group import RankLostError
from headway.runtime.parallel.stage import Half, Link, StageError


class RemoteMlp(nn.Module):
    """The placeholder of a layer's MLP that another rank has."""

    def __init__(self, link: Link) -> None:
        super().__init__()
        self._link = link

    def forward(self, x_TH: Tensor, step: Any = None) -> Tensor:
        return self._record(x_TH, self._compute_remotely)

    @recordable("over_ranks")
    def _record(self, x_TH: Tensor, work: Callable[[Tensor], Tensor]) -> Tensor:
        return work(x_TH)

    def _compute_remotely(self, x_TH: Tensor) -> Tensor:
        self._link.send(x_TH)
        out_TH = torch.empty(x_TH.shape, dtype=x_TH.dtype)
        self._link.receive(out_TH)
        return out_TH


def drop_other_half(model: Any, half: Half) -> None:
    """Remove from `model` the modules that the other rank has."""
    for layer in model.layers:
        if not half.has_mlps:
            layer.mlp = RemoteMlp(half.link)
            continue
        for name, _ in [*layer.named_children()]:
            if name != "mlp":
                setattr(layer, name, nn.Identity())
    if half.has_mlps:
        model.embedding, model.norm, model.head = (nn.Identity() for _ in range(3))


def run_attention_half(half: Half, forward: Callable[[], Tensor]) -> Tensor:
    """Run `forward`, whose MLPs the other rank has; an error here is reported to that rank."""
    try:
        return forward()
    except (RankLostError, StageError):
        raise
    except Exception:
        half.link.send(None)
        raise


def run_mlp_half(half: Half, mlps: Iterable[Callable[[Tensor], Tensor]], x_TH: Tensor) -> None:
    """Run the MLPs of all layers on received rows, shaped as `x_TH`. Raises StageError."""
    for mlp in mlps:
        half.link.receive(x_TH)
        try:
            out_TH = mlp(x_TH)
        except Exception:
            half.link.send(None)
            raise
        half.link.send(out_TH)
