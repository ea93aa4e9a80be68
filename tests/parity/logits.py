"""Logits of our model and of transformers', on the same weights."""

import torch

from headway.core.plan import NewSequence, ScheduledSequence, StepPlan
from headway.core.request import SamplingParams
from headway.runtime.executor import TorchExecutor


@torch.inference_mode()
def their_logits(reference: torch.nn.Module, token_ids: list[int]) -> torch.Tensor:
    """transformers' fp32 logits after each of `token_ids`, (T, V)."""
    return reference(torch.tensor([token_ids])).logits[0].float()


@torch.inference_mode()
def our_logits(executor: TorchExecutor, token_ids: list[int]) -> torch.Tensor:
    """Headway's fp32 logits after each of `token_ids`, computed as one chunk, (T, V)."""
    count = -(-len(token_ids) // executor.settings.cache.block_size)
    new = NewSequence(0, 0, token_ids, len(token_ids), SamplingParams(), 0)
    blocks = list(range(count, 0, -1))
    plan = StepPlan(
        0,
        [new],
        [ScheduledSequence(0, 0, token_ids, [blocks] * len(executor.spec.kv_groups), True)],
        [],
    )
    executor.state.apply(plan)
    logits = executor.model.logits(executor.forward(executor.state.batch(plan))).float()
    executor.state.apply(StepPlan(1, [], [], [0]))
    return logits
