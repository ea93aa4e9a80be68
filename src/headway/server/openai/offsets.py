"""`text_offset`: where each token begins in the shown text, special tokens and half characters too.

Worked example, the prompt "Once é" of a tokenizer that puts <s> before it, "é" in two tokens:

    tokens   <s>  "Once"  " "  "\\xc3"  "\\xa9"
    offsets   0    0       4    5       5        the text is "Once é", where <s> does not show
"""

import codecs

from headway.frontend.text import Tokenizer


class Offsets:
    """Counter of the offsets of a text's tokens; `hides` leaves out special tokens."""

    def __init__(self, tokenizer: Tokenizer | None, *, hides: bool, at: int = 0) -> None:
        self.at = at
        self._tokenizer = tokenizer
        self._hidden = tokenizer.special_ids if tokenizer and hides else frozenset()
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def place(self, token_ids: list[int]) -> list[int]:
        """Return the offsets of the next tokens."""
        offsets = []
        for token_id in token_ids:
            offsets.append(self.at)
            if self._tokenizer is not None and token_id not in self._hidden:
                self.at += len(self._decode(self._tokenizer.piece(token_id)))
        return offsets


def prompt_offsets(
    tokenizer: Tokenizer | None, prompt: list[int], text: str, hides: bool
) -> list[int]:
    """Return the offsets of a prompt given as ids whose decoded text is `text`.

    Some decoders drop the space before the first word: " Once" is shown as "Once".
    """
    counter = Offsets(tokenizer, hides=hides)
    offsets = counter.place(prompt)
    dropped = max(0, counter.at - len(text))
    return [max(0, at - dropped) for at in offsets]
