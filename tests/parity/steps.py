"""A step without sequences, for parts of a model that only count on it."""

import torch

from headway.runtime.batch import Batch
from headway.runtime.layers import Step


def step() -> Step:
    """A step of no sequence: the MLP only counts on it."""
    batch = Batch(
        token_ids_T=torch.empty(0),
        positions_T=torch.empty(0),
        slots_GT=[],
        block_tables_GSB=[],
        query_lens=[],
        context_lens=[],
        num_decodes=0,
        sampled_rows=[],
        sampled_sequences=[],
    )
    return Step(batch=batch, kv=[], angles=[])
