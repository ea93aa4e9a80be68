"""SmoothQuant (Xiao et al. 2022): large input channels are scaled down, their weights up.

The scale of a channel is s = max|x|^α / max|w|^(1-α): α = 0.5 makes both maxima equal.
"""

import torch
from torch import Tensor

from headway.compress.folds import (
    Fold,
    LayerState,
    by_channel,
    column_extremes,
    num_channels,
)

ALPHA = 0.5


def smooth_scale(work: LayerState, fold: Fold, alpha: float = ALPHA) -> Tensor | None:
    """Return the scale of each channel, (C), 1 if either side is zero; None without statistics."""
    moments = work.moments.get(fold.place)
    if moments is None or not moments.count:
        return None
    count = num_channels(fold)
    inputs = by_channel(moments.amax_I, fold, count)
    weights = by_channel(column_extremes(work, fold), fold, count)
    scale = inputs.pow(alpha) / weights.pow(1 - alpha)
    return torch.where((inputs > 0) & (weights > 0), scale, 1.0)
