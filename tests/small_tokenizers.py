"""Tokenizers of each kind, trained on a few lines."""

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as RustTokenizer

CORPUS = [
    "the egg and the end of the END. ",
    "日本語のテキスト ",
    "naïve café 😀👩‍👩‍👧 🇯🇵 ",
    "<b> & 'x' ",
] * 3


SPECIALS = ["<|end|>", "<|start|>"]


def bytelevel(decoder) -> RustTokenizer:
    """A byte-level BPE of 400 tokens, so that most characters take several."""
    rust = RustTokenizer(models.BPE())
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rust.decoder = decoder
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=SPECIALS,
        show_progress=False,
    )
    rust.train_from_iterator(CORPUS, trainer)
    rust.add_tokens([AddedToken("<think>", special=False)])
    return rust


def sentencepiece() -> RustTokenizer:
    """Llama 2's kind: ▁ for spaces, <0x0A> for bytes that have no token."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
    tokens += ["t", "h", "e", "n", "d", "th", "the", "▁the", "日", "é", "▁▁"]
    merges = [("t", "h"), ("th", "e"), ("▁", "the"), ("▁", "▁")]
    rust = RustTokenizer(
        models.BPE(
            vocab={token: number for number, token in enumerate(tokens)},
            merges=merges,
            byte_fallback=True,
            unk_token="<unk>",
            fuse_unk=True,
        )
    )
    rust.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    rust.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    rust.add_special_tokens(["<unk>", "<s>", "</s>"])
    return rust


def unknown() -> RustTokenizer:
    """Byte-level bytes behind a decoder whose name we do not know: the slow way."""
    return bytelevel(decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()]))


KINDS = {
    "bytelevel": lambda: bytelevel(decoders.ByteLevel()),
    "sentencepiece": sentencepiece,
    "unknown": unknown,
}
