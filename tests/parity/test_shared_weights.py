"""Engines that share their weights: the second reads and packs nothing, and computes the same."""

import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from recipes.tiny.eagle import Eagle
from recipes.tiny.model import Shape
from safetensors.torch import load_file, save_file

from drive import KV_BYTES, engine_for, finish
from headway.assemble import assemble, make_executor
from headway.config.options import EngineOptions
from headway.core.clock import SystemClock
from headway.core.errors import CapacityError
from headway.core.request import Request, SamplingParams
from headway.engine.engine import Engine
from headway.planning import plan_settings
from headway.runtime import eagle, loading, medusa, shared_weights, sharing
from headway.runtime.experts import ExpertLinear
from headway.runtime.layers import Linear
from headway.runtime.shared_weights import create_shared_files, filled_bytes, is_sealed
from headway.spec.embedded import model_folder
from parity.drafting import Proposals
from parity.tiny import save, tiny_model

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(sys.platform != "linux", reason="there is no memfd"),
]

ALL = ("qwen2", "gemma2", "gemma3n", "qwen3moe", "gptoss", "deepseekv3", "granitehybrid")
"""Biases, a tied head, embeddings by layer, experts, sinks, latent rows, states."""


@pytest.fixture
def weights() -> Iterator[list[int]]:
    found = create_shared_files(2)
    yield found
    for descriptor in found:
        os.close(descriptor)


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """What is read of weights and packed, by name; the cache on disk is a new one."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    done: list[str] = []

    def note(owner: object, name: str) -> None:
        whole = getattr(owner, name)

        def noted(*given: object, **named: object) -> object:
            if not str(given[-1]).endswith("bias"):
                done.append(name)
            return whole(*given, **named)

        monkeypatch.setattr(owner, name, noted)

    note(loading, "load_weights")
    note(eagle, "read_layer")
    note(medusa, "read_tensor")
    for kind in (Linear, ExpertLinear):
        note(kind, "prepare")
    return done


def sharing_engine(folder: Path, weights: list[int], **options: object) -> Engine:
    return engine_for(folder, make=partial(make_executor, weights=weights), **options)


def answers(engine: Engine) -> dict[tuple[int, int], tuple[list[int], list[object]]]:
    """Tokens, drawn, and their log-probabilities."""
    sampling = SamplingParams(temperature=1.0, seed=5, max_tokens=10, logprobs=2, ignore_eos=True)
    prompts = [[7 + i, *range(20, 20 + 3 * i), 9] for i in range(3)]
    found = finish(engine, [Request(i, prompt, sampling) for i, prompt in enumerate(prompts)])
    return {key: (each.token_ids, list(each.logprobs)) for key, each in found.items()}


def check_shared(folder: Path, weights: list[int], work: list[str], **options: object) -> None:
    """The first engine writes the weights, the second reads no others; both answer as one alone."""
    wanted = answers(engine_for(folder, **options))
    first = sharing_engine(folder, weights, **options)
    assert is_sealed(weights[0]) and "load_weights" in work
    work.clear()
    second = sharing_engine(folder, weights, **options)
    plain = options.get("kernels") == "torch"  # a weight as it is, and nothing is packed
    assert set(work) == ({"prepare"} if plain else set())
    assert answers(first) == answers(second) == wanted
    taken = first.executor.describe().weight_bytes
    assert second.executor.describe().weight_bytes == taken
    assert taken <= filled_bytes(weights) < 1.2 * taken + 2**18


@pytest.mark.parametrize("family", ALL)
@pytest.mark.parametrize("quantization", ["none", "int4"])
def test_families_share(tmp_path, weights, work, family: str, quantization: str):
    folder = save(tiny_model(family), tmp_path / "model")
    check_shared(folder, weights, work, quantization=quantization, skip_tokenizer_init=True)


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "float16"},
        {"dtype": "bfloat16", "sum_parts": 2},
        {"dtype": "bfloat16", "quantization": "int8"},
        {"dtype": "bfloat16", "quantization": "int4", "quantization_group": 32, "sum_parts": 2},
    ],
    ids=lambda options: " ".join(map(str, options.values())),
)
def test_types_and_parts_share(tmp_path, weights, work, options: dict[str, object]):
    folder = save(tiny_model("llama", intermediate_size=256), tmp_path / "model")
    check_shared(folder, weights, work, skip_tokenizer_init=True, **options)


def test_what_torch_multiplies_as_it_is_is_shared(tmp_path, weights, work, monkeypatch):
    """Where it packs for itself nobody shares, and each engine has its own."""
    folder = save(tiny_model("qwen3moe"), tmp_path / "model")
    options = {"kernels": "torch", "skip_tokenizer_init": True}
    monkeypatch.setattr("headway.runtime.kernels.onednn.available", lambda: False)
    check_shared(folder, weights, work, dtype="float32", **options)
    monkeypatch.undo()
    own = create_shared_files(2)
    for _ in range(2):
        engine = sharing_engine(folder, own, quantization="int4", **options)
        assert not is_sealed(own[0]) and filled_bytes(own) == 0
        assert len(answers(engine)) == 3


def test_a_cache_on_disk_fills_it(tmp_path, weights, work, monkeypatch):
    """What a former start packed is copied, not packed; and what this one packs is kept."""
    monkeypatch.setattr("headway.config.resolve.SMALL_MODEL_BYTES", 0)
    folder = save(tiny_model("llama"), tmp_path / "model")
    options = {"quantization": "int8", "skip_tokenizer_init": True}
    wanted = answers(sharing_engine(folder, weights, **options))
    for thread in threading.enumerate():
        if thread.name == "weight cache writer":
            thread.join()
    assert len(list((tmp_path / "cache" / "headway" / "weights").glob("*.weights"))) == 1
    work.clear()
    others = create_shared_files(2)
    assert answers(sharing_engine(folder, others, **options)) == wanted
    assert "prepare" not in work and is_sealed(others[0])


def test_changed_files_are_read(tmp_path, weights, work):
    """Whoever starts behind a change has the new weights, and memory of its own."""
    folder, options = save(tiny_model("llama"), tmp_path / "model"), {"skip_tokenizer_init": True}
    first = sharing_engine(folder, weights, **options)
    before = answers(first)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    save_file({name: tensor * 1.5 for name, tensor in tensors.items()}, path)
    work.clear()
    second = sharing_engine(folder, weights, **options)
    assert "load_weights" in work
    assert answers(second) == answers(engine_for(folder, **options)) != before
    assert answers(first) == before


PACKER = """
import os, signal, sys
from headway.runtime.shared_weights import SharedWeights
shared = SharedWeights(int(sys.argv[1]), "")
shared.enter()
shared.reserve([1000])
shared.keep("a", [memoryview(bytes(1000))])
os.kill(os.getpid(), signal.SIGSTOP)
"""


@pytest.fixture
def stopped(weights: list[int]) -> Iterator["subprocess.Popen[bytes]"]:
    """A process that began to fill them, and stands still."""
    command = [sys.executable, "-c", PACKER, str(weights[0])]
    engine = subprocess.Popen(command, pass_fds=weights)
    os.waitid(os.P_PID, engine.pid, os.WSTOPPED | os.WNOWAIT)
    yield engine
    engine.kill()
    engine.wait()


def test_beside_one_that_hangs_an_engine_has_its_own(
    tmp_path, weights, work, stopped, monkeypatch, caplog
):
    """Until that one is gone, and the next engine fills what is shared."""
    monkeypatch.setattr(shared_weights, "MIN_STALL_TIMEOUT_S", 0.2)
    folder = save(tiny_model("llama"), tmp_path / "model")
    options = {"quantization": "int4", "skip_tokenizer_init": True}
    wanted = answers(engine_for(folder, **options))
    own = sharing_engine(folder, weights, **options)
    assert answers(own) == wanted and not is_sealed(weights[0])
    assert f"process {stopped.pid} has packed nothing" in caplog.text
    stopped.send_signal(signal.SIGKILL)
    stopped.wait()
    first = sharing_engine(folder, weights, **options)
    assert is_sealed(weights[0]) and answers(first) == answers(own) == wanted


def test_without_room_beside_one_that_hangs_nobody_starts(tmp_path, weights, stopped, monkeypatch):
    monkeypatch.setattr(shared_weights, "MIN_STALL_TIMEOUT_S", 0.2)
    monkeypatch.setattr(sharing, "memory", lambda: (10**9, 1000))
    folder = save(tiny_model("llama"), tmp_path / "model")
    with pytest.raises(CapacityError, match="hangs, and there is no room beside") as refused:
        sharing_engine(folder, weights, skip_tokenizer_init=True)
    assert isinstance(refused.value.__cause__, OSError)
    assert refused.value.__cause__.errno == errno.ENOMEM


def test_what_is_there_is_free_for_the_plan(tmp_path, weights, work, monkeypatch):
    """With half of the weights' memory free beside the KV's an engine starts where they are there.

    It plans what it would on a machine with so much more memory, and no more than there is in all.
    """
    folder = save(tiny_model("llama"), tmp_path / "model")
    given: dict[str, object] = {"skip_tokenizer_init": True, "device": "cpu", "threads": 1}
    options, clock = EngineOptions(**given, kv_memory=KV_BYTES), SystemClock()
    first = assemble(folder, options, clock=clock, weights=weights).engine
    there, real = filled_bytes(weights), plan_settings(folder, options)[3]

    def have_free(num_bytes: int) -> None:
        found = replace(real, free_bytes=num_bytes)
        monkeypatch.setattr("headway.planning.probe_machine", lambda *_: found)

    have_free(KV_BYTES + there // 2)
    with pytest.raises(CapacityError, match="left after the weights"):
        assemble(folder, options, clock=clock)
    work.clear()
    second = assemble(folder, options, clock=clock, weights=weights).engine
    assert work == [] and answers(second) == answers(first)
    wanted = plan_settings(folder, EngineOptions(**given), there)[:3]
    have_free(KV_BYTES + there // 2 + there)
    assert plan_settings(folder, EngineOptions(**given))[:3] == wanted
    assert plan_settings(folder, options, 2**60)[3].free_bytes == real.total_bytes


def drafting(folder: Path, weights: list[int], **options: object) -> tuple[Engine, Proposals]:
    engine = sharing_engine(folder, weights, max_model_len=256, **options)
    proposals = Proposals()
    engine.scheduler.drafts.speculator = proposals
    return engine, proposals


@pytest.mark.parametrize("quantization", ["none", "int4"])
@pytest.mark.parametrize("drafter", ["medusa", "eagle", "draft"])
def test_drafters_share(tmp_path, weights, work, drafter: str, quantization: str):
    """Heads, a layer, a model: their guesses are the same, and they are not read again."""
    folder = tmp_path / "model"
    folder.mkdir()
    for file in model_folder(None).iterdir():
        (folder / file.name).symlink_to(file)
    torch.manual_seed(7)
    layer = {
        name: value.detach() for name, value in Eagle(Shape(vocab_size=4096)).named_parameters()
    }
    save_file(layer, folder / "eagle.safetensors")
    options: dict[str, object] = {"speculative_method": drafter, "quantization": quantization}
    options |= {"draft_model": "headway-draft"} if drafter == "draft" else {}
    first, told = drafting(folder, weights, **options)
    wanted = answers(first)
    assert is_sealed(weights[1]) and filled_bytes(weights[1:]) > 0
    work.clear()
    second, told_again = drafting(folder, weights, **options)
    assert answers(second) == wanted and told_again.num_guessed == told.num_guessed > 0
    assert told_again.num_kept == told.num_kept
    assert work == []
