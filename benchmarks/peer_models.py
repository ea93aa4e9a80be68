"""A Hugging Face folder as its peers want it: GGUF files for llama.cpp, exports for OpenVINO.

Made once and kept in the cache of published weights (`tests/published_weights.py`). For llama.cpp,
SOURCE is a built tree of it, such as `vendor/llama.cpp` of llama-cpp-python's sdist, with programs
in `build/bin`, and PYTHON that of an environment for its converter: torch, transformers and
sentencepiece. For OpenVINO, PYTHON is that of an environment with optimum-intel.
"""

import hashlib
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from published_weights import cache_folder, created_once  # noqa: E402

EXPORT = ("export", "openvino", "--task", "text-generation-with-past")
FORMATS = {
    "int8": ("--weight-format", "int8"),
    "int4": ("--weight-format", "int4", "--group-size", "64", "--ratio", "1.0", "--sym"),
}
"""OpenVINO's formats: int4 leaves head and embeddings in int8."""


class PeerError(Exception):
    """Why a peer, or a model of its, is not there."""


def binaries(source: Path) -> Path:
    """Where a built tree of llama.cpp has its programs."""
    return source / "build" / "bin"


def place_of(folder: Path) -> Path:
    """The cache's folder for what is made of this one: of its name and its weights' bytes."""
    digest = hashlib.sha256()
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as opened:
            digest.update(hashlib.file_digest(opened, "sha256").digest())
    return cache_folder() / "peers" / f"{folder.name}-{digest.hexdigest()[:12]}"


def gguf_file(
    folder: Path, kind: str, python: str, source: Path, published: Path | None = None
) -> Path:
    """The folder as a GGUF file of `kind`, such as BF16, Q8_0 or Q4_K_M; raises PeerError.

    If the folder was made of a `published` GGUF file, the new file is made of that as well and
    keeps its tokenizer, which llama.cpp's converter does not always know again in the folder.
    """
    target = place_of(folder) / f"gguf-{kind}"
    if not target.is_dir() and kind != "BF16":
        whole = gguf_file(folder, "BF16", python, source, published)
    with created_once(target) as unfinished:
        if unfinished is not None:
            file = unfinished / f"{kind}.gguf"
            if kind == "BF16" and published is not None:
                quantize = [str(binaries(source) / "llama-quantize"), "--allow-requantize"]
                run([*quantize, str(published), str(file), kind])
            elif kind == "BF16":
                converter = source / "convert_hf_to_gguf.py"
                to = ["--outtype", "bf16", "--outfile", str(file)]
                run([python, str(converter), str(folder), *to])
            else:
                run([str(binaries(source) / "llama-quantize"), str(whole), str(file), kind])
    return target / f"{kind}.gguf"


def openvino_folder(folder: Path, kind: str, python: str) -> Path:
    """The folder exported for OpenVINO in one of `FORMATS`; raises PeerError."""
    target = place_of(folder) / f"openvino-{kind}"
    with created_once(target) as unfinished:
        if unfinished is not None:
            program = str(Path(python).with_name("optimum-cli"))
            run([program, *EXPORT, "-m", str(folder), *FORMATS[kind], str(unfinished)])
    return target


def run(command: list[str]) -> None:
    """Run a peer's program; PeerError has its last line where it fails."""
    try:
        found = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise PeerError(f"{command[0]}: {error.strerror}") from error
    if found.returncode:
        lines = found.stderr.strip().splitlines() or ["it said nothing"]
        raise PeerError(f"{Path(command[0]).name} ended with {found.returncode}: {lines[-1][:300]}")
