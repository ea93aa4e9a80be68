"""Several steps of a sequence as one, where whoever shows them is behind.

What arrives for a stream waits until the server's loop comes to it. In time that is a step or two;
where more tokens come than the loop can write one by one, steps pile up, and each would cost a
delta, a pass of the tokenizer, an event and a write of its own. Then they go together:

    waiting   [a] [b] [c] [d] [e] [f] [g] [h]    one event with the text of all eight
    waiting   [a] [b]                            two events: nobody is behind
"""

from msgspec.structs import replace

from headway.core.request import SequenceUpdate

BEHIND = 8
"""Steps that wait for one stream before they go together: a moment in which others had the cores is
no pressure."""


def joined(updates: list[SequenceUpdate], num_sequences: int) -> list[SequenceUpdate]:
    """The updates of a stream of so many sequences, those of each as one where it is behind.

    What tells of single tokens stays apart: log-probabilities, guesses, forced tokens.
    """
    if len(updates) < BEHIND * num_sequences:
        return updates
    found: list[SequenceUpdate] = []
    last: dict[int, int] = {}
    """By index of a sequence where its last update is among those found."""
    for update in updates:
        at = last.get(update.index)
        if at is not None and is_plain(found[at]) and is_plain(update):
            found[at] = both(found[at], update)
        else:
            last[update.index] = len(found)
            found.append(update)
    return found


def is_plain(update: SequenceUpdate) -> bool:
    """Whether it tells of tokens alone."""
    return update.logprobs is None and not (update.num_drafts or update.num_forced)


def both(first: SequenceUpdate, then: SequenceUpdate) -> SequenceUpdate:
    """Two of one sequence as one: what comes once is the first's, how it ends the second's."""
    return replace(
        first,
        token_ids=first.token_ids + then.token_ids,
        finish_reason=then.finish_reason,
        stop_token_id=then.stop_token_id,
        incomplete=then.incomplete,
    )
