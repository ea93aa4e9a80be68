"""AWQ (Lin et al. 2023): input channels with a large mean magnitude get finer steps.

The scale is s = mean|x|^α, with the α of ALPHAS that has the least output error tr(Δ H Δᵀ).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from headway.compress.folds import Fold, LayerState, by_channel, num_channels

ALPHAS = tuple(step / 10 for step in range(11))


def awq_scale(work: LayerState, fold: Fold, rounded: Callable[[Tensor], Tensor]) -> Tensor | None:
    """Return the scale of each channel, (C); `rounded` rounds weights. None without statistics."""
    moments = work.moments.get(fold.place)
    if moments is None or not moments.count:
        return None
    sizes = by_channel(moments.mean_size, fold, num_channels(fold)).clamp(min=1e-8)
    hessian_II = moments.hessian()
    best, chosen = float("inf"), torch.ones_like(sizes)
    for alpha in ALPHAS:
        scale_C = sizes.pow(alpha)
        scale_C = scale_C / (scale_C.max() * scale_C.min()).sqrt()
        scale_I = scale_C[fold.channels_I]
        error = 0.0
        for matrix in fold.quantized:
            weight = work.weights[matrix.weight]
            error += output_error(rounded(weight * scale_I) / scale_I - weight, hessian_II)
        if error < best:
            best, chosen = error, scale_C
    return chosen


def output_error(difference_OI: Tensor, hessian_II: Tensor) -> float:
    """Return tr(Δ H Δᵀ), the mean squared error of the outputs, summed over outputs."""
    return float((difference_OI @ hessian_II).mul_(difference_OI).sum())
