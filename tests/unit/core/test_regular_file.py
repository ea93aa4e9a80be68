"""Files of a model folder that are none: a FIFO, a device, a socket, a folder; refused at once."""

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from headway.core.errors import HeadwayError
from headway.core.model_files import read_document
from headway.core.model_spec import read_model_spec
from headway.core.regular_file import open_regular, read_bytes, read_text
from headway.frontend.text import Tokenizer
from headway.runtime.checkpoint_files import find_files


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


KINDS: dict[str, Callable[[Path], object]] = {
    "a FIFO": os.mkfifo,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a folder": Path.mkdir,
    "a socket": make_socket,
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_file_is_an_error_at_once(tmp_path: Path, kind: str):
    path = tmp_path / "it"
    KINDS[kind](path)
    for read in (open_regular, read_bytes, read_text):
        with pytest.raises(OSError, match=f"it is {kind}, not a regular file"):
            read(path)


def test_a_file_is_read_up_to_a_bound(tmp_path: Path):
    path = tmp_path / "it"
    path.write_bytes(b"12345")
    assert read_bytes(path, 5) == b"12345" and read_text(path) == "12345"
    with pytest.raises(OSError, match="more than 4 bytes"):
        read_bytes(path, 4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_folder_of_other_things_is_refused(tmp_path: Path, kind: str):
    """Each file that a server reads of a folder, in its turn."""
    reads: dict[str, Callable[[], object]] = {
        "config.json": lambda: read_model_spec(tmp_path),
        "generation_config.json": lambda: read_document(tmp_path, "generation_config.json"),
        "tokenizer.json": lambda: Tokenizer(tmp_path),
        "model.safetensors": lambda: find_files(tmp_path),
        "model.safetensors.index.json": lambda: find_files(tmp_path),
        "chat_template.jinja": lambda: Tokenizer(tmp_path, tmp_path / "chat_template.jinja"),
    }
    for name, read in reads.items():
        if name == "chat_template.jinja":
            (tmp_path / "tokenizer.json").unlink(missing_ok=True)
            (tmp_path / "tokenizer.json").write_bytes(SMALL)
        KINDS[kind](tmp_path / name)
        with pytest.raises(HeadwayError, match=f"it is {kind}, not a regular file"):
            read()
        os.rmdir(tmp_path / name) if kind == "a folder" else os.unlink(tmp_path / name)


SMALL = b'{"version": "1.0", "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}'
