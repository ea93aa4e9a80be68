"""Headway against transformers on tiny random models: the same logits, the same greedy tokens.

Greedy tokens are checked by handing prompt and answer to transformers at once: each token must be
the likeliest after those before it, unless the two likeliest are closer than rounding.
"""

import copy
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.testing import assert_close
from transformers import Mistral3Config, Mistral3ForConditionalGeneration, PixtralVisionConfig

from drive import Answer, engine_for, finish, greedy
from headway.core.request import Request, SamplingParams
from parity.logits import our_logits, their_logits
from parity.tiny import FAMILIES, num_elements, prompts, save, spell_as_transformers_4, tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 80,
}
DEEPSEEK_YARN_ROPE = {
    **YARN_ROPE,
    "beta_fast": 16.0,
    "beta_slow": 0.5,
    "mscale": 1.2,
    "mscale_all_dim": 0.7,
    "truncate": False,
}
PARTIAL_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.75}
GQA7 = {"hidden_size": 56, "num_attention_heads": 7, "num_key_value_heads": 1}
LAYERS5 = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"] * 2
MODELS = {
    "llama-gqa-tied": {"tie_word_embeddings": True},
    "llama-mha-untied": {"num_key_value_heads": 8},
    "llama-mqa-head80": {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 80},
    "llama-head24": {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 24},
    "llama-head256": {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 256},
    "llama-attention-bias": {"attention_bias": True},
    "llama-mlp-bias": {"mlp_bias": True, "tie_word_embeddings": True},
    "llama-all-biases": {"attention_bias": True, "mlp_bias": True},
    "llama-linear-rope": {"rope_parameters": LINEAR_ROPE},
    "llama-linear-rope-old": {"rope_parameters": LINEAR_ROPE},
    "llama-llama3-rope": {"rope_parameters": LLAMA3_ROPE, "head_dim": 32},
    "llama-llama3-rope-old": {"rope_parameters": LLAMA3_ROPE, "head_dim": 32},
    "llama-yarn-rope": {"rope_parameters": YARN_ROPE, "head_dim": 32},
    "llama-yarn-rope-old": {"rope_parameters": DEEPSEEK_YARN_ROPE, "head_dim": 32},
    "mistral-window": {},
    "mistral-window-old": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    "mistral-window-gqa7-head80": {**GQA7, "head_dim": 80},
    "mistral-no-window": {"sliding_window": None},
    "mixtral-window": {},
    "mixtral-tied-old": {"sliding_window": None, "tie_word_embeddings": True},
    "ministral3-growing-queries": {},
    "ministral3-window-plain-rope": {
        "sliding_window": 17,
        "rope_parameters": {
            **{"rope_type": "default", "rope_theta": 500.0},
            **{"llama_4_scaling_beta": 0.7, "original_max_position_embeddings": 12},
        },
    },
    "qwen2-gqa7-tied": {
        **GQA7,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    },
    "qwen2-gqa7-untied": {"hidden_size": 112, "num_attention_heads": 14, "num_key_value_heads": 2},
    "qwen2-window-in-last-old": {
        "num_hidden_layers": 3,
        "use_sliding_window": True,
        "sliding_window": 17,
        "max_window_layers": 1,
    },
    "qwen2moe-some-sparse-old": {},
    "qwen2moe-window-no-bias": {
        "qkv_bias": False,
        "use_sliding_window": True,
        "sliding_window": 17,
        "max_window_layers": 2,
        "norm_topk_prob": True,
        "mlp_only_layers": [],
    },
    "qwen3-tied": {"tie_word_embeddings": True},
    "qwen3-gqa7-bias": {**GQA7, "attention_bias": True},
    "qwen3-window-in-some": {
        "num_hidden_layers": 5,
        "use_sliding_window": True,
        "sliding_window": 17,
        "layer_types": LAYERS5[:5],
    },
    "qwen3moe-all-sparse": {},
    "qwen3moe-some-sparse-old": {
        "num_hidden_layers": 5,
        "decoder_sparse_step": 2,
        "mlp_only_layers": [3],
        "num_experts_per_tok": 3,
        "norm_topk_prob": False,
        "tie_word_embeddings": True,
    },
    "qwen3moe-window": {"use_sliding_window": True, "sliding_window": 17},
    "gemma2-interleaved": {},
    "gemma2-gqa7-old": {**GQA7, "head_dim": 40},
    "gemma2-untied-bias": {"tie_word_embeddings": False, "attention_bias": True},
    "gemma2-no-caps": {"attn_logit_softcapping": None, "final_logit_softcapping": None},
    "gemma3-interleaved": {},
    "gemma3-interleaved-old": {},
    "gemma3-head256-mqa": {
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "gemma3n-shared": {},
    "gemma3n-second-stream": {
        "altup_active_idx": 1,
        "altup_correct_scale": False,
        "num_kv_shared_layers": 0,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.3],
        "attention_bias": True,
    },
    "phi3-mha": {"num_key_value_heads": 8},
    "phi3-window-partial-rope": {
        "num_attention_heads": 4,
        "rope_parameters": PARTIAL_ROPE,
        "sliding_window": 17,
    },
    "phi3-partial-rope-old": {
        "num_attention_heads": 4,
        "rope_parameters": PARTIAL_ROPE,
        "tie_word_embeddings": True,
    },
    "olmo2-mha": {"num_key_value_heads": 8},
    "olmo2-gqa7-bias": {**GQA7, "attention_bias": True, "tie_word_embeddings": True},
    "olmo3-interleaved": {},
    "olmo3-interleaved-old": {"attention_bias": True},
    "granite-gqa": {},
    "granite-all-biases-tied-old": {
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
    },
    "gptoss-gqa": {},
    "deepseekv2-grouped": {},
    "deepseekv2-greedy-whole-queries-old": {
        "q_lora_rank": None,
        "topk_method": "greedy",
        "n_group": None,
        "topk_group": None,
        "rope_parameters": {**DEEPSEEK_YARN_ROPE, "truncate": True},
    },
    "deepseekv2-biases-tied": {
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
        "n_shared_experts": 1,
    },
    "deepseekv3-grouped": {},
    "deepseekv3-yarn-old": {
        "rope_parameters": DEEPSEEK_YARN_ROPE,
        "q_lora_rank": None,
        "norm_topk_prob": False,
        "attention_bias": True,
    },
    "deepseekv3-parted-rope-one-group": {
        "rope_interleave": False,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 0,
    },
    "granitehybrid-experts": {},
    "granitehybrid-dense-rope-tied": {
        "num_local_experts": 0,
        "position_embedding_type": "rope",
        "tie_word_embeddings": True,
        "attention_bias": True,
        "mamba_n_groups": 1,
        "mamba_conv_bias": False,
        "mamba_proj_bias": False,
    },
    "qwen3next-some-sparse": {},
    "qwen3next-biases-tied-old": {
        "initializer_range": 0.1,
        "attention_bias": True,
        "tie_word_embeddings": True,
        "norm_topk_prob": False,
        "mlp_only_layers": [],
        "linear_num_key_heads": 4,
        "linear_conv_kernel_dim": 2,
        "num_hidden_layers": 4,
        "layer_types": None,
    },
    "qwen35-gates": {},
    "qwen35-tied-old": {
        "tie_word_embeddings": True,
        "attention_bias": True,
        "linear_num_key_heads": 4,
        "layer_types": None,
    },
    "qwen35moe-shared-expert": {},
    "lfm2-biases": {},
    "lfm2-tied-old": {
        "tie_word_embeddings": True,
        "conv_bias": False,
        "conv_L_cache": 4,
        "block_auto_adjust_ff_dim": False,
        "layer_types": None,
        "full_attn_idxs": [1, 3],
    },
    "lfm2moe-some-sparse": {},
    "lfm2moe-all-sparse-plain-choice": {
        "num_dense_layers": 0,
        "use_expert_bias": False,
        "norm_topk_prob": False,
        "conv_bias": True,
    },
    "smollm3-tied-old": {},
    "smollm3-window-where-no-rope": {
        "use_sliding_window": True,
        "sliding_window": 17,
        "no_rope_layers": [0, 1, 1, 0, 1],
    },
    "smollm3-untied-bias": {
        "tie_word_embeddings": False,
        "attention_bias": True,
        "mlp_bias": True,
        "no_rope_layer_interval": 2,
    },
}
"""Name → what differs from the family's tiny model; "old" ones are spelled as by transformers 4."""

BY_TORCH = ("deepseek",)
"""Families that the native attention does not read; the default is torch's then."""
LENGTHS = [1, 5, 17, 33]
FAR_BEYOND_THE_WINDOW = 200
NUM_TOKENS = 64
SETTINGS = {
    "whole-prompts": {},
    "chunks-of-1": {"max_num_batched_tokens": 1, "max_num_seqs": 1},
    "chunks-of-7": {"max_num_batched_tokens": 7, "max_num_seqs": 3},
    "chunks-of-64-blocks-of-1": {"max_num_batched_tokens": 64, "block_size": 1},
    "sdpa-chunks-of-7": {
        "attention_backend": "sdpa",
        "max_num_batched_tokens": 7,
        "max_num_seqs": 3,
    },
    "reference": {"attention_backend": "reference"},
    "reference-chunks-of-7-blocks-of-1": {
        "attention_backend": "reference",
        "block_size": 1,
        "max_num_batched_tokens": 7,
        "max_num_seqs": 7,
    },
}
IN_ALL_SETTINGS = (
    *("llama-gqa-tied", "mistral-window", "qwen2-gqa7-tied", "qwen3-window-in-some"),
    *("qwen3moe-some-sparse-old", "gemma2-interleaved", "gemma3-interleaved", "gptoss-gqa"),
    *("deepseekv2-grouped", "deepseekv3-yarn-old", "gemma3n-shared"),
    *(
        "granitehybrid-experts",
        "qwen3next-some-sparse",
        "ministral3-growing-queries",
        "lfm2-biases",
    ),
)
FOUND_AGAIN = (
    *("gptoss-gqa", "deepseekv3-grouped", "gemma3n-shared", "olmo3-interleaved"),
    *("ministral3-growing-queries", "mixtral-window", "qwen2moe-some-sparse-old"),
    *("lfm2-biases", "lfm2moe-some-sparse"),
)
"""Families whose prefix hits are run here; the caches and windows of all are one code."""
HYBRID = (
    *("granitehybrid-experts", "qwen3next-some-sparse", "lfm2-biases", "lfm2moe-some-sparse"),
    *("qwen35-gates", "qwen35moe-shared-expert"),
)
"""Models of which some layers keep states."""
CASES = [
    pytest.param(name, settings, id=f"{name}-{case}")
    for name in MODELS
    for case, settings in SETTINGS.items()
    if name in IN_ALL_SETTINGS or case == "chunks-of-7"
]


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """(transformers' model, its folder)."""
    name = request.param
    reference = tiny_model(name.partition("-")[0], **MODELS[name])
    folder = save(reference, tmp_path_factory.mktemp(name))
    if name.endswith("-old"):
        spell_as_transformers_4(folder)
    return reference, folder


def check_greedy(
    reference: torch.nn.Module,
    prompt: list[int],
    answer: Answer,
    smallest_gap: float,
    exact: torch.nn.Module | None = None,
) -> None:
    """Each token is transformers' likeliest where the two likeliest are further apart than this,
    in the same model in fp32, too, where one is given."""
    assert len(answer.token_ids) == NUM_TOKENS
    assert answer.finish_reason == "length"
    logits_TV = their_logits(reference, prompt + answer.token_ids[:-1])[len(prompt) - 1 :]
    best, second = logits_TV.topk(2).values.T
    clear = (best - second) > smallest_gap
    if exact is not None:
        exact_TV = their_logits(exact, prompt + answer.token_ids[:-1])[len(prompt) - 1 :]
        gaps = exact_TV.topk(2).values
        clear &= (gaps[:, 0] - gaps[:, 1]) > smallest_gap
        clear &= exact_TV.argmax(-1) == logits_TV.argmax(-1)
    assert clear.float().mean() > (0.5 if exact is None else 0.4), "it hardly ever decides"
    differs = logits_TV.argmax(-1) != torch.tensor(answer.token_ids)
    assert not (clear & differs).any(), (clear & differs).nonzero().tolist()


@pytest.mark.parametrize(
    ("model", "backend"),
    [
        (name, backend)
        for name in MODELS
        for backend in ("reference", "sdpa", "native")
        if backend != "native" or not name.startswith(BY_TORCH)
    ],
    indirect=["model"],
)
def test_logits_of_every_position_are_those_of_transformers(model, backend: str):
    """Full rows, within 1e-4, for prompts of 1, 5, 17 and 200 tokens."""
    reference, folder = model
    executor = engine_for(folder, attention_backend=backend).executor
    assert executor.spec.num_parameters == num_elements(reference)
    for prompt in prompts([1, 5, 17, 200]):
        assert_close(
            our_logits(executor, prompt), their_logits(reference, prompt), rtol=0, atol=1e-4
        )


@pytest.mark.parametrize(("model", "settings"), CASES, indirect=["model"])
def test_greedy_tokens_and_logprobs_are_those_of_transformers(model, settings: dict):
    """Prompts of several lengths running together; also the log-probabilities of one prompt."""
    reference, folder = model
    engine = engine_for(folder, **settings)
    windows = any(group.window for group in engine.executor.spec.kv_groups)
    far = windows and settings.get("max_num_batched_tokens") != 1  # 1 a step is slow; 33 will do
    all_prompts = prompts([FAR_BEYOND_THE_WINDOW, *LENGTHS[1:]] if far else LENGTHS)
    requests = [greedy(i, prompt, NUM_TOKENS, logprobs=1) for i, prompt in enumerate(all_prompts)]
    asked = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=2)
    requests.append(Request(len(requests), all_prompts[-1], asked))
    answers = finish(engine, requests)
    for i, prompt in enumerate(all_prompts):
        answer = answers[i, 0]
        check_greedy(reference, prompt, answer, smallest_gap=1e-4)
        exact_TV = their_logits(reference, prompt + answer.token_ids).log_softmax(-1)
        expected = [
            exact_TV[len(prompt) - 1 + at, token].item()
            for at, token in enumerate(answer.token_ids)
        ]
        assert [entry.logprob for entry in answer.logprobs] == pytest.approx(expected, abs=1e-4)
        assert [entry.top_ids[0] for entry in answer.logprobs] == answer.token_ids
    check_prompt_logprobs(reference, all_prompts[-1], answers[len(all_prompts), 0])


def check_prompt_logprobs(reference: torch.nn.Module, prompt: list[int], answer: Answer) -> None:
    """The prompt's own log-probabilities: nothing for the first token, then one entry a token."""
    entries = answer.prompt_logprobs
    assert entries is not None
    assert entries[0] is None
    assert [entry.token_id for entry in entries[1:]] == prompt[1:]
    exact_TV = their_logits(reference, prompt).log_softmax(-1)
    expected = [exact_TV[at, token].item() for at, token in enumerate(prompt[1:])]
    assert [entry.logprob for entry in entries[1:]] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(
    "model",
    [
        "gemma2-interleaved",
        "gemma3-interleaved",
        "qwen3-window-in-some",
        "gptoss-gqa",
        *("deepseekv2-grouped", "gemma3n-shared", *HYBRID),
        *("olmo3-interleaved", "ministral3-growing-queries", "mixtral-tied-old"),
        "qwen2moe-some-sparse-old",
    ],
    indirect=True,
)
def test_preempted_after_the_window_overflowed(model):
    """Four prompts beyond the window of 17, and full layers with room for two and a half."""
    reference, folder = model
    engine = engine_for(folder, num_blocks=90, block_size=4, max_num_batched_tokens=32)
    all_prompts = prompts([60, 70, 80, 90])
    answers = finish(engine, [greedy(i, p, NUM_TOKENS) for i, p in enumerate(all_prompts)])
    assert engine.scheduler.num_preemptions > 0
    for i, prompt in enumerate(all_prompts):
        check_greedy(reference, prompt, answers[i, 0], smallest_gap=1e-4)


@pytest.mark.parametrize("model", FOUND_AGAIN, indirect=True)
def test_what_the_prefix_cache_finds_changes_no_token(model):
    """A second turn begins with all of the first; its blocks are found, behind the windows too."""
    reference, folder = model
    engine = engine_for(folder, block_size=4, max_num_batched_tokens=16)
    (prompt,) = prompts([60])
    for turn in range(3):
        asked = greedy(turn, prompt, NUM_TOKENS)
        answer = finish(engine, [asked])[turn, 0]
        assert (answer.num_cached_tokens > 60) == (turn > 0)
        check_greedy(reference, prompt, answer, smallest_gap=1e-4)
        prompt = prompt + answer.token_ids + prompts([9])[0]


def test_greedy_tokens_are_those_of_generate(tmp_path: Path):
    """Once without teacher forcing: transformers' own greedy search over its own cache."""
    reference = tiny_model(eos_token_id=None)
    engine = engine_for(save(reference, tmp_path))
    for i, prompt in enumerate(prompts(LENGTHS)):
        ids = torch.tensor([prompt])
        found = reference.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=NUM_TOKENS,
            pad_token_id=0,
        )[0, len(prompt) :].tolist()
        assert finish(engine, [greedy(i, prompt, NUM_TOKENS)])[i, 0].token_ids == found


DELTA = ("qwen3next", "qwen35", "qwen35moe")
"""Families whose states add up what bf16 rounds."""
SURE = {
    "granite": {"logits_scaling": 0.5},
    "qwen3moe": {"initializer_range": 0.12},
    "deepseekv3": {
        **{"initializer_range": 0.12, "routed_scaling_factor": 0.2},
        **{"num_experts_per_tok": 12, "topk_group": 4},
    },
    "mixtral": {"num_experts_per_tok": 5},
    "qwen2moe": {"num_experts_per_tok": 8},
    "lfm2moe": {"num_experts_per_tok": 8, "initializer_range": 0.12},
    "granitehybrid": {"num_experts_per_tok": 6, "logits_scaling": 1.0},
    "qwen3next": {"num_experts_per_tok": 8, "initializer_range": 0.1},
    "qwen35": {"initializer_range": 0.1},
    "qwen35moe": {"num_experts_per_tok": 8, "initializer_range": 0.1},
}
"""Changes that keep a tiny model from hesitating, or its router from choosing by rounding."""


@pytest.mark.parametrize(
    ("family", "dtype", "smallest_gap"),
    [
        *((family, torch.bfloat16, 0.15) for family in FAMILIES),
        *((family, torch.float16, 0.02) for family in ("llama", "qwen2")),
    ],
    ids=str,
)
def test_narrow_checkpoints_choose_the_tokens_of_transformers(
    family: str, dtype: torch.dtype, smallest_gap: float, tmp_path: Path
):
    """bf16 and fp16 weights and KV, wherever transformers in that type is sure of its choice.

    The states of Qwen3-Next add up what bf16 rounds: its logits there are up to 1.0 from fp32's
    (ours up to 0.7), so it is asked in both.
    """
    reference = tiny_model(family, dtype, **SURE.get(family, {}))
    exact = copy.deepcopy(reference).float() if family in DELTA else None
    engine = engine_for(save(reference, tmp_path), max_num_batched_tokens=16, max_num_seqs=4)
    assert engine.settings.dtype == str(dtype).removeprefix("torch.")
    all_prompts = prompts(LENGTHS)
    answers = finish(engine, [greedy(i, p, NUM_TOKENS) for i, p in enumerate(all_prompts)])
    for i, prompt in enumerate(all_prompts):
        check_greedy(reference, prompt, answers[i, 0], smallest_gap, exact)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_checkpoint_is_converted_to_the_type_asked_for(dtype: str, tmp_path: Path):
    """An fp32 checkpoint served in each type: logits within that type's rounding of fp32's."""
    reference = tiny_model()
    executor = engine_for(save(reference, tmp_path), dtype=dtype).executor
    assert all(str(p.dtype) == f"torch.{dtype}" for p in executor.model.parameters())
    prompt = prompts([40])[0]
    ours, theirs = our_logits(executor, prompt), their_logits(reference, prompt)
    relative = ((ours - theirs).norm() / theirs.norm()).item()
    assert relative < {"bfloat16": 0.03, "float16": 0.004, "float32": 1e-5}[dtype]


def test_the_text_part_of_a_model_of_images_is_served(tmp_path: Path):
    """Mistral 3: as transformers writes it, and under the names of published folders."""
    text = tiny_model("ministral3").config
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    vision = PixtralVisionConfig(**sizes, num_attention_heads=2, image_size=32, patch_size=16)
    config = Mistral3Config(
        text_config=text, vision_config=vision, tie_word_embeddings=False, eos_token_id=7
    )
    torch.manual_seed(5)
    reference = Mistral3ForConditionalGeneration(config).eval()
    folder = save(reference, tmp_path / "saved")
    tensors = load_file(folder / "model.safetensors")
    assert any("vision_tower" in name for name in tensors)
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    is_new = "lm_head.weight" in tensors
    renamed = {published_name(name, is_new): tensor for name, tensor in tensors.items()}
    save_file(renamed, other / "model.safetensors", metadata={"format": "pt"})
    (prompt,) = prompts([50])
    expected = their_logits(reference, prompt)
    for each in (folder, other):
        executor = engine_for(each).executor
        assert executor.spec.architecture == "Ministral3ForCausalLM"
        assert_close(our_logits(executor, prompt), expected, rtol=0, atol=1e-4)


def published_name(name: str, is_new: bool) -> str:
    """The other of the two spellings: `model.language_model.norm`, `language_model.model.norm`."""
    if not is_new:
        name = name.removeprefix("language_model.").replace("model.", "model.language_model.", 1)
        return name.replace("vision_tower", "model.vision_tower", 1)
    if name.startswith("lm_head."):
        return "language_model." + name
    name = name.removeprefix("model.")
    return name.replace("language_model.", "language_model.model.", 1)


def test_qwen35_is_read_as_it_is_published(tmp_path: Path):
    """Stacked experts, the text model inside of one for images, a layer that drafts."""
    reference = tiny_model("qwen35moe")
    folder = save(reference, tmp_path)
    state = reference.state_dict()  # where transformers has the experts stacked, too
    stacked = {n: state[n] for n in state if ".mlp.experts." in n}
    saved = load_file(folder / "model.safetensors")
    plain = {n: tensor for n, tensor in saved.items() if ".mlp.experts." not in n}
    tensors = {
        n.replace("model.", "model.language_model.", 1): tensor.contiguous()
        for n, tensor in (plain | stacked).items()
    }
    others = {
        name: torch.ones(3) for name in ("model.visual.blocks.0.norm1.weight", "mtp.norm.weight")
    }
    save_file(tensors | others, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    whole = {"architectures": ["Qwen3_5MoeForConditionalGeneration"], "text_config": config}
    (folder / "config.json").write_text(json.dumps(whole))
    executor = engine_for(folder).executor
    (prompt,) = prompts([50])
    expected = their_logits(reference, prompt)
    assert_close(our_logits(executor, prompt), expected, rtol=0, atol=1e-4)
