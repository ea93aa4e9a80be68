"""KL divergence from the plain model with some matrices rounded, computed layer by layer.

Inputs of rounded matrices are rounded to int8 by block, as when the folder is served.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from headway.compress.matrices import Matrix, layer_matrices
from headway.compress.partial import Partial, QuantizedLayer
from headway.compress.rows import HEAD_NAME, RowModel, rows_of
from headway.runtime.rounding import dequantized_rows
from headway.spec.formats import PLAIN, Format

MAX_POSITIONS = 256
"""Maximum number of evenly spread tokens that are compared: a large head is expensive."""


class RoundedInputs:
    """A linear kernel that rounds inputs as a product with weights of `format` does; plain is
    exact.

    Weights are used as they are, and products have gradients.
    """

    few_rows = 0

    def __init__(self, format: Format) -> None:
        self.format = format

    def prepare(self, weight_OH: Tensor) -> Tensor:
        return weight_OH

    def __call__(self, x_TH: Tensor, weight_OH: Tensor, bias_O: Tensor | None) -> Tensor:
        x_TH = x_TH if self.format == PLAIN else dequantized_rows(x_TH, self.format)
        return functional.linear(x_TH, weight_OH, bias_O)


class KlMeter:
    """Measures the KL divergence of one model on some rows with matrices rounded."""

    def __init__(self, model: RowModel, rows: Sequence[Sequence[int]], partial: Partial) -> None:
        self.model, self.partial = model, partial
        self.lens = [len(row) for row in rows]
        total = sum(self.lens)
        self.at = (
            torch.arange(MAX_POSITIONS) * total // MAX_POSITIONS if total > MAX_POSITIONS else None
        )
        self.embedded = x_TH = model.embed(rows)
        for index in range(model.spec.num_layers):
            x_TH = model.run(model.layer(index), x_TH, self.lens)
        self.norm, self.head = model.norm(), model.head()
        self.reference = self._log_probabilities(x_TH)

    def kl_of_formats(self, formats: Mapping[str, Format]) -> float:
        """Return the KL with these matrices of the checkpoint (and the head, if named) rounded."""
        x_TH = self.embedded
        for index in range(self.model.spec.num_layers):
            layer = self.model.layer(index)
            apply_rounding(self.model, layer, index, self.partial.load(f"layer-{index}"), formats)
            x_TH = self.model.run(layer, x_TH, self.lens)
        return self._kl(x_TH, formats.get(HEAD_NAME, PLAIN))

    def _log_probabilities(self, x_TH: Tensor, format: Format = PLAIN) -> Tensor:
        head = self.head
        if format != PLAIN:
            head = self.model.head()
            assert head.weight is not None
            levels = self.partial.load("head").matrices[HEAD_NAME, format]
            head.weight.data.copy_(levels.plain())
            head.kernel = RoundedInputs(format)
        chosen = x_TH if self.at is None else x_TH[self.at]
        return torch.log_softmax(self.model.logits(self.norm, head, chosen), -1)

    def _kl(self, x_TH: Tensor, head: Format = PLAIN) -> float:
        other = self._log_probabilities(x_TH, head)
        return float((self.reference.exp() * (self.reference - other)).sum(-1).mean())


def apply_rounding(
    model: RowModel,
    layer: nn.Module,
    index: int,
    rounded: QuantizedLayer,
    formats: Mapping[str, Format],
) -> None:
    """Replace the weights of these matrices by their levels, and round their inputs."""
    modules = dict(layer.named_modules())
    for matrix in layer_matrices(model.architecture, layer, index):
        format = formats.get(matrix.name, PLAIN)
        if format == PLAIN:
            continue
        linear = modules[matrix.place[0]]
        place = place_of(matrix, linear.weight.data, model)
        place.copy_(rounded.matrices[matrix.name, format].plain())
        linear.kernel = RoundedInputs(format)


def place_of(matrix: Matrix, weight: Tensor, model: RowModel) -> Tensor:
    """Return the rows of the module's weight that a matrix of the checkpoint fills."""
    expert = matrix.place[1]
    place = weight if expert is None else weight[expert]
    if matrix.part is None:
        return place
    return place.narrow(0, *rows_of(matrix.part, place, model.spec))
