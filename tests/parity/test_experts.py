"""The sparse MLP against transformers, and what a step says of the experts it read."""

from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from drive import engine_for
from headway.core.plan import NewSequence, ScheduledSequence, StepPlan, run
from headway.core.request import SamplingParams
from headway.runtime.executor import TorchExecutor
from parity.logits import our_logits, their_logits
from parity.steps import step
from parity.tiny import prompts, save, tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

EXPERTS, ACTIVE = 8, 2


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("active", [1, 2, EXPERTS])
def test_the_sparse_mlp_is_that_of_transformers(active: int, normalize: bool, tmp_path: Path):
    """Rows alone and together, few and many; each expert that was hit is counted once."""
    reference = tiny_model("qwen3moe", num_experts_per_tok=active, norm_topk_prob=normalize)
    executor = engine_for(save(reference, tmp_path)).executor
    for ours, theirs in zip(executor.model.layers, reference.model.layers, strict=True):
        for num_tokens in (1, 2, 5, 64):
            x_TH = torch.randn(num_tokens, 64)
            counted = step()
            with torch.inference_mode():
                assert_close(ours.mlp(x_TH, counted), theirs.mlp(x_TH[None])[0], rtol=0, atol=1e-5)
                visited = theirs.mlp.gate(x_TH)[2]
            assert visited.shape == (num_tokens, active)
            assert counted.experts_read == len(visited.unique())


def test_a_token_does_not_depend_on_who_else_is_there(tmp_path: Path):
    executor = engine_for(save(tiny_model("qwen3moe"), tmp_path)).executor
    mlp, x_TH = executor.model.layers[0].mlp, torch.randn(33, 64)
    with torch.inference_mode():
        together = mlp(x_TH, step())
        alone = torch.cat([mlp(row[None], step()) for row in x_TH])
    assert_close(together, alone, rtol=0, atol=1e-6)


def decode(executor: TorchExecutor, num_sequences: int) -> int:
    """Experts read by a step that decodes one token of each of `num_sequences`."""
    new = [
        NewSequence(i, 0, prompt, len(prompt), SamplingParams(), 0)
        for i, prompt in enumerate(prompts([1] * num_sequences))
    ]
    advanced = [
        ScheduledSequence(one.sequence_id, 0, one.token_ids, [[i + 1]], True)
        for i, one in enumerate(new)
    ]
    result = run(executor, StepPlan(0, new, advanced, []))
    executor.state.apply(StepPlan(1, [], [], list(range(num_sequences))))
    return result.experts_read


@pytest.mark.parametrize(
    ("changes", "num_sparse"),
    [({}, 3), ({"num_hidden_layers": 5, "decoder_sparse_step": 2, "mlp_only_layers": [3]}, 1)],
)
def test_a_step_says_how_many_experts_it_read(changes: dict, num_sparse: int, tmp_path: Path):
    """One token: exactly its own two of eight in each sparse layer; many: at most all."""
    executor = engine_for(save(tiny_model("qwen3moe", **changes), tmp_path)).executor
    assert executor.spec.num_sparse == num_sparse
    assert decode(executor, 1) == ACTIVE * num_sparse
    read = [decode(executor, count) for count in (2, 4, 32)]
    assert ACTIVE * num_sparse < read[0] <= 2 * ACTIVE * num_sparse
    assert read == sorted(read) and read[-1] <= EXPERTS * num_sparse
    spec = executor.spec
    missed = spec.step_weight_bytes() - spec.step_weight_bytes(experts_read=ACTIVE * num_sparse)
    assert missed == (EXPERTS - ACTIVE) * num_sparse * 4 * spec.expert_parameters


def test_a_dense_model_reads_none(tmp_path: Path):
    assert decode(engine_for(save(tiny_model("qwen3"), tmp_path)).executor, 3) == 0


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_biases_and_clamps_stay_where_experts_are_rounded(kernels: str, tmp_path: Path):
    """gpt-oss in int8, rounded when it is loaded, beside transformers' own numbers."""
    reference = tiny_model("gptoss")
    engine = engine_for(save(reference, tmp_path), quantization="int8", kernels=kernels)
    (prompt,) = prompts([40])
    found = our_logits(engine.executor, prompt).log_softmax(-1)
    expected = their_logits(reference, prompt).log_softmax(-1)
    assert 0 < (expected.exp() * (expected - found)).sum(-1).mean() < 5e-3
