"""The embedded model as one GGUF file: asked offline, served, planned."""

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

pytest.importorskip("gguf", reason="pip install gguf")

from live_server import LiveServer, headway
from transformers import LlamaForCausalLM

import gguf_file
from headway import LLM, SamplingParams
from headway.spec import embedded
from parity import gguf_models

QUESTION = [{"role": "user", "content": "What is 2 + 3?"}]
ANSWER = "2 + 3 = 5."


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """headway-tiny in Q8_0, with its tokenizer.json inside."""
    folder = embedded.model_folder("headway-tiny")
    model = LlamaForCausalLM.from_pretrained(folder)
    path = tmp_path_factory.mktemp("gguf") / "tiny-q8_0.gguf"
    vocabulary = gguf_file.vocabulary_of(folder, whole=True)
    return gguf_models.write(path, "llama", model, "Q8_0", **vocabulary)


@pytest.fixture(scope="module")
def server(file: Path) -> Iterator[LiveServer]:
    with closing(LiveServer(file, "--kv-memory=64MiB", "--max-model-len=512")) as started:
        yield started.wait_ready()


def test_file_answers_offline_as_its_folder_does(file: Path):
    llm = LLM(file, kv_memory="64MiB")
    sampling = SamplingParams(temperature=0, max_tokens=16)
    assert llm.chat(QUESTION, sampling)[0].outputs[0].text == ANSWER
    assert llm.spec.quantization == "gguf"


def test_file_is_served_under_its_name(server: LiveServer):
    body = {"model": "tiny-q8_0", "messages": QUESTION, "temperature": 0}
    status, answer = server.post("/v1/chat/completions", body)
    assert status == 200, answer
    assert answer["choices"][0]["message"]["content"] == ANSWER
    assert answer["choices"][0]["finish_reason"] == "stop"


def test_grammars_know_the_vocabulary_of_the_file(server: LiveServer):
    properties = {"sum": {"enum": [5, 6]}}
    schema = {"type": "object", "properties": properties, "required": ["sum"]}
    schema["additionalProperties"] = False
    body = {
        "model": "tiny-q8_0",
        "messages": QUESTION,
        "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}},
    }
    status, answer = server.post("/v1/chat/completions", body)
    assert status == 200, answer
    assert json.loads(answer["choices"][0]["message"]["content"])["sum"] in (5, 6)


def test_dry_run_says_formats_and_bytes(file: Path):
    done = headway("serve", file, "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "LlamaForCausalLM" in done.stdout and "int8 in groups of 32" in done.stdout
    cut = file.with_name("cut.gguf")
    cut.write_bytes(file.read_bytes()[:100_000])
    refused = headway("serve", cut)
    assert refused.returncode == 3 and "cut.gguf" in refused.stderr
