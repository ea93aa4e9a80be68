"""What the text of an answer must be, as a client asked for it: a kind and the grammar's text.

A `Grammar` travels inside `SamplingParams` from the server to the engine, which compiles it. Equal
grammars compare equal and hash alike, so that compiled ones are kept by it.
"""

import msgspec

KINDS = ("json", "json_object", "regex", "choice", "lark", "structural")


class Grammar(msgspec.Struct, frozen=True, kw_only=True):
    """One grammar; `text` by `kind`:

    json         a JSON Schema as JSON text
    json_object  "" (any JSON object)
    regex        a regular expression that the whole answer matches
    choice       a JSON list of strings, one of which is the answer
    lark         a grammar in llguidance's dialect of Lark
    structural   llguidance's Lark too, written by us: tool calls and the text around them
    """

    kind: str
    text: str = ""
