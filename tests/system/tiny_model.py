"""A tiny Llama with random weights and a byte-level tokenizer, written as a Hugging Face folder.

Made anew from a fixed seed wherever tests run, so that no outside data is needed. Its answers are
nonsense, but printable, varied and always the same.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS = 64, 128, 2, 4, 2
CONTEXT = 512
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
EOS = 2
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CORPUS = """
the engine takes requests and the scheduler forms the next step from them; each sequence knows its
tokens, its blocks and its place. Once upon a time there was a little girl who liked to play with
her friends in the garden, and one day they found a big red ball under the tree. What is 2 + 3? It
is 5. Tell me about the sea, the mountains, the weather and the stars; tell me about them slowly.
"""


def write_tokenizer(folder: Path) -> Tokenizer:
    """A byte-level BPE with a few merges; the three special tokens come first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=384,
        special_tokens=[AddedToken(text, special=True) for text in SPECIALS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([CORPUS], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token": SPECIALS[EOS], "chat_template": CHATML, "model_max_length": CONTEXT}
    write_json(folder / "tokenizer_config.json", config)
    return tokenizer


def write_tiny_model(folder: Path) -> Path:
    """Write the whole folder; about 100,000 parameters."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = write_tokenizer(folder)
    vocab_size = tokenizer.get_vocab_size()
    write_json(folder / "config.json", tiny_config(vocab_size))
    save_file(tiny_weights(tokenizer, vocab_size), folder / "model.safetensors")
    return folder


def tiny_config(vocab_size: int) -> dict[str, Any]:
    """What config.json holds."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "vocab_size": vocab_size,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "eos_token_id": EOS,
        "torch_dtype": "float32",
    }


def tiny_weights(tokenizer: Tokenizer, vocab_size: int) -> dict[str, torch.Tensor]:
    """Random weights, large enough for varied text; rows of the head that would end an answer or
    begin half a character are small, so that the likeliest token is printable."""
    generator = torch.Generator().manual_seed(7)

    def normal(*shape: int, scale: float = 0.2) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * scale

    head_dim = HIDDEN // HEADS
    tensors = {
        "model.embed_tokens.weight": normal(vocab_size, HIDDEN, scale=1.0),
        "model.norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": normal(vocab_size, HIDDEN),
    }
    for i in range(LAYERS):
        layer = f"model.layers.{i}."
        tensors |= {
            layer + "input_layernorm.weight": torch.ones(HIDDEN),
            layer + "post_attention_layernorm.weight": torch.ones(HIDDEN),
            layer + "self_attn.q_proj.weight": normal(HIDDEN, HIDDEN),
            layer + "self_attn.k_proj.weight": normal(KV_HEADS * head_dim, HIDDEN),
            layer + "self_attn.v_proj.weight": normal(KV_HEADS * head_dim, HIDDEN),
            layer + "self_attn.o_proj.weight": normal(HIDDEN, HIDDEN),
            layer + "mlp.gate_proj.weight": normal(INTERMEDIATE, HIDDEN),
            layer + "mlp.up_proj.weight": normal(INTERMEDIATE, HIDDEN),
            layer + "mlp.down_proj.weight": normal(HIDDEN, INTERMEDIATE),
        }
    for token_id in range(vocab_size):
        text = tokenizer.decode([token_id])
        if token_id < len(SPECIALS) or not (text.isascii() and text.isprintable()):
            tensors["lm_head.weight"][token_id] *= 0.1
    return tensors


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content))
