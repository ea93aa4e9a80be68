"""Two engines of a server have the model's weights once, by the system's own books."""

import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from live_server import LiveServer, alive, engines, wait_until
from safetensors.torch import save_file
from tiny_model import tiny_config, write_json, write_tokenizer

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="there is no memfd")

HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS = 1024, 4096, 8, 8, 2
LEAST_BYTES = LAYERS * 4 * HIDDEN * (2 * HIDDEN + 2 * HIDDEN // 4 + 3 * INTERMEDIATE)
"""Of the packed layers in fp32: 480 MiB, several times what an engine has beside them."""
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
    found = LiveServer(folder, *flags, "--dtype=float32", "--speculate=off").wait_ready()
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
