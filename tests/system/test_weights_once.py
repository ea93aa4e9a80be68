"""Where weights lie by the system's books: once for two engines, in huge pages for one alone."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from live_server import LiveServer, alive, engines, wait_until
from safetensors.torch import save_file
from tiny_model import tiny_config, write_json, write_tokenizer

from headway.runtime.memory import gives_huge_pages
from headway.runtime.native.available import best_instruction_set

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="there is no memfd")

HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS = 1024, 4096, 8, 8, 2
LEAST_BYTES = LAYERS * 4 * HIDDEN * (2 * HIDDEN + 2 * HIDDEN // 4 + 3 * INTERMEDIATE)
"""Of the packed layers in fp32: 480 MiB, several times what an engine has beside them."""
LEVELS_BYTES = LEAST_BYTES // 8
"""Of the same in int4."""
MAPPED = re.compile(r"^[0-9a-f]+-[0-9a-f]+ \S+ \S+ \S+ \d+ +(.*)$")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with random weights, 240 MiB in 16 bits."""
    path = tmp_path_factory.mktemp("model")
    vocab_size = write_tokenizer(path).get_vocab_size()
    sizes = {"hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE, "num_hidden_layers": LAYERS}
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS}
    own = {"torch_dtype": "bfloat16", "max_position_embeddings": 256}
    write_json(path / "config.json", tiny_config(vocab_size) | sizes | heads | own)
    kv = HIDDEN * KV_HEADS // HEADS
    attention = {"q": (HIDDEN, HIDDEN), "k": (kv, HIDDEN), "v": (kv, HIDDEN), "o": (HIDDEN, HIDDEN)}
    inner = {"gate": (INTERMEDIATE, HIDDEN), "up": (INTERMEDIATE, HIDDEN)}
    shapes = {f"self_attn.{name}_proj": shape for name, shape in attention.items()}
    shapes |= {f"mlp.{name}_proj": shape for name, shape in inner.items()}
    shapes |= {"mlp.down_proj": (HIDDEN, INTERMEDIATE)}
    shapes |= {"input_layernorm": (HIDDEN,), "post_attention_layernorm": (HIDDEN,)}
    torch.manual_seed(3)

    def random(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16).normal_(0, 0.05)

    tensors = {
        f"model.layers.{layer}.{name}.weight": random(*shape)
        for layer in range(LAYERS)
        for name, shape in shapes.items()
    }
    ends = ("model.embed_tokens.weight", "lm_head.weight")
    tensors |= {name: random(vocab_size, HIDDEN) for name in ends}
    tensors["model.norm.weight"] = random(HIDDEN) + 1
    save_file(tensors, path / "model.safetensors")
    return path


@pytest.fixture
def server(folder: Path) -> Iterator[LiveServer]:
    flags = ("--replicas=2", "--threads=1", "--kv-memory=16MiB", "--engine-timeout=10m")
    found = LiveServer(folder, *flags, "--dtype=float32", "--speculative-method=off").wait_ready()
    yield found
    found.close()


def both_ready(server: LiveServer) -> bool:
    found = msgspec.json.decode(server.get("/stats")[1])["engines"]
    return all(each["ready"] for each in found)


def books(pid: int) -> tuple[dict[str, int], int]:
    """(what the system says of the shared weights in the process, bytes; all else of its own)."""
    shared, others, is_shared = dict.fromkeys(("Rss", "Pss", "Anonymous"), 0), 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        mapped = MAPPED.match(line)
        if mapped:
            is_shared = "headway weights" in mapped[1]
            continue
        name, value = line.split()[:2]
        if is_shared and name[:-1] in shared:
            shared[name[:-1]] += int(value) * 1024
        elif name in ("Private_Dirty:", "Private_Clean:"):
            others += int(value) * 1024
    return shared, others


def check_once(pids: list[int]) -> None:
    """Each has all of the weights, none of them of its own, and all else is smaller."""
    found = [books(pid) for pid in pids]
    for shared, others in found:
        assert shared["Anonymous"] == 0, "a page that it has written for itself"
        assert shared["Rss"] >= LEAST_BYTES > others
    assert LEAST_BYTES <= sum(shared["Pss"] for shared, _ in found) < 1.1 * LEAST_BYTES


def test_two_engines_have_them_once(server: LiveServer):
    """Also where one was killed, and its next has what is there; they end with the server."""
    wait_until(lambda: both_ready(server))
    before = server.probe()
    first, second = engines(server.pid)
    check_once([first, second])
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: len(set(engines(server.pid)) - {first}) == 2 and both_ready(server))
    (third,) = set(engines(server.pid)) - {first, second}
    check_once([second, third])
    assert [server.probe() for _ in range(4)] == [before] * 4
    server.signal(signal.SIGTERM)
    assert server.wait_end() == 0
    assert not any(alive(pid) for pid in (second, third))


ALONE = """
import ctypes, json, sys
from pathlib import Path
folder, quantization, has_huge_pages = sys.argv[1:]
if has_huge_pages != "True":
    assert ctypes.CDLL(None).prctl(41, 1, 0, 0, 0) == 0  # PR_SET_THP_DISABLE
from headway import LLM, SamplingParams
options = {"quantization": quantization, "quantization_group": 64, "speculative_method": "off"}
llm = LLM(folder, threads=1, kv_memory="16MiB", **options)
asked = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
(found,) = llm.generate([[7, 9, 11]], asked, use_tqdm=False)
print(json.dumps([list(found.outputs[0].token_ids), Path("/proc/self/smaps").read_text()]))
"""


def alone(folder: Path, quantization: str, *, huge: bool = True) -> tuple[list[int], int, int]:
    """(tokens, bytes in huge pages, of packed weights on disk bytes that are mapped) of a process
    that has an engine."""
    arguments = [sys.executable, "-c", ALONE, str(folder), quantization, str(huge)]
    said = subprocess.run(arguments, stdout=subprocess.PIPE, check=True).stdout
    tokens, smaps = json.loads(said.splitlines()[-1])
    in_huge = in_file = 0
    is_file = False
    for line in smaps.splitlines():
        mapped = MAPPED.match(line)
        if mapped:
            is_file = mapped[1].endswith(".weights")
        elif line.startswith("AnonHugePages:"):
            in_huge += int(line.split()[1]) * 1024
        elif line.startswith("Rss:") and is_file:
            in_file += int(line.split()[1]) * 1024
    return tokens, in_huge, in_file


@pytest.mark.parametrize("quantization", ["int4", "int8"])
def test_one_engine_alone_has_them_in_huge_pages(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quantization: str
):
    """From the second start on, which reads what the first packed; where there are none it maps.

    The same tokens each time.
    """
    if not best_instruction_set()[0]:
        pytest.skip(best_instruction_set()[1])
    if not gives_huge_pages():
        pytest.skip("the system gives no huge pages")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    packed, _, in_file = alone(folder, quantization)
    assert in_file == 0
    read, in_huge, in_file = alone(folder, quantization)
    least = LEVELS_BYTES * (2 if quantization == "int8" else 1)
    assert in_huge > 0.8 * least and in_file < 0.1 * least
    mapped, in_huge, in_file = alone(folder, quantization, huge=False)
    assert in_huge == 0 and in_file >= least
    assert packed == read == mapped
