"""Gemma 3n in numbers: streams beside the hidden states (AltUp), rows of each layer's own."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class AltUpSpec:
    """`streams` rows of hidden size a token, of which layers compute the one named `active`.

    The others are predicted before a layer and corrected behind it. Beside attention stands a
    product of rank `laurel_rank`. Each layer takes a row of `per_layer_size` besides, which tokens
    look up in a table of `per_layer_vocab` rows, one part for each layer; ids beyond look up 0.
    With `scaled` the stream that asks for that row has a scale for each channel.
    """

    streams: int
    active: int
    scaled: bool
    per_layer_size: int
    per_layer_vocab: int
    laurel_rank: int

    def layer_parameters(self, hidden: int) -> int:
        """Elements of one layer beside attention, MLP and the norms around them."""
        count, row = self.streams, self.per_layer_size
        streams = count * count + count**3 + hidden * count + 2 * hidden
        return streams + hidden * (2 * self.laurel_rank + 1) + hidden * (2 * row + 1)

    def model_parameters(self, hidden: int, num_layers: int) -> int:
        """Elements of what stands before and behind the layers, but for the table."""
        rows = num_layers * self.per_layer_size
        return hidden * rows + self.per_layer_size + 2 * (self.streams - 1) * hidden * hidden

    def table_parameters(self, num_layers: int) -> int:
        """Elements of the table of rows by layer."""
        return self.per_layer_vocab * num_layers * self.per_layer_size
