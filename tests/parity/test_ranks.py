"""What ranks are made of: sums in shared memory, frames, followers that cannot start."""

import socket
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from drive import engine_for, finish
from headway.config.options import EngineOptions
from headway.config.parallel import Parallel
from headway.core.errors import CheckpointError, HeadwayError
from headway.core.plan import StepPlan
from headway.core.request import Request, SamplingParams
from headway.planning import plan_settings
from headway.runtime.parallel.frames import (
    LENGTH,
    MAX_FRAME_BYTES,
    Hello,
    Pipe,
    StepDone,
    StepOrder,
)
from headway.runtime.parallel.group import RankLostError, SingleRank, ordered_sum
from headway.runtime.parallel.leader import LeaderExecutor, is_inconsistent
from headway.runtime.parallel.meeting import allocate_file
from headway.runtime.parallel.shared import (
    LOGITS_BYTES,
    PLACE_BYTES,
    SharedGroup,
    memory_bytes,
)
from parity.tiny import save, tiny_model
from ranked import ranks, requests, tokens_of

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def meeting(tmp_path: Path) -> Path:
    """A file that three ranks share."""
    allocate_file(tmp_path / "sums", memory_bytes(3, logits=True))
    return tmp_path / "sums"


def together(meeting: Path, work: Callable[[SharedGroup], list[Tensor]]) -> list[list[Tensor]]:
    """The results of `work` on three ranks, threads of this process."""
    groups = [SharedGroup(meeting, rank, 3) for rank in range(3)]
    with ThreadPoolExecutor(3) as pool:
        return list(pool.map(work, groups))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_ranks_have_the_sum_in_one_order(meeting: Path, dtype: torch.dtype):
    """Of one token, of several, and of more than a place holds; two parts on each rank."""
    sizes = [(1, 96), (7, 96), (3 * PLACE_BYTES // 1024, 128), (1, 96)] * 2
    generator = torch.Generator().manual_seed(5)
    parts = [torch.randn(3, 2, *size, generator=generator).to(dtype) for size in sizes]

    def work(group: SharedGroup) -> list[Tensor]:
        return [group.sum(list(one[group.rank])) for one in parts]

    expected = [ordered_sum(one.flatten(0, 1)) for one in parts]
    for found in together(meeting, work):
        for sum_TH, expected_TH in zip(found, expected, strict=True):
            assert torch.equal(sum_TH, expected_TH) and sum_TH.dtype == dtype


@pytest.mark.parametrize("room", [LOGITS_BYTES, 3 * 10 * 4])
def test_all_ranks_have_the_rows_of_rank_0_and_the_columns_of_all(tmp_path: Path, room: int):
    """At once, and in pieces of three rows where there is room for no more; sums between them."""
    meeting = tmp_path / "few"
    allocate_file(meeting, memory_bytes(3) + room)
    sizes = [4, 3, 3]
    asked_RH = torch.arange(7 * 10.0).view(7, 10)

    def work(group: SharedGroup) -> list[Tensor]:
        found = []
        for times in (1.0, 2.0):
            given = asked_RH * times if group.rank == 0 else torch.zeros(7, 10)
            rows = group.broadcast(given)
            own = rows.split(sizes, 1)[group.rank].contiguous()
            found += [rows, group.concat_columns(own, sizes).clone(), group.sum([own[:, :3]])]
        return found

    expected = []
    for rows in (asked_RH, asked_RH * 2.0):
        expected += [rows, rows, ordered_sum(part[:, :3] for part in rows.split(sizes, 1))]
    for found in together(meeting, work):
        assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("counts", [[3, 0, 2], [PLACE_BYTES // 400, 2, PLACE_BYTES // 200]])
def test_rows_of_all_ranks_lie_one_behind_the_other(meeting: Path, counts: list[int]):
    """Some of them with none, and with more than a place holds; a sum between."""
    given = [torch.randn(count, 100) for count in counts]

    def work(group: SharedGroup) -> list[Tensor]:
        own = given[group.rank]
        return [
            group.concat_rows(own, counts),
            group.sum([torch.ones(2, 4)]),
            group.concat_rows(own, counts),
        ]

    for found in together(meeting, work):
        assert torch.equal(found[0], torch.cat(given)) and torch.equal(found[2], found[0])
        assert torch.equal(found[1], torch.full((2, 4), 3.0))


def test_where_memory_has_no_room_ranks_meet_by_gloo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    memory = tmp_path / "shm"
    memory.mkdir()

    def fails(path: Path, size: int) -> None:
        if not path.is_relative_to(memory):
            return allocate_file(path, size)
        path.write_bytes(b"half")
        raise OSError("No space left on device")

    folder, asked = save(tiny_model("llama"), tmp_path / "model"), requests(0, 2)
    one = tokens_of(folder, asked, sum_parts=2)
    monkeypatch.setattr("headway.runtime.parallel.meeting.SHARED_FOLDER", memory)
    monkeypatch.setattr("headway.runtime.parallel.meeting.allocate_file", fails)
    with ranks(folder, tensor_parallel_size=2, sum_parts=2, transport="shared") as engine:
        found = finish(engine, asked)
        assert "gloo" in engine.executor.describe().kernels["ranks"][1]
    assert {key: answer.token_ids for key, answer in found.items()} == one
    assert "No space left on device" in caplog.text and "--shm-size" in caplog.text


@pytest.mark.parametrize(
    ("bad", "expected"),
    [
        ((0, 0, 0, 0), False),
        ((1, 1, 1, 1), False),
        ((1, 1, 0, 0), False),  # the last stage alone raised
        ((1, 0, 0, 0), True),
        ((1, 1, 0, 1), True),
        ((0, 0, 1, 1), True),  # it went well without rows
    ],
)
def test_ranks_are_inconsistent_where_only_some_raised(bad: tuple[int, ...], expected: bool):
    """Of two stages of two ranks, rank 0 of the last first."""
    assert is_inconsistent([bool(one) for one in bad], Parallel(size=2, stages=2)) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_parts_are_added_in_fp32_and_rounded_once(dtype: torch.dtype, count: int):
    """As many numbers as vectors of any width leave over."""
    parts = [torch.randn(7, 101).mul(3.0**at).to(dtype) for at in range(count)]
    total = torch.zeros(7, 101)
    for part in parts:
        total = total + part.float()
    kept = [part.clone() for part in parts]
    found = ordered_sum(parts)
    assert torch.equal(found, total.to(dtype)) and found.dtype == dtype
    assert all(map(torch.equal, parts, kept)), "no part has changed"


def test_sums_of_more_shapes_than_are_cached(meeting: Path, monkeypatch: pytest.MonkeyPatch):
    """Their views are made again, those of the first shape too."""
    monkeypatch.setattr("headway.runtime.parallel.shared.MAX_CACHED_VIEWS", 8)
    shapes = [(rows, 8) for rows in (1, *range(1, 20), 1)]

    def work(group: SharedGroup) -> list[Tensor]:
        return [group.sum([torch.full(shape, float(group.rank))]) for shape in shapes]

    for found in together(meeting, work):
        assert all(
            torch.equal(one, torch.full(shape, 3.0))
            for one, shape in zip(found, shapes, strict=True)
        )


def test_one_rank_adds_the_same_parts():
    parts = torch.randn(4, 5, 16).bfloat16()
    expected = parts.float()
    total = ((expected[0] + expected[1]) + expected[2]) + expected[3]
    assert torch.equal(SingleRank().sum(list(parts)), total.bfloat16())


def test_a_missing_rank_is_named(meeting: Path):
    group = SharedGroup(meeting, 0, 3, timeout_s=0.05)
    with pytest.raises(RankLostError, match=r"Ranks \[1, 2\] did not come to sum 1"):
        group.sum([torch.ones(1, 4)])


@pytest.fixture
def pipes() -> Iterator[tuple[Pipe, Pipe, socket.socket]]:
    """A leader's end, a follower's end, and what lies behind the leader's."""
    one, other = socket.socketpair()
    with one, other:
        yield Pipe(one), Pipe(other), one


def test_frames_go_both_ways(pipes: tuple[Pipe, Pipe, socket.socket]):
    leader, follower, _ = pipes
    plan = StepOrder(StepPlan(3, [], [], [7, 8]))
    leader.send(plan)
    assert follower.receive_order() == plan
    follower.send(StepDone("ValueError: no", "a cause", "a fix", 3, 12))
    assert leader.receive_done(5.0) == StepDone("ValueError: no", "a cause", "a fix", 3, 12)


def test_a_closed_silent_or_faulty_peer_raises(pipes: tuple[Pipe, Pipe, socket.socket]):
    leader, follower, raw = pipes
    with pytest.raises(TimeoutError):
        leader.receive_done(0.05)
    raw.sendall(LENGTH.pack(MAX_FRAME_BYTES + 1))
    with pytest.raises(EOFError, match="a frame of"):
        follower.receive_order()
    raw.settimeout(None)
    raw.sendall(struct.pack("<I", 100) + b"half")
    leader.close()
    with pytest.raises(ConnectionResetError, match="closed"):
        follower.receive_order()


def test_settings_reach_a_follower_as_they_are(tmp_path: Path, pipes):
    """Numbers with units, formats, sets and all: a follower that lays out memory otherwise lies."""
    folder = save(tiny_model("gemma3"), tmp_path / "model")
    options = EngineOptions(device="cpu", quantization="int8", tensor_parallel_size=2)
    spec, settings, _, machine = plan_settings(folder, options)
    hello = Hello(str(folder), spec, settings, machine, 1, "somewhere")
    leader, follower, _ = pipes
    sender = threading.Thread(target=leader.send, args=(hello,))
    sender.start()
    assert follower.receive_order() == hello
    sender.join()
    assert msgspec.structs.asdict(hello)["settings"].parallel.size == 2


def test_a_folder_that_cannot_be_read_is_refused_as_with_one_rank(tmp_path: Path):
    folder = save(tiny_model("llama"), tmp_path / "model")
    (weights,) = folder.glob("*.safetensors")
    kept = load_file(weights)
    del kept["model.layers.1.mlp.down_proj.weight"]
    save_file(kept, weights, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.down_proj\.weight are missing"):
        engine_for(folder, max_model_len=64)
    with pytest.raises(HeadwayError, match=r"layers\.1\.mlp\.down_proj\.weight are missing"):
        engine_for(folder, max_model_len=64, tensor_parallel_size=2)


@pytest.mark.parametrize("cut", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_a_request_whose_numbers_are_not_finite_fails_alone_on_all_ranks(tmp_path: Path, cut: str):
    """Both wipe its blocks; the other request has the same tokens as when it runs alone.

    Channel 0 is zero but for token 9, whose gate of the first layer overflows.
    """
    folder = save(tiny_model("llama"), tmp_path / "model")
    (weights,) = folder.glob("*.safetensors")
    kept = load_file(weights)
    for name, weight in kept.items():
        if name.endswith("embed_tokens.weight"):
            weight[:, 0] = 0.0
            weight[9, 0] = 1.0
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            weight[0] = 0.0
        elif name.endswith(("layers.0.mlp.gate_proj.weight", "layers.0.mlp.up_proj.weight")):
            weight[:, 0] = 3e25
    save_file(kept, weights, metadata={"format": "pt"})
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    good, bad = Request(0, list(range(20, 60)), greedy), Request(1, [30, 9, 31], greedy)
    options = {"max_model_len": 64, "dtype": "float32"}
    alone = finish(engine_for(folder, **options), [good])
    engine = engine_for(folder, **{cut: 2}, **options)
    assert isinstance(engine.executor, LeaderExecutor)
    reasons: dict[int, str | None] = {}
    tokens: list[int] = []
    try:
        for request in (good, bad):
            engine.add(request)
        while engine.has_work:
            for update in engine.step()[0]:
                reasons[update.request_id] = update.finish_reason
                tokens += update.token_ids if update.request_id == 0 else []
        again = finish(engine, [Request(2, good.prompt_token_ids, good.sampling)])
    finally:
        engine.executor.close()
    assert reasons == {0: "length", 1: "error"}
    assert tokens == again[2, 0].token_ids == alone[0, 0].token_ids
