"""A folder's probabilities, as evaluations see them: those of transformers, however chunked."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from headway.core.errors import HeadwayError, RequestError
from headway.core.request import SamplingParams
from headway.evals.divergence import EXACT, compare
from headway.evals.text import score_last_words, score_text, windows
from headway.spec.embedded import model_folder
from headway.whole_model import FolderModel
from rounding import ROUNDINGS, Rounding, rounded, write_rounded

pytestmark = pytest.mark.usefixtures("one_thread")

TEXT = (
    "Once upon a time, there was a little girl named Lily. She loved to play outside in the park. "
    "One day, she saw a big, red ball. She wanted to play with it, but it was too high. Her mom "
    "said that she could ask the boy next door. So she went to the door, and said hello. "
) * 3
CHATS = [[{"role": "user", "content": text}] for text in ("What is 2 + 3?", "Who are you?")]


def opened(folder: Path, **options: object) -> FolderModel:
    return FolderModel(folder, dtype="float32", kv_memory="32MiB", **options)


@pytest.fixture(scope="module")
def stories(shared: Path) -> Path:
    """The trained model of 260 thousand parameters."""
    folder = shared / "models" / "stories260K"
    if not folder.is_dir():
        pytest.skip(f"no model at {folder}")
    return folder


@pytest.fixture(scope="module")
def embedded() -> FolderModel:
    """The model that is always there."""
    return opened(model_folder(None))


def expected(folder: Path, token_ids: list[int]) -> np.ndarray:
    """Transformers' log-probabilities after each token."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        return model(torch.tensor([token_ids])).logits[0].log_softmax(-1).numpy()


def test_distributions_are_those_of_transformers(embedded: FolderModel):
    """After each position, the last too."""
    ids = embedded.encode(TEXT)[:150]
    found = embedded.distributions(ids)
    assert found.dtype == np.float32
    assert found.shape == (len(ids), embedded.llm.spec.vocab_size)
    np.testing.assert_allclose(found, expected(model_folder(None), ids), atol=2e-4)
    np.testing.assert_allclose(np.exp(found).sum(-1), 1, atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_batched_tokens": 1, "max_num_seqs": 1},
        {"max_num_batched_tokens": 7, "max_num_seqs": 4},
        {"max_num_batched_tokens": 64, "block_size": 1},
        {"attention_backend": "reference"},
    ],
    ids=str,
)
def test_chunks_do_not_matter(embedded: FolderModel, options: dict[str, object]):
    ids = embedded.encode(TEXT)[:100]
    model = opened(model_folder(None), **options)
    np.testing.assert_allclose(model.distributions(ids), embedded.distributions(ids), atol=2e-4)


def test_scores_are_read_off_the_distributions(embedded: FolderModel):
    """Of several texts at once, the first token of each without a score."""
    texts = [TEXT[:200], TEXT[:90], "Hello"]
    for text, score in zip(texts, embedded.score(texts, top=3), strict=True):
        ids = embedded.encode(text)
        rows = embedded.distributions(ids)
        assert score.token_ids == ids
        assert score.logprobs[0] is None
        assert score.top[0] == {}
        told = [logprob for logprob in score.logprobs if logprob is not None]
        np.testing.assert_allclose(
            told, rows[np.arange(len(ids) - 1), ids[1:]], atol=2e-4, err_msg=text
        )
        assert [max(top, key=top.get) for top in score.top[1:]] == rows[:-1].argmax(-1).tolist()
        assert all(len(top) == 3 for top in score.top[1:])
    assert [score.top for score in embedded.score(["Hello there"])] == [
        [{}] * len(embedded.encode("Hello there"))
    ]


def test_answers_are_greedy_and_in_order(embedded: FolderModel):
    """A chat that does not fit with its answer has none, and the others are unharmed."""
    long = [{"role": "user", "content": "word " * 5000}]
    first, nothing, second = embedded.generate([CHATS[0], long, CHATS[1]], max_tokens=32)
    assert nothing is None
    assert first == "2 + 3 = 5."
    assert second is not None
    assert second.startswith("I am headway")
    embedded.llm.engine.step()
    embedded.llm.engine.check_integrity()


def test_answers_as_tokens_score_as_what_is_likeliest(embedded: FolderModel):
    """Greedy: each token of an answer is the likeliest behind what stands before it."""
    prompt = embedded.tokenizer.chat_ids(CHATS[0])
    greedy = SamplingParams(temperature=0, max_tokens=32)
    (output,) = embedded.llm.generate({"prompt_token_ids": prompt}, greedy, use_tqdm=False)
    answer = list(output.outputs[0].token_ids)
    assert output.outputs[0].text == "2 + 3 = 5."
    (score,) = embedded.score_ids([prompt + answer], top=1)
    assert score.token_ids == prompt + answer
    assert [list(top) for top in score.top[len(prompt) :]] == [[token] for token in answer]


def test_what_does_not_fit_is_refused(embedded: FolderModel):
    """By the engine, with the number of tokens; afterwards everything goes on."""
    with pytest.raises(RequestError, match="the context is"):
        embedded.distributions([20] * embedded.max_model_len)
    with pytest.raises(RequestError):
        embedded.score(["word " * 5000])
    assert embedded.distributions([20, 21]).shape[0] == 2


def test_bits_per_byte_are_those_of_transformers(stories: Path):
    """Window by window, of a model whose tokenizer puts a token before each text."""
    model = opened(stories)
    found = score_text(model, TEXT, context_chars=120, stride_chars=120)
    total_nats = total_bytes = 0.0
    for window in windows(TEXT, context_chars=120, stride_chars=120):
        ids = model.encode(window.context + window.target)
        begin = len(model.encode(window.context))
        assert ids[:begin] == model.encode(window.context)
        rows = expected(stories, ids)
        total_nats -= float(rows[np.arange(begin - 1, len(ids) - 1), ids[begin:]].sum())
        total_bytes += len(window.target.encode())
    assert found.num_bytes == total_bytes
    assert found.bits_per_byte == pytest.approx(total_nats / math.log(2) / total_bytes, abs=1e-4)
    assert 0.5 < found.bits_per_byte < 1.5  # it was trained on such stories


def test_the_chunk_does_not_change_the_bits(stories: Path):
    cut = {"context_chars": 120, "stride_chars": 120, "limit": 3}
    whole = score_text(opened(stories), TEXT, **cut)
    chunked = score_text(opened(stories, max_num_batched_tokens=5, max_num_seqs=2), TEXT, **cut)
    assert chunked.bits_per_byte == pytest.approx(whole.bits_per_byte, abs=1e-5)


def test_a_last_word_it_knows(stories: Path):
    passages = ["Once upon a time, there was a little girl named Lily", "The bank has a zzyzx"]
    found = score_last_words(opened(stories), passages)
    assert [item.right for item in found.items] == [True, False]


def test_a_folder_against_itself_and_its_roundings(stories: Path, tmp_path: Path):
    """Zero; then more with each bit that is taken away."""
    model, cut = opened(stories), windows(TEXT, context_chars=120, stride_chars=120, limit=3)
    itself = compare(model, model, cut)
    assert (itself.method, itself.kl, itself.agreement) == (EXACT, 0, 1)
    assert itself.overlap == pytest.approx(1, abs=1e-6)
    assert itself.perplexity_ratio == 1
    losses = [
        compare(model, opened(write_rounded(stories, tmp_path / name, rounding)), cut).kl
        for name, rounding in ROUNDINGS.items()
    ]
    assert 0 < losses[0] < 0.02 < losses[1] < 1 < losses[2]


def test_a_draft_is_as_good_as_its_card_says(stories: Path, shared: Path):
    """On the target's own greedy story; the card says 0.55 on samples."""
    target, draft = opened(stories), opened(shared / "models" / "stories-draft75K")
    found = compare(target, draft, windows(TEXT, context_chars=120, stride_chars=120, limit=4))
    assert found.overlap is not None
    assert 0.35 < found.overlap < 0.75
    assert 0.35 < found.agreement < 0.75


def test_rounding_by_hand():
    row = torch.tensor([[0.9, -0.5, 0.4, 0.1, 0.2, 0.1, -0.1, 0.0]])
    found = rounded(row, Rounding(bits=2, group=4))
    torch.testing.assert_close(found, torch.tensor([[0.9, -0.9, 0, 0, 0.2, 0, 0, 0]]))
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(5, 172, generator=generator)
    for rounding, levels in ((ROUNDINGS["int8"], 255), (ROUNDINGS["int4"], 45)):
        close = rounded(weight, rounding)
        step = weight.abs().amax() / (2 ** (rounding.bits - 1) - 1)
        assert (close - weight).abs().max() <= step / 2 + 1e-6
        assert all(len(row.unique()) <= levels for row in close)
    assert rounded(torch.zeros(2, 64), ROUNDINGS["int4"]).eq(0).all()


def test_a_rounded_folder_is_a_folder(tmp_path: Path):
    """The same files, one type of weights, norms as they were; it must not exist before."""
    source = model_folder(None)
    out = write_rounded(source, tmp_path / "int4", ROUNDINGS["int4"])
    assert {path.name for path in out.iterdir()} == {path.name for path in source.iterdir()}
    assert FolderModel(out, kv_memory="32MiB").name == "int4"
    with pytest.raises(FileExistsError):
        write_rounded(source, out, ROUNDINGS["int4"])
    with pytest.raises(HeadwayError):
        FolderModel(tmp_path / "nowhere")
