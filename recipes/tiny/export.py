"""Writes `headway-tiny` or `headway-draft` as an ordinary Hugging Face Llama folder.

It is given the training folder, and the folder to write, whose name says which of the two.
It promises weights in bf16 under Hugging Face names, and a tokenizer with a chat template.
"""

import argparse
import json
from pathlib import Path

import torch
from recipes.tiny.chatml import END_OF_TEXT, IM_END, SPECIAL_TOKENS, TEMPLATE
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from headway.compress.train.checkpoint import weights


def config(shape: dict, ids: dict[str, int]) -> dict:
    """The `config.json` of a Llama with tied embeddings and no token before the text."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **shape,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "eos_token_id": ids[IM_END],
        "hidden_act": "silu",
        "initializer_range": 0.05,
        "mlp_bias": False,
        "pad_token_id": ids[END_OF_TEXT],
        "rope_scaling": None,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
    }


def generation_config(ids: dict[str, int]) -> dict:
    """An answer ends with its message, or with the text."""
    return {
        "do_sample": False,
        "eos_token_id": [ids[IM_END], ids[END_OF_TEXT]],
        "pad_token_id": ids[END_OF_TEXT],
    }


def tokenizer_config(shape: dict, ids: dict[str, int]) -> dict:
    """The special tokens, the longest input and the chat template."""
    return {
        "added_tokens_decoder": {
            str(index): {
                "content": token,
                "lstrip": False,
                "normalized": False,
                "rstrip": False,
                "single_word": False,
                "special": True,
            }
            for token, index in ids.items()
        },
        "bos_token": None,
        "chat_template": TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": IM_END,
        "model_max_length": shape["max_position_embeddings"],
        "pad_token": END_OF_TEXT,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": None,
    }


def export(out: Path, model: Path) -> None:
    folder = out / model.name
    shape = json.loads((folder / "training.json").read_text())["shape"]
    tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
    ids = {token: tokenizer.token_to_id(token) for token in SPECIAL_TOKENS}
    trained = weights(load_file(folder / "checkpoint.safetensors"))
    tensors = {f"model.{name}": value.to(torch.bfloat16) for name, value in trained.items()}
    model.mkdir(parents=True, exist_ok=True)
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save(str(model / "tokenizer.json"))
    documents = {
        "config.json": config(shape, ids),
        "generation_config.json": generation_config(ids),
        "tokenizer_config.json": tokenizer_config(shape, ids),
    }
    for name, content in documents.items():
        (model / name).write_text(json.dumps(content, indent=2) + "\n")
    print(f"{sum(value.numel() for value in tensors.values()):,} parameters")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of the training run")
    parser.add_argument("--model", type=Path, required=True, help="folder to write")
    args = parser.parse_args()
    export(args.out, args.model)


if __name__ == "__main__":
    main()
