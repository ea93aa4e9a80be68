"""Prefill and decode speed of a model, offline: `python benchmarks/offline.py FOLDER`.

A prompt of 512 random tokens (`--context`) gives prefill tokens/s; then 1, 8 and 32 sequences of
that context are decoded together. One decode of the most sequences comes first and is not counted:
it touches the KV memory, whose pages a server has touched once and a virtual machine may get from
its host at 5 ms for 2 MB. Each figure is the median of repeats, beside the machine's own
ceiling, the best of the runtime's probes before each: bytes a decode step must read over the
memory's bandwidth, FLOPs over the peak of the GEMM. "reads" is a step's time over that of
just reading its weights and KV right after it, the median of some: neighbours, a shared cache and
where the memory lies do to one what they do to the other. Rates are wall time; MBU and MFU come
from the step records, by the formulas of the server's /stats. `--peer PYTHON` runs vLLM's offline
engine, from a virtual environment of its own, on the same folder between two halves of our repeats,
so that both meet the same machine.
"""

import argparse
import json
import random
import statistics
import subprocess
import time
from pathlib import Path

import torch

from headway import LLM, SamplingParams
from headway.core.records import StepRecord
from headway.core.request import Request
from headway.perf.roofline import ModelWork, Roof
from headway.telemetry.windows import StepSums

CONTEXT = 512
DECODE_STEPS = {1: 48, 4: 24, 8: 24, 32: 16}
ROOM = 128
"""Tokens that a sequence may decode: `DECODE_STEPS`, and some beside the prompts of others."""
PROBE_S = 0.6
READS = 7

Figures = dict[str, float]
"""Tokens/s by name: prefill, batch 1, batch 8, …"""
Repeat = tuple[Figures, Figures, dict[str, tuple[float, float]], Figures]
"""Ceilings, rates, (MBU, MFU), and times of reading a step's bytes, by name."""


class Rates:
    """Measures one LLM with prompts of `context` tokens."""

    def __init__(self, llm: LLM, context: int = CONTEXT) -> None:
        self.llm, self.context = llm, context
        self.records: list[StepRecord] = []
        """Of the last measurement."""
        self._random = random.Random(0)
        self._ids = iter(range(1, 10**9))

    def _add(self, num_seqs: int, max_tokens: int) -> None:
        vocab = self.llm.spec.vocab_size
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        for _ in range(num_seqs):
            prompt = [self._random.randrange(vocab) for _ in range(self.context)]
            self.llm.engine.add(Request(next(self._ids), prompt, params))

    def prefill(self) -> float:
        """Tokens/s until the first token of one prompt."""
        self._add(1, 1)
        self.records = []
        started = time.perf_counter()
        while self.llm.engine.has_work:
            self.records.append(self.llm.engine.step()[1])
        return self.context / (time.perf_counter() - started)

    def decode(self, num_seqs: int) -> float:
        """Tokens/s while all sequences decode, prompts not counted."""
        self.begin(num_seqs)
        rate = self.steps(DECODE_STEPS[num_seqs])
        self.end()
        return rate

    def begin(self, num_seqs: int) -> None:
        """Compute the prompts of so many sequences, which then decode until `end`."""
        self._add(num_seqs, 10**6)
        scheduler = self.llm.engine.scheduler
        while scheduler.waiting or any(s.num_known - s.computed > 1 for s in scheduler.running):
            self.llm.engine.step()

    def steps(self, count: int) -> float:
        """Tokens/s of so many steps of the sequences that decode."""
        self.records, num_tokens = [], 0
        started = time.perf_counter()
        for _ in range(count):
            updates, record = self.llm.engine.step()
            self.records.append(record)
            num_tokens += sum(len(update.token_ids) for update in updates)
        return num_tokens / (time.perf_counter() - started)

    def end(self) -> None:
        """Abort the sequences that decode."""
        for sequence in list(self.llm.engine.scheduler.running):
            self.llm.engine.abort(sequence.request.request_id)
        while self.llm.engine.has_work:
            self.llm.engine.step()

    def utilization(self, work: ModelWork) -> tuple[float, float]:
        """(MBU, MFU) of the last measurement."""
        sums = StepSums.over(len(work.kv_bytes))
        for record in self.records:
            sums.add(record)
        place = Roof(self.llm.engine.executor.describe().ceilings).place(work, sums)
        assert place is not None and place.mbu is not None and place.mfu is not None
        return place.mbu, place.mfu


class StepMemory:
    """What a decode step of native kernels reads, packed weights and KV, read as their probe reads.

    Other kernels pack as they like, and of experts a step reads some: `readable` is False.
    """

    def __init__(self, llm: LLM) -> None:
        executor = llm.engine.executor
        self._library = executor.kernels.library
        packed = [getattr(linear, "prepared", None) for linear in executor.target.linears]
        panels = [getattr(weight, "panels", None) for weight in packed]
        self._weights = [words_of(tensor) for tensor in panels if tensor is not None]
        self.readable = self._library is not None and len(self._weights) == len(panels)
        self._kv = [part for layer in executor.kv for part in layer.parts]
        self._block_size = llm.settings.cache.block_size

    def reading_s(self, num_tokens: int) -> float:
        """Median seconds of reading all weights, and KV of so many tokens."""
        assert self._library is not None
        blocks = -(-num_tokens // self._block_size)
        memory = self._weights + [words_of(part[:blocks]) for part in self._kv]
        spent_s = []
        for _ in range(READS):
            started = time.perf_counter()
            for words in memory:
                self._library.calls.read_words(words.data_ptr(), words.nbytes)
            spent_s.append(time.perf_counter() - started)
        return statistics.median(spent_s)


def words_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's memory as numbers of 32 bits."""
    return tensor.detach().view(-1).view(torch.uint8)[: tensor.nbytes // 4 * 4].view(torch.int32)


def ceilings(llm: LLM, work: ModelWork, context: int, batches: list[int]) -> Figures:
    """Tokens/s that bandwidth (decode) and the GEMM (prefill) allow here and now."""
    spec = llm.spec
    llm.engine.executor.probe(PROBE_S)
    probed = llm.engine.executor.describe().ceilings
    bandwidth, peak = probed.bandwidth_bytes_per_s, probed.flops_per_s
    print(f"  probed: {bandwidth / 1e9:.1f} GB/s, {peak / 1e9:.0f} GFLOP/s {probed.flops_dtype}")
    found = {"prefill": context * peak / spec.flops(context, context // 2, num_sampled=1)}
    for batch in batches:
        num_bytes = work.weight_bytes + batch * context * sum(work.kv_bytes)
        seconds = max(num_bytes / bandwidth, spec.flops(batch, context) / peak)
        found[f"batch {batch}"] = batch / seconds
    return found


def run_peer(python: str, folder: Path, dtype: str, batches: str, repeats: int) -> Figures:
    """vLLM's figures, from its own environment."""
    script = Path(__file__).with_name("vllm_offline.py")
    command = [python, str(script), str(folder), dtype, batches, str(repeats)]
    output = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout
    figures: Figures = json.loads(output.strip().splitlines()[-1])
    return figures


def run_ours(chosen: argparse.Namespace, batches: list[int]) -> list[Repeat]:
    """Each repeat; the model is gone afterwards."""
    llm = LLM(
        chosen.folder,
        dtype=chosen.dtype,
        kernels=chosen.kernels,
        quantization=chosen.quantization,
        load_format=chosen.load_format,
        kv_cache_dtype=chosen.kv_cache_dtype,
        max_model_len=chosen.context + ROOM,
        max_num_seqs=max(batches),
        skip_tokenizer_init=True,
    )
    rates = Rates(llm, chosen.context)
    rates.decode(max(batches))
    per_weight = llm.engine.executor.describe().bytes_per_weight
    work = ModelWork(llm.spec, llm.settings.dtype, llm.settings.cache.dtype, per_weight)
    memory = StepMemory(llm)
    found = []
    for _ in range(chosen.repeats):
        limits = ceilings(llm, work, chosen.context, batches)
        figures = {"prefill": rates.prefill()}
        used = {"prefill": rates.utilization(work)}
        reads = {}
        for batch in batches:
            figures[f"batch {batch}"] = rates.decode(batch)
            used[f"batch {batch}"] = rates.utilization(work)
            if memory.readable:
                read_s = memory.reading_s(batch * chosen.context)
                reads[f"batch {batch}"] = batch / figures[f"batch {batch}"] / read_s
        found.append((limits, figures, used, reads))
    return found


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--kernels", default="auto", help="auto, native or torch")
    parser.add_argument("--quantization", default="none", help="none, int8 or int4")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--load-format", default="auto", help="dummy: random weights")
    parser.add_argument("--context", type=int, default=CONTEXT, help="tokens of a prompt")
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--repeats", type=int, default=3, help="of ours; twice that with a peer")
    parser.add_argument("--peer", help="python of an environment with vLLM")
    parser.add_argument("--peer-dtype", help="when it is not ours")
    parser.add_argument("--peer-batches", help="when they are not ours")
    parser.add_argument("--peer-repeats", type=int, default=3)
    chosen = parser.parse_args()
    batches = [int(batch) for batch in chosen.batches.split(",")]

    ours = run_ours(chosen, batches)
    peer: Figures = {}
    if chosen.peer:
        peer = run_peer(
            chosen.peer,
            chosen.folder,
            chosen.peer_dtype or chosen.dtype,
            chosen.peer_batches or chosen.batches,
            chosen.peer_repeats,
        )
        ours += run_ours(chosen, batches)

    print(f"{'tok/s':<10}{'headway':>10}{'min':>8}{'max':>8}{'ceiling':>9}{'share':>7}", end="")
    print(f"{'MBU':>6}{'MFU':>6}{'reads':>7}", end="")
    print(f"{'vLLM':>9}{'ratio':>7}" if peer else "")
    for name in ours[0][1]:
        values = [figures[name] for _, figures, *_ in ours]
        limit = statistics.median(limits[name] for limits, *_ in ours)
        middle = statistics.median(values)
        row = f"{name:<10}{middle:>10.1f}{min(values):>8.1f}{max(values):>8.1f}"
        row += f"{limit:>9.0f}{middle / limit:>7.0%}"
        for part in (0, 1):
            row += f"{statistics.median(used[name][part] for _, _, used, _ in ours):>6.0%}"
        times = [reads[name] for *_, reads in ours if name in reads]
        row += f"{statistics.median(times):>7.2f}" if times else f"{'':>7}"
        if name in peer:
            row += f"{peer[name]:>9.1f}{middle / peer[name]:>7.2f}"
        print(row)


if __name__ == "__main__":
    main()
