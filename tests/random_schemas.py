"""JSON schemas that nobody has seen: each feature that the documentation names, by a seed.

Most can be satisfied, some by accident cannot (`allOf` of contradictions), and some hold a keyword
that is not supported.
"""

import random
from typing import Any

UNSUPPORTED: tuple[dict[str, Any], ...] = (
    {"not": {"type": "null"}},
    {"if": {"type": "string"}, "then": {"minLength": 2}},
    {"uniqueItems": True},
    {"contains": {"type": "integer"}},
    {"dependentRequired": {"a": ["b"]}},
    {"propertyNames": {"maxLength": 3}},
    {"unevaluatedProperties": False},
    {"format": "iri"},
)
PATTERNS = ("^[a-c]{2,5}$", "[0-9]+", "^(red|green)-\\d{1,3}$", "^[^@ ]+@[^@ ]+$", "^é[^x]?$")
FORMATS = (
    "date-time",
    "time",
    "date",
    "duration",
    "email",
    "hostname",
    "ipv4",
    "ipv6",
    "uuid",
    "uri",
)
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -3, 2.5, 1e10, "", "a", "é🌊", 'say "hi"\\\n', "\u0000"),
    *([], [1, "b"], {}, {"k": [None]}),
)
NAMES = ("a", "b", "name", "größe", "a b", 'q"', "$ref", "x-1", "")


class Generator:
    """Draws schemas; `$defs` of the schema under way may refer to each other and to the whole."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)

    def whole(self) -> dict[str, Any]:
        """One schema with its definitions, an object at the top more often than not."""
        rng = self.rng
        self._names = [f"d{i}" for i in range(rng.choice((0, 0, 1, 3)))]
        kinds = (self.object, self.array)  # a way round leads through one of these
        defs = {name: rng.choice(kinds)(2) for name in self._names}
        found = self.object(3) if rng.random() < 0.6 else self.schema(3)
        if defs:
            found["$defs"] = defs
        if rng.random() < 0.2:
            found["$schema"] = "https://json-schema.org/draft/2020-12/schema"
        if rng.random() < 0.12:
            found.update(rng.choice(UNSUPPORTED))
        return found

    def schema(self, depth: int) -> dict[str, Any]:
        """Any schema; with depth 0 one without others inside."""
        leaves = [self.string, self.number, self.integer, self.choice, self.plain]
        inner = [self.object, self.array, self.any_of, self.all_of, self.one_of, self.reference]
        found = self.rng.choice([*leaves, *(inner * 2 if depth > 0 else [])])(depth - 1)
        if self.rng.random() < 0.2:
            found["description"] = "what it is"
        return found

    def some(self, **fields: Any) -> dict[str, Any]:
        """Each of `fields` with even chances."""
        return {name: value for name, value in fields.items() if self.rng.random() < 0.5}

    def plain(self, _: int) -> dict[str, Any]:
        kinds = ["string", "number", "integer", "boolean", "null", "array", "object"]
        rng = self.rng
        several = rng.sample(kinds, rng.randrange(1, 4))
        return rng.choice(({"type": rng.choice(kinds)}, {"type": several}, {}))

    def choice(self, _: int) -> dict[str, Any]:
        rng = self.rng
        values = rng.sample(VALUES, rng.randrange(1, 6))
        return {"const": values[0]} if rng.random() < 0.4 else {"enum": values}

    def string(self, _: int) -> dict[str, Any]:
        rng, low = self.rng, self.rng.randrange(4)
        kind = rng.randrange(3)
        if kind == 0:
            more = self.some(minLength=low, maxLength=low + rng.randrange(9))
        else:
            more = (
                {"pattern": rng.choice(PATTERNS)} if kind == 1 else {"format": rng.choice(FORMATS)}
            )
        return {"type": "string", **more}

    def number(self, _: int) -> dict[str, Any]:
        low = self.rng.choice((-1000, -2.5, -1, 0, 0.1, 3, 1e6))
        high = low + self.rng.choice((0.5, 1, 7.25, 1e4))
        ends = self.some(minimum=low, maximum=high)
        if self.rng.random() < 0.4:
            ends = self.some(exclusiveMinimum=low, exclusiveMaximum=high)
        if self.rng.random() < 0.2:
            ends["multipleOf"] = self.rng.choice((0.5, 0.25, 2))
        return {"type": "number", **ends}

    def integer(self, _: int) -> dict[str, Any]:
        low = self.rng.choice((-(10**9), -17, -1, 0, 1, 99, 10**12))
        high = low + self.rng.choice((2, 9, 1234))
        ends = self.some(minimum=low, maximum=high)
        if self.rng.random() < 0.3:
            ends = self.some(exclusiveMinimum=low - 1, exclusiveMaximum=high + 1)
        if self.rng.random() < 0.2:
            ends["multipleOf"] = self.rng.choice((1, 2, 3))
        return {"type": "integer", **ends}

    def array(self, depth: int) -> dict[str, Any]:
        rng, low = self.rng, self.rng.randrange(3)
        found = {"type": "array", **self.some(minItems=low, maxItems=low + rng.randrange(4))}
        if rng.random() < 0.3:
            found["prefixItems"] = [self.schema(depth) for _ in range(rng.randrange(1, 4))]
        if rng.random() < 0.8:
            found["items"] = rng.choice((self.schema(depth), self.schema(depth), False))
        return found

    def object(self, depth: int) -> dict[str, Any]:
        rng = self.rng
        names = rng.sample(NAMES, rng.randrange(5))
        found: dict[str, Any] = {"type": "object"}
        found["properties"] = {name: self.schema(depth) for name in names}
        if names:
            found["required"] = rng.sample(names, rng.randrange(len(names) + 1))
        if rng.random() < 0.2:
            found["patternProperties"] = {"^p_[a-z]+$": self.schema(depth)}
        if rng.random() < 0.7:
            found["additionalProperties"] = rng.choice((False, False, True, self.schema(0)))
        if rng.random() < 0.1:
            found |= self.some(minProperties=1, maxProperties=3)
        return found

    def any_of(self, depth: int) -> dict[str, Any]:
        return {"anyOf": [self.schema(depth) for _ in range(self.rng.randrange(1, 4))]}

    def one_of(self, depth: int) -> dict[str, Any]:
        kinds = self.rng.sample((self.string, self.integer, self.array, self.object), 2)
        return {"oneOf": [kind(depth) for kind in kinds]}

    def all_of(self, depth: int) -> dict[str, Any]:
        kind = self.rng.choice((self.string, self.integer, self.number, self.object))
        return {"allOf": [kind(depth), kind(depth)]}

    def reference(self, depth: int) -> dict[str, Any]:
        """To a definition, which may be around it: with an end, for it is one of two ways."""
        if not self._names:
            return self.plain(depth)
        target = {"$ref": f"#/$defs/{self.rng.choice(self._names)}"}
        return {"anyOf": [target, {"type": "null"}]}
