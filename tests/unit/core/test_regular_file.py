"""Files of a model folder that are none: a FIFO, a device, a socket, a folder; refused at once."""

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from headway.bench.calibrate import open_calibration
from headway.bench.report import BenchReport
from headway.bench.traces import read_trace
from headway.bench.workload import read_prompts
from headway.cli.calibrate import read_lines
from headway.cli.drift import read_probes
from headway.cli.launch import read as read_settings
from headway.core.errors import HeadwayError
from headway.core.regular_file import open_regular, read_bytes, read_text
from headway.core.yaml_file import read_yaml
from headway.edge.key_file import add_row, read_rows
from headway.frontend.text import Tokenizer
from headway.gateway.config import key_of, read_config
from headway.measure.saved import read_saved
from headway.perf.roofline import read_sheets
from headway.runtime.checkpoint_files import find_files
from headway.spec import read_model_spec
from headway.spec.model_files import read_document


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


GATEWAY = """\
upstreams: [{{name: a, url: "http://127.0.0.1:9/v1", key_file: "{}"}}]
models: [{{name: m, upstreams: [a]}}]
"""


def read_gateway(key_file: Path) -> object:
    file = key_file.with_name("gateway.yaml")
    file.write_text(GATEWAY.format(key_file))
    return key_of(read_config(file).upstreams[0])


READ: dict[str, Callable[[Path], object]] = {
    "a YAML file": lambda path: read_yaml(path, "--classes"),
    "a key file": read_rows,
    "a key file that gets a row": lambda path: add_row(path, "me", "k" * 32),
    "a key of an upstream": read_gateway,
    "an azure trace": lambda path: read_trace("azure", path),
    "a mooncake trace": lambda path: read_trace("mooncake", path),
    "prompts": read_prompts,
    "a report": lambda path: read_saved(str(path), BenchReport, "bench"),
    "a calibration": lambda path: open_calibration(str(path)),
    "a suite": lambda path: read_lines(str(path)),
    "probes": lambda path: read_probes(str(path), 5),
    "accelerators": lambda path: read_sheets(str(path)),
    "settings of an agent": read_settings,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("what", READ)
def test_what_a_user_names_is_read_only_where_it_is_a_file(tmp_path: Path, what: str, kind: str):
    path = tmp_path / "it"
    KINDS[kind](path)
    if kind in ("a FIFO", "a folder", "a socket"):
        path.chmod(0o600)  # a key that others can read is refused for that
    with pytest.raises(HeadwayError) as refused:
        READ[what](path)
    readable = what == "a key of an upstream" and kind == "a device"
    assert readable or f"it is {kind}" in str(refused.value)


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
