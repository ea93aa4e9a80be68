"""Texts scored and compared, by models small enough to work out by hand.

Given a text and a made-up model: the windows, the bits, the last words, the divergence, and the
lower bound that the likeliest tokens give.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.core.errors import UsageError
from headway.core.scoring import Score
from headway.evals import suites, texts
from headway.evals.divergence import (
    APPROXIMATE,
    EXACT,
    compare,
    compare_rows,
    compare_tokens,
    merged_kl,
)
from headway.evals.text import (
    TextWindow,
    last_word,
    num_shared,
    read_lambada,
    read_text,
    score_last_words,
    score_targets,
    score_text,
    spread,
    windows,
)
from headway.spec.embedded import general_text
from sensitivity import chance, difference

WORDS = "the cat sat on the mat and slept while it rained "
TEXT = (WORDS * 30).strip()


class Bytes:
    """A model of bytes whose probabilities depend on the byte before: `logits` [256, 256]."""

    name = "bytes"

    def __init__(self, logits: np.ndarray | None = None) -> None:
        logits = np.zeros((256, 256)) if logits is None else logits
        self.table = (logits - np.logaddexp.reduce(logits, axis=1)[:, None]).astype(np.float32)
        self.num_scored = 0

    def generate(self, chats: Sequence[object], *, max_tokens: int) -> list[str | None]:
        raise AssertionError("a text is scored, not answered")

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def distributions(self, token_ids: list[int]) -> np.ndarray:
        return self.table[token_ids]

    def score(self, texts: Sequence[str], *, top: int = 0) -> list[Score]:
        self.num_scored += len(texts)
        return [self._score(self.encode(text), top) for text in texts]

    def _score(self, ids: list[int], top: int) -> Score:
        rows = self.distributions(ids)
        best = [{}, *([dict(best_of(row, top)) for row in rows[:-1]] if top else [{}] * len(ids))]
        return Score(
            token_ids=ids,
            logprobs=[None, *(float(row[i]) for row, i in zip(rows, ids[1:]))],
            top=best[: len(ids)],
        )


class Served:
    """The same behind a URL: no ids, no encode, alternatives by text."""

    name = "served"

    def __init__(self, model: Bytes) -> None:
        self._model = model

    def generate(self, chats: Sequence[object], *, max_tokens: int) -> list[str | None]:
        return self._model.generate(chats, max_tokens=max_tokens)

    def score(self, texts: Sequence[str], *, top: int = 0) -> list[Score]:
        return [
            Score(
                token_ids=[],
                logprobs=score.logprobs,
                top=[{chr(int(key)): value for key, value in t.items()} for t in score.top],
            )
            for score in self._model.score(texts, top=top)
        ]


def best_of(row: np.ndarray, count: int) -> list[tuple[int, float]]:
    """The likeliest of a row."""
    return [(int(i), float(row[i])) for i in np.argsort(-row, kind="stable")[:count]]


def drawn(seed: int) -> Bytes:
    """A random model."""
    return Bytes(2 * np.random.default_rng(seed).normal(size=(256, 256)))


def knows(text: str) -> Bytes:
    """A model that expects each byte of `text` after the one before, nearly for sure."""
    logits = np.zeros((256, 256))
    for before, after in zip(text.encode(), text.encode()[1:]):
        logits[before, after] += 10.0
    return Bytes(logits)


@pytest.mark.parametrize(("context", "stride"), [(16, 16), (40, 8), (8, 64), (256, 256)])
def test_windows_tile_the_text_at_words(context: int, stride: int):
    cut = windows(TEXT, context_chars=context, stride_chars=stride)
    assert TEXT.endswith(joined := "".join(window.target for window in cut))
    assert context <= len(TEXT) - len(joined) < context + stride
    assert all(window.target.startswith(" ") for window in cut[:-1])
    assert all(window.context in TEXT and not window.context.startswith(" ") for window in cut)
    for window in cut:
        assert f"{window.context}{window.target}" in TEXT
        assert context - 8 <= len(window.context) <= context + 8 or window.context == TEXT[:context]


@given(st.text(max_size=300), st.integers(1, 40), st.integers(1, 40))
@settings(max_examples=200)
def test_any_text_is_tiled(text: str, context: int, stride: int):
    """Without words, without spaces, in any script: nothing after the first context is lost."""
    cut = windows(text, context_chars=context, stride_chars=stride)
    joined = "".join(window.target for window in cut)
    assert text.endswith(joined)
    assert len(text) - len(joined) <= context + stride
    assert all(window.target and window.context for window in cut)


def test_fewer_windows_are_evenly_spread():
    assert spread(list(range(9)), 3) == [0, 3, 6]
    assert spread([1, 2], 5) == [1, 2]
    every = windows(TEXT, context_chars=16, stride_chars=16)
    assert windows(TEXT, context_chars=16, stride_chars=16, limit=4) == spread(every, 4)


def test_a_model_that_knows_nothing_takes_eight_bits():
    found = score_text(Bytes(), TEXT, name="cats", context_chars=64, stride_chars=32)
    assert found.bits_per_byte == pytest.approx(8, abs=1e-5)
    assert found.perplexity == pytest.approx(256, rel=1e-5)
    assert found.num_bytes == sum(
        len(w.target) for w in windows(TEXT, context_chars=64, stride_chars=32)
    )
    assert [p.num_tokens for p in found.passages] == [p.num_bytes for p in found.passages]


def test_bytes_are_counted_not_characters():
    """ü is two bytes: two tokens of 8 bits each."""
    text = " ".join(["grün", "blüht"] * 40)
    found = score_text(Bytes(), text, context_chars=10, stride_chars=10)
    assert found.bits_per_byte == pytest.approx(8, abs=1e-5)
    assert found.num_bytes > sum(
        len(w.target) for w in windows(text, context_chars=10, stride_chars=10)
    )


@pytest.mark.parametrize("stride", [8, 50, 700])
def test_the_stride_does_not_change_what_sees_one_byte_back(stride: int):
    """log p by hand: the sum over the scored part of the text, whatever the windows."""
    model, first = drawn(3), windows(TEXT, context_chars=64, stride_chars=stride)[0]
    begin = len(TEXT) - sum(
        len(w.target) for w in windows(TEXT, context_chars=64, stride_chars=stride)
    )
    assert TEXT[begin:].startswith(first.target)
    ids = model.encode(TEXT)
    by_hand = -sum(float(model.table[a, b]) for a, b in zip(ids[begin - 1 :], ids[begin:]))
    found = score_text(model, TEXT, context_chars=64, stride_chars=stride)
    assert sum(p.nats for p in found.passages) == pytest.approx(by_hand, rel=1e-6)


def test_a_server_without_ids_gets_the_same_bits():
    model = drawn(4)
    direct = score_text(model, TEXT, context_chars=64, stride_chars=64)
    served = score_text(Served(model), TEXT, context_chars=64, stride_chars=64)
    assert served.passages == direct.passages


def test_a_token_across_the_cut_is_the_targets():
    """The tokens of "ab" and " cd" are 1 and 2; together they are 1 and 9 where b and c merge."""
    assert num_shared([5, 6, 7], [5, 6, 8, 9]) == 2
    assert num_shared([5, 6], [5, 6, 8]) == 2
    assert num_shared([], [5]) == 0

    class Merging(Bytes):
        def encode(self, text: str) -> list[int]:
            return list(text.encode().replace(b"t m", b"\x01"))

    (target,) = score_targets(Merging(), [TextWindow(context="the cat", target=" mat")])
    assert bytes(target.token_ids) == b"\x01at"


def test_a_text_that_is_all_context_is_refused():
    with pytest.raises(UsageError, match="The text cats has 7 characters"):
        score_text(Bytes(), "the cat", name="cats")


def test_last_words():
    """The model knows one passage by heart; of the other it knows nothing."""
    assert last_word("I like red apples\n") == TextWindow(context="I like red", target=" apples")
    assert len(last_word("word " * 300 + "end", 100).context) <= 100
    model = knows("ab cde")
    found = score_last_words(model, ["ab cde", "ab cdx"])
    assert [(item.word, item.right) for item in found.items] == [("cde", True), ("cdx", False)]
    assert found.num_right == 1
    assert found.accuracy == 0.5
    assert found.items[0].nats < 0.1 < 5 < found.items[1].nats
    mean = (found.items[0].nats + found.items[1].nats) / 2
    assert found.perplexity == pytest.approx(math.exp(mean))
    assert score_last_words(Served(model), ["ab cde", "ab cdx"]) == found


def test_rows_by_hand():
    """KL 0.5 ln(5/4) + 0.2 ln(2/3) = 0.0305; the likeliest is the same; 0.4 + 0.3 + 0.2."""
    p, q = np.log([[0.5, 0.3, 0.2], [0.5, 0.3, 0.2]]), np.log([[0.4, 0.3, 0.3], [0.2, 0.5, 0.3]])
    kl, agreed, overlap = compare_rows(p, q)
    assert kl[0] == pytest.approx(0.5 * math.log(5 / 4) + 0.2 * math.log(2 / 3))
    assert agreed.tolist() == [True, False]
    assert overlap == pytest.approx([0.9, 0.7])


def test_a_model_does_not_differ_from_itself():
    cut = windows(TEXT, context_chars=64, stride_chars=64)
    for approximate, method in ((False, EXACT), (True, APPROXIMATE)):
        found = compare(drawn(5), drawn(5), cut, approximate=approximate)
        assert (found.method, found.kl, found.agreement) == (method, 0, 1)
        assert found.perplexity_ratio == 1
        assert found.overlap == (None if approximate else pytest.approx(1, abs=1e-5))
        assert found.num_tokens == sum(len(window.target) for window in cut)


def test_divergence_on_text_by_hand():
    """Uniform against a model that knows the text: log 256 against nearly nothing, a token."""
    cut = [TextWindow(context="the cat", target=" sat")]
    found = compare(Bytes(), model := knows("the cat sat"), cut)
    pairs = [(b"t", b" "), (b" ", b"s"), (b"s", b"a"), (b"a", b"t")]
    told = -sum(float(model.table[a[0], b[0]]) for a, b in pairs)
    (passage,) = found.passages
    assert passage.num_tokens == 4
    assert passage.reference_nats == pytest.approx(4 * math.log(256), rel=1e-6)
    assert passage.nats == pytest.approx(told, rel=1e-6)
    assert found.perplexity_ratio == pytest.approx(math.exp(told / 4) / 256, rel=1e-5)
    by_hand = sum(float((-math.log(256) - model.table[a[0]]).mean()) for a, _ in pairs)
    assert passage.kl == pytest.approx(by_hand, rel=1e-5)


def test_the_first_token_is_never_judged():
    found = compare_tokens(drawn(1), drawn(2), list(b"abc"), 0)
    assert found.num_tokens == 2


@given(st.integers(0, 10_000), st.floats(0.1, 4))
@settings(max_examples=60)
def test_the_likeliest_give_a_lower_bound(seed: int, scale: float):
    """Whatever two models expect: taking tokens together never adds divergence."""
    rng = np.random.default_rng(seed)
    p, q = (np.log(rng.dirichlet(np.full(50, 1 / scale)) + 1e-9) for _ in range(2))
    p, q = p - np.logaddexp.reduce(p), q - np.logaddexp.reduce(q)
    (exact,), _, _ = compare_rows(p[None], q[None])
    for top in (0, 1, 5, 20, 50):
        bound = merged_kl(dict(best_of(p, top)), dict(best_of(q, top)))
        assert -1e-9 <= bound <= exact + 1e-6
    assert merged_kl(dict(best_of(p, 50)), dict(best_of(q, 50))) == pytest.approx(exact, abs=1e-6)


def test_the_bound_by_hand():
    """Of a, b and the rest, as in the module's example; half characters are of the rest."""
    p = {"a": math.log(0.5), "b": math.log(0.3)}
    q = {"a": math.log(0.4), "b": math.log(0.3)}
    by_hand = 0.5 * math.log(0.5 / 0.4) + 0.2 * math.log(0.2 / 0.3)
    assert merged_kl(p, q) == pytest.approx(by_hand)
    half = {"\ufffd": math.log(0.1)}
    assert merged_kl(p | half, q | half) == pytest.approx(by_hand)
    assert merged_kl({"a": 0.0}, {"a": 0.0}) == 0


def test_a_url_is_compared_by_its_likeliest():
    cut = windows(TEXT, context_chars=64, stride_chars=64)
    exact = compare(drawn(6), drawn(7), cut)
    bound = compare(Served(drawn(6)), Served(drawn(7)), cut)
    assert bound.method == APPROXIMATE
    assert 0 < bound.kl <= exact.kl
    assert bound.agreement == exact.agreement
    assert bound.perplexity_ratio == pytest.approx(exact.perplexity_ratio)


def test_models_that_cannot_be_compared_are_refused():
    cut = windows(TEXT, context_chars=64, stride_chars=64)

    class Shifted(Bytes):
        def encode(self, text: str) -> list[int]:
            return [byte + 1 for byte in text.encode()]

    class Wide(Bytes):
        def distributions(self, token_ids: list[int]) -> np.ndarray:
            return np.pad(self.table[token_ids], ((0, 0), (0, 1)))

    with pytest.raises(UsageError, match="different tokens"):
        compare(Bytes(), Shifted(), cut)
    with pytest.raises(UsageError, match="different tokens"):
        compare(Bytes(), Shifted(), cut, approximate=True)
    with pytest.raises(UsageError, match="256 and 257 tokens"):
        compare(Bytes(), Wide(), cut)
    with pytest.raises(UsageError, match="token ids and the other texts"):
        compare(drawn(1), Served(drawn(2)), cut)
    with pytest.raises(UsageError, match="no text to compare on"):
        compare(Bytes(), Bytes(), [])


def test_data_is_read_or_named(tmp_path: Path):
    for name in ("text/val.txt", "eval/lambada/lambada_test.jsonl"):
        (tmp_path / name).parent.mkdir(parents=True)
    (tmp_path / "text/val.txt").write_text("a book", encoding="utf-8")
    lines = [json.dumps({"text": f"number {i}"}) for i in range(9)]
    (tmp_path / "eval/lambada/lambada_test.jsonl").write_text("\n".join(lines) + "\n")
    assert read_text(tmp_path, "books") == "a book"
    assert read_lambada(tmp_path, 3) == ["number 0", "number 3", "number 6"]
    assert len(read_lambada(tmp_path)) == 9
    with pytest.raises(UsageError, match=r"wikitext-2/test\.txt cannot be read: No such file"):
        read_text(tmp_path, "wikitext-2")


def test_differences_and_chance():
    """What the sensitivity benchmark says of two models and of questions."""
    same = difference([0.0] * 20)
    assert (same.mean, same.low, same.high, same.p) == (0, 0, 0, 1)
    worse = difference([0.1, 0.2, 0.3] * 10, [1.0] * 30)
    assert worse.mean == pytest.approx(0.2)
    assert 0 < worse.low < 0.2 < worse.high
    assert worse.p < 0.001
    assert 0.02 < chance(20) < 0.2


# ── both models in one pass ─────────────────────────────────────────────────────────────────

NO_SKILLS = {"skills": [], "levels": [1], "questions": 1, "seed": 0}


def corpora(limit: int = 200) -> texts.Corpora:
    return texts.Corpora(texts={"cats": TEXT}, lambada=["the cat sat on the mat"], limit=limit)


@pytest.mark.parametrize("served", [False, True])
def test_a_pass_over_both_models_finds_the_bits_of_each(served: bool):
    """What `ask` finds of each alone, at once with the divergence; also behind two URLs."""
    a, b = (Served(drawn(seed)) if served else drawn(seed) for seed in (1, 2))
    of_a, of_b, found = texts.compare(a, b, corpora(), lambda: None)
    for together, model in ((of_a, a), (of_b, b)):
        alone = texts.ask(model, corpora(), lambda: None)
        assert [f.name for f in together.figures] == [f.name for f in alone.figures]
        for ours, theirs in zip(together.figures, alone.figures, strict=True):
            assert ours.value == pytest.approx(theirs.value, rel=1e-5)
    assert found.method == (APPROXIMATE if served else EXACT)
    rows = {row.name: row for row in texts.divergence_pairs(found)}
    assert list(rows) == ["KL, cats", "same top token, cats", "perplexity, cats"]
    assert all(row.required for row in rows.values())
    agreed = rows["same top token, cats"]
    assert agreed.loss.sum() / agreed.weight.sum() == pytest.approx(1 - agreed.second)
    perplexity = rows["perplexity, cats"]
    nats = [math.log(each.figures[0].value) for each in (of_a, of_b)]
    assert perplexity.second / perplexity.first == pytest.approx(
        math.exp(math.log(2) * (math.exp(nats[1]) - math.exp(nats[0]))), rel=1e-4
    )


def test_models_with_other_tokens_are_compared_by_their_bits():
    class Pairs(Bytes):
        def encode(self, text: str) -> list[int]:
            return [byte ^ 1 for byte in text.encode()]

    wanted = suites.EvalSettings(**NO_SKILLS, corpora=corpora())
    a, b = suites.evaluate_both((drawn(1), "a"), (Pairs(drawn(2).table), "b"), wanted)
    assert b.divergence is None and "different tokens" in b.notes[0]
    found = suites.side_by_side(a, b, tolerance=0.02)
    assert {row.name: row.required for row in found.measures} == {
        "bits per byte, cats": True,
        "last words, lambada": False,
    }


def test_texts_are_the_one_that_comes_along_a_file_or_those_of_a_folder(tmp_path: Path):
    general = texts.read_corpora("", 200)
    assert list(general.texts) == ["general"] and not general.lambada
    assert 60 <= general.num_windows <= 80
    own = tmp_path / "mails.txt"
    own.write_text(TEXT)
    assert texts.read_corpora(str(own), 200).texts == {"mails": TEXT}
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "val.txt").write_text(TEXT)
    found = texts.read_corpora(str(tmp_path), 5)
    assert list(found.texts) == ["books"] and found.num_windows == 5
    with pytest.raises(UsageError, match="has no text"):
        texts.read_corpora(str(tmp_path / "text"), 200)


def test_the_text_that_comes_along_is_ordinary():
    """Several kinds and languages, and nothing that occurs twice: no passage gives another away."""
    text = general_text()
    lines = [line for line in text.splitlines() if len(line) > 60]
    assert len(lines) == len(set(lines)) and 15_000 < len(text) < 20_000
    assert all(word in text for word in ("def ", "{\n", "| --- |", "User:", "ü", "í", "é"))
