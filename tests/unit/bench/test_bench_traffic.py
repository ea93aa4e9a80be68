"""What is sent and when: drawn times and lengths, prompts, traces, conversations, classes."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.bench import prompts
from headway.bench.arrivals import ARRIVALS, ArrivalPace
from headway.bench.classes import build_all, read_classes
from headway.bench.lengths import parse_length
from headway.bench.prompts import (
    GeneratedPiece,
    IdPiece,
    IdWriter,
    TextPiece,
    WordWriter,
    body,
    num_tokens,
)
from headway.bench.run import check_options, sped_up
from headway.bench.talk import BenchDialect
from headway.bench.traces import (
    TraceRow,
    prompt_of,
    read_trace,
    scale_for,
    scale_length,
    spread_quantized,
)
from headway.bench.workload import Traffic, Turn, build
from headway.config.options import BenchOptions
from headway.core.errors import UsageError
from headway.core.slo import Slo
from headway.measure.client import ReceivedAnswer

RNG = 7
PROBED = frozenset({"ignore_eos", "min_tokens", "stream_options"})


def times(kind: str, **pace: float) -> np.ndarray:
    return ARRIVALS[kind](ArrivalPace(**pace), np.random.default_rng(RNG))


def cv(arrivals: np.ndarray) -> float:
    gaps = np.diff(arrivals)
    return float(gaps.std() / gaps.mean())


@pytest.mark.parametrize("kind", ARRIVALS)
def test_times_ascend_repeat_and_fit(kind):
    drawn = times(kind, rate=50.0, duration_s=20.0)
    assert (np.diff(drawn) >= 0).all()
    assert drawn[0] >= 0 and drawn[-1] < 20.0 + 1e-9
    assert (drawn == times(kind, rate=50.0, duration_s=20.0)).all()
    assert len(times(kind, rate=50.0, duration_s=20.0, count=17)) == 17


def test_poisson_and_gamma_have_their_rate_and_spread():
    for kind, burstiness, spread in (
        ("poisson", 1.0, 1.0),
        ("gamma", 1.0, 1.0),
        ("gamma", 0.25, 2.0),
        ("gamma", 100.0, 0.1),
    ):
        drawn = times(kind, rate=100.0, duration_s=200.0, burstiness=burstiness)
        assert len(drawn) == pytest.approx(20_000, rel=0.05)
        assert cv(drawn) == pytest.approx(spread, rel=0.05)


def test_constant_times_are_even():
    assert times("constant", rate=4.0, duration_s=1.0).tolist() == [0.0, 0.25, 0.5, 0.75]


def test_a_ramp_grows_evenly():
    drawn = times("ramp", rate=100.0, duration_s=100.0, ramp_from=0.0)
    assert len(drawn) == pytest.approx(5000, rel=0.05)
    assert (drawn < 50).mean() == pytest.approx(0.25, abs=0.02)
    down = times("ramp", rate=0.001, duration_s=100.0, ramp_from=100.0)
    assert (down < 50).mean() == pytest.approx(0.75, abs=0.02)
    assert len(times("ramp", rate=10.0, duration_s=9.0, ramp_from=10.0, count=90)) == 90


def test_lengths_are_drawn_as_written():
    rng = np.random.default_rng(RNG)
    assert parse_length("512", "x").draw(rng, 3).tolist() == [512] * 3
    assert parse_length("fixed:5", "x").draw(rng, 1).tolist() == [5]
    uniform = parse_length("uniform:64-256", "x").draw(rng, 5000)
    assert (uniform.min(), uniform.max()) == (64, 256)
    normal = parse_length("normal:256,64", "x").draw(rng, 5000)
    assert (normal.mean(), normal.std()) == (
        pytest.approx(256, rel=0.02),
        pytest.approx(64, rel=0.05),
    )
    assert np.median(parse_length("lognormal:256,0.8", "x").draw(rng, 5000)) == pytest.approx(
        256, rel=0.05
    )
    assert parse_length("normal:1,100", "x").draw(rng, 100).min() == 1


@pytest.mark.parametrize(
    "text",
    ["", "0", "-5", "about 7", "zipf:1", "uniform:9-3", "normal:5", "uniform:1", "fixed:nan"],
)
def test_lengths_that_mean_nothing_are_refused(text):
    with pytest.raises(UsageError, match="--input-len"):
        parse_length(text, "--input-len")


def test_made_pieces_follow_from_their_key():
    writer = IdWriter(seed=3)
    prompt = (GeneratedPiece("prefix 1", 20), GeneratedPiece("request 5", 30))
    ids = json.loads(writer.json(prompt))
    assert len(ids) == num_tokens(prompt) == 50
    assert ids == json.loads(IdWriter(seed=3).json(prompt)) == writer.pieces(prompt, 100)
    assert (
        ids[:20]
        == json.loads(
            writer.json((GeneratedPiece("prefix 1", 20), GeneratedPiece("request 6", 3)))
        )[:20]
    )
    assert ids != json.loads(IdWriter(seed=4).json(prompt))
    assert min(ids) >= 32 and max(ids) < 500
    assert max(json.loads(IdWriter(0, 64).json((GeneratedPiece("x", 500),)))) < 64


@pytest.mark.parametrize("most", [1, 300, 16_384])
def test_prompts_that_are_drawn_at_once_are_the_same(monkeypatch, most):
    """However many of them: the rest is drawn when it is asked for."""
    monkeypatch.setattr(prompts, "MAX_PREFETCHED_TOKENS", most)
    asked = [
        (GeneratedPiece("prefix 1", 20), GeneratedPiece(f"request {n}", 1 + 9 * n))
        for n in range(12)
    ]
    asked.append((IdPiece((1, 2)), GeneratedPiece("empty", 0)))
    alone, together = IdWriter(3, 480), IdWriter(3, 480)
    together.prefetch(asked)
    assert sum(piece.tokens for piece in together._prefetched) <= most
    assert [*map(together.ids, asked)] == [*map(alone.ids, asked)]
    together.prefetch([])
    assert together.ids(asked[2]) == alone.ids(asked[2])


def test_ids_of_a_trace_are_kept_or_folded():
    piece = (IdPiece((1, 2, 127_000)),)
    assert json.loads(IdWriter(0).json(piece)) == [1, 2, 127_000]
    assert json.loads(IdWriter(0, 512).json(piece)) == [1, 2, 127_000 % 512]


def test_words_make_up_for_the_servers_tokens():
    """A server that makes 1.25 tokens of a word and adds 10: 60 tokens are 40 words."""
    writer = WordWriter(seed=1, per_word=1.25, extra=10.0)
    assert len(writer.text((GeneratedPiece("a", 60),)).split()) == 40
    assert len(writer.text((GeneratedPiece("a", 35), GeneratedPiece("b", 25))).split()) == 20 + 20
    assert writer.text((TextPiece("as it is"),)) == "as it is"


def test_a_body_is_json():
    prompt = IdWriter(0).json((GeneratedPiece("x", 4),))
    assert set(json.loads(body({"model": "m"}, "prompt", prompt))) == {"model", "prompt"}
    assert json.loads(body({}, "prompt", b"[1]")) == {"prompt": [1]}


def options(**changes) -> BenchOptions:
    return BenchOptions(**changes)


def test_shared_prefixes_are_shared_for_real():
    traffic = build(
        options(workload="shared-prefix", prefix_len=50, num_prefixes=3, input_len="10", rate=20.0),
        "default",
    )
    writer = IdWriter(0)
    first = [t.turns[0] for t in traffic.conversations]
    beginnings = {tuple(writer.pieces(turn.system + turn.prompt, 50)) for turn in first}
    assert len(beginnings) == 3
    whole = {tuple(writer.pieces(turn.system + turn.prompt, 60)) for turn in first}
    assert len(whole) == len(first)


def test_a_chat_sends_all_that_was_said():
    (talk, *_) = build(
        options(workload="chat", turns="3", input_len="4", output_len="2", prefix_len=5), "default"
    ).conversations
    assert len(talk.turns) == 3 and talk.turns[0].think_s == 0.0 < talk.turns[1].think_s
    dialect = BenchDialect(endpoint="completions", model="m", writer=IdWriter(0))
    prompt = dialect.talk()
    first = json.loads(prompt.add_turn(talk.turns[0]))
    prompt.add_answer(ReceivedAnswer(token_ids=[91, 92]), 2)
    second = json.loads(prompt.add_turn(talk.turns[1]))
    assert second[:11] == [*first, 91, 92] and len(second) == 9 + 2 + 4
    chat = BenchDialect(endpoint="chat", model="m", writer=WordWriter(0)).talk()
    chat.add_turn(talk.turns[0])
    chat.add_answer(ReceivedAnswer(pieces=["well", "!"]), 2)
    messages = json.loads(chat.add_turn(talk.turns[1]))
    assert [m["role"] for m in messages] == ["system", "user", "assistant", "user"]
    assert messages[2]["content"] == "well!"


def test_features_become_fields():
    dialect = BenchDialect(
        endpoint="completions",
        model="m",
        writer=IdWriter(0),
        features=frozenset({"ignore_eos", "min_tokens", "service_class", "stream_options"}),
    )
    fields = json.loads(dialect.request(b"[1]", 9, "fast"))
    assert fields["min_tokens"] == fields["max_tokens"] == 9
    assert fields["ignore_eos"] is True and fields["service_class"] == "fast"
    assert fields["stream_options"] == {"include_usage": True}
    assert "service_class" not in json.loads(dialect.request(b"[1]", 9, ""))


def test_prompt_files_are_read(tmp_path: Path):
    file = tmp_path / "p.jsonl"
    file.write_text('{"turns": ["a", "b"]}\n{"question": "c"}\n\n{"prompt": "d"}\n')
    traffic = build(options(workload=f"prompts:{file}", num_requests=6), "default")
    sent = sorted(t.turns[0].prompt[0].text for t in traffic.conversations)
    assert sent == ["a", "a", "c", "c", "d", "d"]
    assert {len(t.turns) for t in traffic.conversations} == {1, 2}
    file.write_text('{"text": "a"}\n')
    with pytest.raises(UsageError, match=r"p\.jsonl, line 1 has no prompt"):
        build(options(workload=f"prompts:{file}"), "default")


def test_recorded_chats_are_sent_with_what_belongs_to_them(tmp_path: Path):
    tool = {"type": "function", "function": {"name": "f"}}
    document = {"type": "document", "document": {"data": "Anna has a kite."}}
    messages = [{"role": "user", "content": [document, {"type": "text", "text": "Whose?"}]}]
    whole = {"messages": messages, "tools": [tool], "max_tokens": 7, "temperature": 2}
    file = tmp_path / "c.jsonl"
    file.write_text(f"{json.dumps(whole)}\n{json.dumps({'body': {'messages': messages}})}\n")
    chosen = options(workload=f"prompts:{file}", endpoint="chat", num_requests=2, output_len="9")
    turns = [talk.turns[0] for talk in build(chosen, "default").conversations]
    assert sorted(turn.output_tokens for turn in turns) == [7, 9]
    assert {turn.prompt[0].text for turn in turns} == {"Anna has a kite.\nWhose?"}
    dialect = BenchDialect(endpoint="chat", model="m", writer=WordWriter(0), features=PROBED)
    for turn in turns:
        prompt = dialect.talk().add_turn(turn)
        body = json.loads(dialect.request(prompt, turn.output_tokens, recorded=True))
        assert body["messages"] == messages and body["temperature"] == 0
        assert body.get("tools") == ([tool] if turn.output_tokens == 7 else None)
        assert "ignore_eos" not in body and "min_tokens" not in body
    with pytest.raises(UsageError, match="holds messages"):
        build(options(workload=f"prompts:{file}"), "default")
    file.write_text('{"messages": "Hi"}\n')
    with pytest.raises(UsageError, match="line 1: messages is not a list"):
        build(options(workload=f"prompts:{file}", endpoint="chat"), "default")


def test_prompts_that_are_no_text_are_refused(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="not UTF-8"):
        build(options(workload=f"prompts:{file}"), "default")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"workload": "poems"}, "no workload 'poems'"),
        ({"workload": "azure"}, "write azure:FILE"),
        ({"workload": "synthetic:x"}, "write synthetic alone"),
        ({"workload": "azure:/nowhere"}, "No such file"),
        ({"arrivals": "trace"}, "synthetic has no times"),
        ({"input_len": "zipf"}, "--input-len"),
    ],
)
def test_what_cannot_be_built_is_named(changes, words):
    with pytest.raises(UsageError, match=words):
        build(options(**changes), "default")


def test_quantized_stamps_are_spread_and_others_left():
    rows = [TraceRow(at_s=3.0 * (i // 10), prompt_tokens=1, output_tokens=1) for i in range(100)]
    spread, quantum_s = spread_quantized(rows, np.random.default_rng(0))
    assert quantum_s == 3.0
    assert [int(row.at_s // 3) for row in spread] == [int(row.at_s // 3) for row in rows]
    assert len({row.at_s for row in spread}) == 100
    even = [TraceRow(at_s=0.1 * i, prompt_tokens=1, output_tokens=1) for i in range(100)]
    assert spread_quantized(even, np.random.default_rng(0)) == (even, 0.0)


def test_scaled_blocks_still_share():
    rows = [
        TraceRow(at_s=0, prompt_tokens=5 * 512 - 10, output_tokens=90, blocks=(1, 2, 3, 4, 5)),
        TraceRow(at_s=1, prompt_tokens=4 * 512, output_tokens=50, blocks=(1, 2, 3, 9)),
    ]
    scale = scale_for(rows, 160)
    assert scale == 160 / (5 * 512 + 80)
    prompts = [prompt_of(row, i, scale) for i, row in enumerate(rows)]
    assert [num_tokens(p) for p in prompts] == [
        scale_length(row.prompt_tokens, scale) for row in rows
    ]
    assert prompts[0][:3] == prompts[1][:3]
    assert prompts[0][0].tokens == int(512 * scale)
    assert all(
        num_tokens(p) + scale_length(r.output_tokens, scale) <= 160 for p, r in zip(prompts, rows)
    )


@given(st.integers(1, 20_000), st.floats(0.001, 1.0))
def test_a_scaled_prompt_has_its_length(tokens, scale):
    blocks = tuple(range(-(-tokens // 512)))
    row = TraceRow(at_s=0, prompt_tokens=tokens, output_tokens=1, blocks=blocks)
    assert num_tokens(prompt_of(row, 0, scale)) == scale_length(tokens, scale)


def test_the_azure_trace_is_read_whole(shared):
    path = shared / "traces" / "azure2023_code" / "AzureLLMInferenceTrace_code.csv"
    rows = read_trace("azure", path)
    assert len(rows) == 8819
    assert (rows[0].at_s, rows[0].prompt_tokens, rows[0].output_tokens) == (0.0, 4808, 10)
    assert rows[1].at_s == pytest.approx(0.052, abs=1e-6)
    assert cv(np.array([row.at_s for row in rows])) == pytest.approx(13, abs=1)


def test_mooncake_prompts_share_what_their_hash_ids_share(shared):
    path = shared / "traces" / "mooncake_conversation" / "conversation_trace.jsonl"
    rows = read_trace("mooncake", path)
    assert len(rows) == 12031 and len(rows[5].blocks) == -(-rows[5].prompt_tokens // 512)
    writer = IdWriter(0)
    first, second = (writer.pieces(prompt_of(row, i, 1.0), 10**6) for i, row in enumerate(rows[:2]))
    assert (len(first), len(second)) == (rows[0].prompt_tokens, rows[1].prompt_tokens)
    assert first[:512] == second[:512] and first[512:520] != second[512:520]
    assert spread_quantized(rows, np.random.default_rng(0))[1] == pytest.approx(3.0, abs=0.01)


def test_sharegpt_brings_its_ids(shared):
    path = shared / "traces" / "sharegpt300" / "sharegpt-llama-3.1-8b-300-sps10.jsonl"
    traffic = build(options(workload=f"sharegpt:{path}", speed=2.0), "default")
    assert len(traffic.conversations) == 300
    assert traffic.conversations[0].turns[0].prompt[0].ids[:3] == (5971, 2927, 220)


@pytest.fixture
def ten_seconds(tmp_path: Path) -> str:
    """A trace of 4 requests at 0, 1, 5 and 10 s."""
    path = tmp_path / "azure.csv"
    rows = [f"2023-11-16 18:00:{at:02}.0000000,10,5" for at in (0, 1, 5, 10)]
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]) + "\n")
    return f"azure:{path}"


def times_of(traffic: Traffic) -> list[float]:
    return [talk.at_s for talk in traffic.conversations]


def test_a_trace_is_stretched_to_the_rate(ten_seconds):
    """4 requests in 10 s are 0.4 a second; gaps keep their proportions."""
    own = build(options(workload=ten_seconds), "default")
    assert times_of(own) == pytest.approx([0, 1, 5, 10])
    twice = build(options(workload=ten_seconds, rate=0.8), "default")
    assert times_of(twice) == pytest.approx([0, 0.5, 2.5, 5])
    assert twice.span_s == pytest.approx(5)
    assert times_of(build(options(workload=ten_seconds, rate=0.1), "default"))[-1] == 40
    assert times_of(build(sped_up(options(workload=ten_seconds, rate=0.4), 2), "d"))[-1] == 5
    assert times_of(build(sped_up(options(workload=ten_seconds), 2), "d"))[-1] == 5


def test_a_trace_beside_other_classes_has_its_share_of_the_rate(ten_seconds, tmp_path):
    file = tmp_path / "classes.yaml"
    file.write_text(f"one: {{share: 0.2, workload: '{ten_seconds}'}}\ntwo: {{share: 0.8}}\n")
    rates = [c.options.rate for c in read_classes(options(classes=str(file)))]
    assert rates == [None, pytest.approx(3.2)], "its own times, and 4 a second for the rest"
    rates = [c.options.rate for c in read_classes(options(classes=str(file), rate=10.0))]
    assert rates == pytest.approx([2, 8])
    file.write_text(f"one: {{workload: '{ten_seconds}', speed: 3, rate: 2}}\n")
    with pytest.raises(UsageError, match="a rate and a speed"):
        read_classes(options(classes=str(file)))
    with pytest.raises(UsageError, match="--rate and --speed"):
        check_options("http://127.0.0.1:1", options(workload=ten_seconds, speed=2.0, rate=1.0))


def test_classes_divide_the_rate(tmp_path: Path):
    file = tmp_path / "classes.yaml"
    file.write_text(
        "interactive: {share: 0.7, slo: 'ttft=500ms,tpot=50ms', input-len: 10}\n"
        "batch: {share: 0.3, slo: e2e=60s, workload: shared-prefix}\n"
    )
    classes = {c.name: c for c in read_classes(options(classes=str(file), rate=100.0))}
    assert {n: c.options.rate for n, c in classes.items()} == pytest.approx(
        {"interactive": 70.0, "batch": 30.0}
    )
    assert classes["interactive"].slo == Slo(ttft_s=0.5, tpot_s=0.05)
    assert classes["batch"].options.workload == "shared-prefix"
    talks = build_all(list(classes.values())).conversations
    assert [t.at_s for t in talks] == sorted(t.at_s for t in talks)
    part = sum(t.service_class == "batch" for t in talks) / len(talks)
    assert part == pytest.approx(0.3, abs=0.03)


def test_classes_come_from_flags_too():
    classes = read_classes(options(slo=["a:ttft=1s", "b:e2e=9s"], share=["a=3", "b=1"], rate=8.0))
    assert [(c.name, c.options.rate) for c in classes] == [("a", 6.0), ("b", 2.0)]
    (one,) = read_classes(options(slo=["ttft=1s"]))
    assert (one.name, one.slo) == ("default", Slo(ttft_s=1.0))
    both = read_classes(options(slo=["ttft=1s", "b:e2e=9s"], share=["a=1", "b=1"]))
    assert {c.name: str(c.slo) for c in both} == {"b": "e2e=9s", "a": "ttft=1s"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: {shares: 1}", "a has no option shares"),
        ("a: {input_len: [1]}", "distribution"),
        ("a: {rate: 1, share: 1}", "a rate and a share"),
        ("- a", "holds no classes"),
        ("a: {rate: fast}", "--classes: a.rate: 'fast' is not a number"),
        ("a: {slo: quick}", "no objective"),
        ("{", "is not YAML"),
    ],
)
def test_what_is_wrong_with_classes_is_named(tmp_path: Path, text, words):
    file = tmp_path / "classes.yaml"
    file.write_text(text)
    with pytest.raises(UsageError, match=words):
        build_all(read_classes(options(classes=str(file))))


def test_a_turn_has_tokens_of_both_parts():
    turn = Turn(system=(GeneratedPiece("s", 3),), prompt=(GeneratedPiece("p", 4),), output_tokens=1)
    dialect = BenchDialect(endpoint="completions", model="m", writer=IdWriter(0))
    assert len(dialect.pieces(turn, 100)) == 7
    assert len(dialect.pieces(turn, 5)) == 5
