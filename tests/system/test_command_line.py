"""The command line: help, errors of two lines with their exit codes, run and chat, odd folders."""

import contextlib
import json
import shutil
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from live_server import LiveServer, headway
from tiny_model import write_json
from tokenizers import Tokenizer

from conftest import StartServer
from headway.cli.main import main
from headway.spec import FAMILIES

GREEDY = ("--temperature=0", "--max-tokens=12")


def edit_config(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    write_json(path, {**json.loads(path.read_text()), **fields})


def check_two_lines(done: "subprocess.CompletedProcess[str]", exit_code: int, *words: str) -> None:
    """Nothing on stdout; cause and fix on stderr, and no traceback."""
    assert done.returncode == exit_code, (done.returncode, done.stderr)
    assert done.stdout == ""
    lines = [line for line in done.stderr.splitlines() if not line.startswith("Loading ")]
    assert len(lines) == 2 and lines[0].startswith("headway: ") and lines[1].strip(), done.stderr
    for word in words:
        assert word.lower() in done.stderr.lower(), (word, done.stderr)


# ── help and usage ──────────────────────────────────────────────────────────────────────────


def test_help_names_every_verb() -> None:
    for arguments in ((), ("--help",), ("-h",), ("help",)):
        done = headway(*arguments)
        assert done.returncode == 0 and done.stderr == ""
        assert all(f"headway {verb}" in done.stdout for verb in ("serve", "run", "chat"))
    version = headway("--version", real=True).stdout
    assert version == headway("version").stdout and version.count(".") >= 2


@pytest.mark.parametrize("verb", ["serve", "run", "chat"])
def test_help_is_one_screen_all_of_it_or_about_a_word(verb: str) -> None:
    screen, everything, word = (headway(verb, f"--help{x}") for x in ("", "=all", "=memory"))
    for done in (screen, everything, word):
        assert (done.returncode, done.stderr) == (0, "")
    assert len(screen.stdout.splitlines()) < 40
    assert "--dtype" in screen.stdout and "--block-size" not in screen.stdout
    assert "--block-size" in everything.stdout
    assert "--kv-memory" in word.stdout and "--block-size" not in word.stdout
    assert "\x1b" not in everything.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("sevre",), ("sevre", "serve")),
        (("serve", "--max-model-length=5"), ("--max-model-length", "--max-model-len?")),
        (("serve", "--max-model-len=many"), ("many", "integer")),
        (("serve", "--max-model-len=0"), ("out of range",)),
        (("serve", "--dtype=float8"), ("float8", "bfloat16")),
        (("serve", "--port=70000"), ("out of range",)),
        (("serve", "--strict-api=perhaps"), ("perhaps",)),
        (("serve", "--config=/nowhere.yaml"), ("/nowhere.yaml",)),
        (("serve", "a", "b"), ("one model",)),
        (("run",), ("prompt",)),
        (("run", "a", "b", "c"), ("prompt",)),
        (("chat", "a", "b"), ("one model",)),
        (("run", "--temperature=3", "hi"), ("out of range",)),
        (("run", "--temperature=nan", "hi"), ("nan",)),
    ],
)
def test_a_wrong_command_line_is_a_usage_error(
    arguments: tuple[str, ...], words: tuple[str, ...]
) -> None:
    check_two_lines(headway(*arguments), 2, *words)


def test_an_option_may_come_from_the_environment_or_a_file(
    tiny_model: Path, tmp_path: Path
) -> None:
    file = tmp_path / "options.yaml"
    file.write_text("max-model-len: 128\nblock_size: 32\n")
    env = {"HEADWAY_MAX_MODEL_LEN": "256"}
    done = headway("serve", tiny_model, "--dry-run", f"--config={file}", env=env)
    assert done.returncode == 0, done.stderr
    settings = {line.split()[0]: line.split()[1] for line in done.stdout.splitlines()}
    assert settings["max_model_len"] == "256" and settings["block_size"] == "32"
    check_two_lines(headway("serve", tiny_model, env={"HEADWAY_DTYPE": "x"}), 2, "HEADWAY_DTYPE")
    file.write_text("max-modle-len: 128\n")
    check_two_lines(headway("serve", tiny_model, f"--config={file}"), 2, "max_model_len?")


@pytest.mark.parametrize("verb", ["serve", "run", "chat"])
def test_a_dry_run_tells_the_settings_and_stops(verb: str, tiny_model: Path) -> None:
    prompt = ["hi"] if verb == "run" else []
    done = headway(verb, tiny_model, *prompt, "--dry-run", "--kv-memory=64MiB")
    assert done.returncode == 0 and done.stderr == ""
    for word in ("LlamaForCausalLM", "kv_blocks", "max_model_len", "64.0 MiB", "from the flag"):
        assert word in done.stdout, word


def test_the_first_output_comes_soon() -> None:
    started = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "headway.cli.main", "serve", "--help"], stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    with process.stdout:
        assert process.stdout.readline()
        assert time.monotonic() - started < 120  # 300 ms are the aim, on an idle machine
        process.stdout.read()
    assert process.wait() == 0


@pytest.mark.parametrize("before", [("--skip-tokenizer-init",), ("-v",), ("--dry-run",)])
def test_a_switch_does_not_swallow_the_folder_after_it(
    tiny_model: Path, before: tuple[str, ...]
) -> None:
    done = headway("serve", *before, tiny_model, "--dry-run")
    assert done.returncode == 0, done.stderr
    assert headway("serve", "--strict-api", "false", tiny_model, "--dry-run").returncode == 0


# ── run and chat ────────────────────────────────────────────────────────────────────────────


def test_run_raw_completes_as_the_server_does(tiny_model: Path, server: LiveServer) -> None:
    body = {"model": "tiny", "prompt": "the sea", "temperature": 0, "max_tokens": 12}
    expected = server.post("/v1/completions", body)[1]["choices"][0]["text"]
    done = headway("run", tiny_model, "the sea", "--raw", *GREEDY, real=True)
    assert (done.returncode, done.stdout) == (0, expected + "\n")
    stop = expected[3:6]
    done = headway("run", tiny_model, "-", "--raw", *GREEDY, f"--stop={stop}", stdin="the sea")
    assert done.stdout == expected[: expected.index(stop)] + "\n"


def test_run_is_what_chat_says(tiny_model: Path, server: LiveServer) -> None:
    messages = [{"role": "user", "content": "Tell me"}]
    body: dict[str, Any] = {"model": "tiny", "messages": messages, "temperature": 0}
    body["max_tokens"] = 12
    first = server.post("/v1/chat/completions", body)[1]["choices"][0]["message"]["content"]
    for switches in ([], ["--chat"]):
        assert headway("run", tiny_model, "Tell me", *switches, *GREEDY).stdout == first + "\n"
    done = headway("run", tiny_model, "Tell me", "--chat", "--raw", *GREEDY)
    assert done.returncode == 2 and "--chat and --raw" in done.stderr
    messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "more"}]
    second = server.post("/v1/chat/completions", body)[1]["choices"][0]["message"]["content"]
    for piped, real in (("Tell me\nmore", False), ("Tell me\nmore\n\nnot read\n", True)):
        done = headway("chat", tiny_model, *GREEDY, stdin=piped, real=real)
        assert (done.returncode, done.stdout) == (0, f"{first}\n{second}\n"), done.stderr


def test_a_conversation_beyond_the_context_is_an_error(tiny_model: Path) -> None:
    done = headway("chat", tiny_model, "--max-model-len=64", *GREEDY, stdin="word " * 100 + "\n")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    done = headway("run", tiny_model, "word " * 600, *GREEDY)
    assert done.returncode == 1 and "context" in done.stderr and "Traceback" not in done.stderr


def test_an_odd_prompt_is_no_traceback(tiny_model: Path) -> None:
    for prompt in ("", "\udcff"):
        done = headway(
            "run", tiny_model, "-", *GREEDY, stdin=prompt.encode(errors="surrogateescape")
        )
        assert "Traceback" not in done.stderr and done.returncode in (0, 1)


# ── folders that cannot be served ───────────────────────────────────────────────────────────


def empty(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


def truncated(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def a_huge_header(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 2**62) + b"{}")


def a_pickle(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def a_climbing_index(folder: Path) -> None:
    write_json(folder / "model.safetensors.index.json", {"weight_map": {"a": "../b.safetensors"}})


def a_gguf_folder(folder: Path) -> None:
    empty(folder)
    (folder / "model.gguf").write_bytes(b"GGUF" + bytes(100))


def no_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def only_sentencepiece(folder: Path) -> None:
    (folder / "tokenizer.json").rename(folder / "tokenizer.model")


def a_broken_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')


def a_broken_config(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def a_broken_template(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{% for %}")


def config(**fields: Any) -> Callable[[Path], None]:
    """A folder whose config.json says something else."""
    return lambda folder: edit_config(folder, **fields)


BAD_FOLDERS: dict[str, tuple[Callable[[Path], None], str]] = {
    "nothing there": (shutil.rmtree, "no folder"),
    "empty": (empty, "no config.json"),
    "truncated weights": (truncated, "truncated"),
    "a huge header": (a_huge_header, "header"),
    "a pickle": (a_pickle, "pickle"),
    "a climbing index": (a_climbing_index, "../b.safetensors"),
    "unknown architecture": (config(architectures=["MambaForCausalLM"]), "MambaForCausalLM"),
    "more than text": (
        config(architectures=["Gemma3ForConditionalGeneration"], text_config={"hidden_size": 64}),
        "text model alone",
    ),
    "no architecture": (config(architectures=[]), "architecture"),
    "gptq": (config(quantization_config={"quant_method": "gptq", "bits": 4}), "GPTQ"),
    "awq": (config(quantization_config={"quant_method": "awq", "bits": 4}), "AWQ"),
    "quantized somehow": (config(quantization_config=["x"]), "quantiz"),
    "gguf": (a_gguf_folder, "GGUF"),
    "no tokenizer": (no_tokenizer, "tokenizer.json"),
    "sentencepiece": (only_sentencepiece, "sentencepiece"),
    "broken tokenizer": (a_broken_tokenizer, "tokenizer.json"),
    "broken config": (a_broken_config, "JSON"),
    "broken template": (a_broken_template, "template"),
    "wrong shapes": (config(hidden_size=32), "shape"),
    "too many layers": (config(num_hidden_layers=3), "missing"),
    "zero layers": (config(num_hidden_layers=0), "num_hidden_layers"),
    "unknown rope": (config(rope_scaling={"rope_type": "mrope", "factor": 2}), "mrope"),
    "rope without factor": (config(rope_scaling={"rope_type": "linear"}), "factor"),
    "odd rope": (config(rope_scaling=[1]), "rope"),
    "odd end token": (config(eos_token_id="two"), "eos_token_id"),
    "odd epsilon": (config(rms_norm_eps="small"), "rms_norm_eps"),
}


RUN_TOO = ("truncated weights", "unknown architecture", "gptq", "gguf", "sentencepiece")


@pytest.mark.parametrize(
    ("verb", "name"), [*(("serve", n) for n in BAD_FOLDERS), *(("run", n) for n in RUN_TOO)]
)
def test_a_folder_that_cannot_be_served_is_told_in_two_lines(
    verb: str, name: str, tiny_model: Path, tmp_path: Path
) -> None:
    spoil, word = BAD_FOLDERS[name]
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    spoil(folder)
    arguments = ("--port=0",) if verb == "serve" else ("hi",)
    done = headway(verb, folder, *arguments, "--kv-memory=8MiB", real=name == "truncated weights")
    check_two_lines(done, 3, word)


COMPRESSED_TOO = (
    *("truncated weights", "a huge header", "a climbing index", "broken config", "wrong shapes"),
    *("too many layers", "zero layers", "odd epsilon", "no tokenizer", "broken tokenizer"),
)


@pytest.mark.parametrize("name", COMPRESSED_TOO)
def test_a_folder_that_cannot_be_compressed_is_told_in_two_lines(
    name: str,
    tiny_model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("headway.compress.train.texts.NUM_CHATS", 300)
    spoil, word = BAD_FOLDERS[name]
    folder, out = tmp_path / "model", tmp_path / "out"
    shutil.copytree(tiny_model, folder)
    spoil(folder)
    for words in (
        ["prune", str(folder), str(out), "--neurons=0.375"],
        ["distill", str(folder), str(tiny_model), str(out), "--data=skills", "--steps=1"],
        ["distill", str(tiny_model), str(folder), str(out), "--data=skills", "--steps=1"],
    ):
        status = main(words)
        told = capsys.readouterr().err
        assert status == 3 and word in told and "Traceback" not in told, (words, status, told)
        assert not out.exists()


def test_an_unknown_architecture_is_told_what_is_supported(
    tiny_model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    for name in ("MambaForCausalLM", "Mistral3ForConditionalGeneration"):
        edit_config(folder, architectures=[name], vision_config={})
        check_two_lines(headway("serve", folder, "--dry-run"), 3, name, *FAMILIES)


def test_a_gguf_file_is_told_apart(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF" + bytes(100))
    for verb in ("serve", "run", "chat"):
        prompt = ["hi"] if verb == "run" else []
        check_two_lines(headway(verb, file, *prompt), 3, "GGUF")


def test_what_does_not_fit_is_told(tiny_model: Path) -> None:
    for flags in (["--kv-memory=1KiB"], ["--max-model-len=512", "--kv-memory=64KiB"]):
        check_two_lines(headway("serve", tiny_model, "--port=0", *flags), 3, "--kv-memory")
    check_two_lines(headway("serve", tiny_model, "--max-model-len=513"), 2, "512")
    check_two_lines(headway("serve", tiny_model, "--device=cuda"), 2, "CUDA")


def test_a_traceback_comes_only_with_v(tmp_path: Path) -> None:
    assert "Traceback" in headway("serve", tmp_path, "-v").stderr


# ── serve ───────────────────────────────────────────────────────────────────────────────────


def test_a_port_in_use_is_exit_4_before_anything_loads(tiny_model: Path) -> None:
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        done = headway("serve", tiny_model, f"--port={port}", real=True)
        check_two_lines(done, 4, str(port), "--port")


def test_an_unknown_host_is_a_usage_error(tiny_model: Path) -> None:
    for host in ("no.such.host.invalid", "203.0.113.1"):
        done = headway("serve", tiny_model, "--port=0", f"--host={host}", "--insecure=true")
        check_two_lines(done, 2, host)


def test_the_greeting_is_the_last_of_the_output(start_server: StartServer) -> None:
    live = start_server("--executor=null").wait_ready()
    live.probe()
    lines = live.stdout.splitlines()
    assert lines[0].endswith("/v1") and "512" in lines[1] and lines[-1].strip().startswith("try")
    assert "curl" in lines[-1] and "chat/completions" in lines[-1]


def test_without_a_tokenizer_it_serves_ids(
    start_server: StartServer, server: LiveServer, tiny_model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    no_tokenizer(folder)
    live = start_server("--skip-tokenizer-init=true", folder=folder).wait_ready()
    assert live.probe() == server.probe()
    body: dict[str, Any] = {"model": "model", "prompt": [10, 20], "max_tokens": 3, "logprobs": 1}
    status, answer = live.post("/v1/completions", body)
    assert status == 200 and len(answer["choices"][0]["token_ids"]) == 3
    assert answer["choices"][0]["logprobs"]["tokens"][0].startswith("token_id:")
    for path, extra, param in (
        ("/v1/completions", {"prompt": "text"}, "prompt"),
        ("/v1/completions", {"stop": "text"}, "stop"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}, "messages"),
        ("/tokenize", {"prompt": "text"}, "prompt"),
    ):
        given = {name: value for name, value in body.items() if name != "logprobs"} | extra
        if "messages" in extra:
            given.pop("prompt")
        status, answer = live.post(path, given)
        assert (status, answer["error"]["code"]) == (400, "no_tokenizer"), answer
        assert answer["error"]["param"] == param


def test_dummy_weights_need_a_config_alone(
    start_server: StartServer, tiny_model: Path, tmp_path: Path
) -> None:
    shutil.copy(tiny_model / "config.json", tmp_path)
    flags = ("--load-format=dummy", "--skip-tokenizer-init=true")
    live = start_server(*flags, folder=tmp_path).wait_ready()
    assert live.probe() == live.probe()
    done = headway(
        "run", tmp_path, "hi", "--load-format=dummy", f"--tokenizer={tiny_model}", *GREEDY
    )
    assert done.returncode == 0 and done.stdout.strip()


def test_the_vocabulary_is_the_tokenizers(tiny_model: Path) -> None:
    """What the fixtures rely on."""
    size = Tokenizer.from_file(str(tiny_model / "tokenizer.json")).get_vocab_size()
    assert size == json.loads((tiny_model / "config.json").read_text())["vocab_size"]


def test_what_a_models_files_say_moves_no_terminal(tmp_path: Path) -> None:
    """An escape sequence and a line break in config.json come out escaped, in two lines."""
    (tmp_path / "config.json").write_text(
        json.dumps({"architectures": ["\x1b[2JEvil\nheadway: all is well"]})
    )
    refused = headway("serve", tmp_path, "--port=0")
    assert refused.returncode == 3
    assert "\x1b" not in refused.stderr and len(refused.stderr.splitlines()) == 2
    assert r"\x1b[2JEvil\nheadway" in refused.stderr
