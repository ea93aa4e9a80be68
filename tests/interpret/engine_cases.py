"""Engines over our own kernels in Triton's interpreter; run with TRITON_INTERPRET=1 by
`test_interpreted`, by hardening, since each takes many seconds.
"""

import pytest

from drive import engine_for, finish, greedy
from headway.runtime.cuda.triton.types import INTERPRETED
from headway.runtime.rounding import round_weight_fp8
from headway.spec.quantization import Quantization
from parity.devices import with_triton
from parity.tiny import save, tiny_model

assert INTERPRETED, "run by test_interpreted.py"


@pytest.mark.parametrize(
    ("family", "kv"), [("llama", "auto"), ("llama", "int8"), ("gemma2", "auto")]
)
def test_an_engine_says_the_same(family, kv, tmp_path):
    """Prompts in chunks, decodes beside them, windows and caps; int8 KV ends as it may."""
    folder = save(tiny_model(family, max_position_embeddings=64), tmp_path)
    room = {"block_size": 8, "max_num_batched_tokens": 9, "max_num_seqs": 3, "kernels": "torch"}
    requests = [greedy(0, [5, 9, 13, 2, 8] * 2, 4), greedy(1, [7, 8], 5), greedy(2, [11] * 7, 3)]
    expected = finish(engine_for(folder, attention_backend="reference", **room), requests)
    engine = engine_for(folder, make=with_triton(kv), **room)
    found = finish(engine, requests)
    if kv == "auto":
        assert found == expected
    else:
        assert {key: len(one.token_ids) for key, one in found.items()} == {
            key: len(one.token_ids) for key, one in expected.items()
        }


@pytest.mark.parametrize("family", ["gptoss", "deepseekv3"])
def test_an_engine_of_experts_says_the_same(family, tmp_path):
    """Sink logits and biased, clamped experts; latent rows and shared experts."""
    folder = save(tiny_model(family, vocab_size=64), tmp_path)
    room = {"block_size": 8, "max_num_seqs": 2, "kernels": "torch", "max_model_len": 32}
    requests = [greedy(0, [5, 9, 13, 2, 8], 3), greedy(1, [7, 8], 2)]
    expected = finish(engine_for(folder, attention_backend="reference", **room), requests)
    assert finish(engine_for(folder, make=with_triton(), **room), requests) == expected


@pytest.mark.parametrize("family", ["llama", "qwen3moe"])
def test_an_engine_in_fp8_says_what_the_rounded_weights_say(family, tmp_path):
    """`--quantization fp8` beside a folder whose plain weights are those numbers already."""
    model = tiny_model(family, max_position_embeddings=64)
    folder = save(model, tmp_path / "plain")
    for name, matrix in model.state_dict().items():
        if ("_proj" in name and name.endswith("weight")) or "experts" in name:
            for plain in matrix if matrix.dim() == 3 else [matrix]:
                plain.copy_(round_weight_fp8(plain).plain())
    rounded = save(model, tmp_path / "rounded")
    room = {"block_size": 8, "max_num_batched_tokens": 9, "max_num_seqs": 3, "kernels": "torch"}
    requests = [greedy(0, [5, 9, 13, 2, 8], 3), greedy(1, [7, 8], 3)]
    expected = finish(engine_for(rounded, attention_backend="reference", **room), requests)
    make = with_triton(quantization=Quantization.of("fp8"))
    assert finish(engine_for(folder, make=make, **room), requests) == expected
