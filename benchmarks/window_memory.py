"""KV memory of long contexts: Gemma 3 1B's interleaved layers beside full attention.

    python benchmarks/window_memory.py

A real engine runs one request of each length on random weights (hidden size 64 to be quick; layers,
KV heads and head size are Gemma 3 1B's, in bf16) and the blocks its two KV groups hold are counted
at every step. The most are held while the prompt is computed: the window and one chunk; then only
the window.
"""

import json
import tempfile
from pathlib import Path

from common import heading
from headway.assemble import assemble
from headway.config.options import Bytes, EngineOptions
from headway.core.request import Request, SamplingParams

SHAPE = {
    "architectures": ["Gemma3ForCausalLM"],
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 26,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "max_position_embeddings": 32768,
    "torch_dtype": "bfloat16",
}
LENGTHS = (512, 2048, 8192)
ANSWER = 32


def measure(window: int | None) -> list[tuple[int, int]]:
    """(most bytes held, bytes held at the end) for each length, with this window in 22 layers."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps({**SHAPE, "sliding_window": window}))
        options = EngineOptions(
            load_format="dummy",
            skip_tokenizer_init=True,
            max_num_seqs=1,
            max_num_batched_tokens=512,
            kv_memory=Bytes(2**30),
        )
        assembled = assemble(Path(folder), options)
    engine, groups = assembled.engine, assembled.spec.kv_groups
    settings = assembled.settings
    block_bytes = [
        group.bytes_per_token(settings.cache.dtype) * settings.cache.block_size for group in groups
    ]
    found = []
    for number, length in enumerate(LENGTHS, 1):
        sampling = SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True)
        engine.add(Request(number, [7] * (length - ANSWER), sampling))
        held = [0]
        while engine.has_work:
            engine.step()
            used = [pool.num_used for pool in engine.kv.pools]
            held.append(sum(a * b for a, b in zip(used, block_bytes, strict=True)))
        found.append((max(held), [h for h in held if h][-1]))
    return found


def main() -> None:
    full, windows = measure(None), measure(512)
    columns = ("full, MiB", "windows of 512, most", "in decode", "full ÷ decode")
    print(heading(["context", *columns]))
    for length, (_, whole), (most, end) in zip(LENGTHS, full, windows, strict=True):
        mib = [x / 2**20 for x in (whole, most, end)]
        print(f"| {length:,} | {mib[0]:.0f} | {mib[1]:.0f} | {mib[2]:.0f} | {whole / end:.1f} |")


if __name__ == "__main__":
    main()
