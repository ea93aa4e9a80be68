"""The options of `headway prune`: what goes, and what it is judged by."""

from dataclasses import dataclass

from headway.config.options.field import option


@dataclass(frozen=True, slots=True, kw_only=True)
class PruneOptions:
    """What is removed, and the texts whose inputs say what is missed least."""

    neurons: float = option(
        0.0, "Share of each MLP's neurons that goes.", low=0, high=0.99, common=True
    )
    kv_heads: int = option(
        0, "KV heads that go in each layer, with their query heads.", low=0, common=True
    )
    heads: int = option(0, "Query heads of each KV head that go.", low=0, common=True)
    layers: int = option(0, "Whole layers that go.", low=0, common=True)
    sparsity: float = option(
        0.0, "Share of single weights that become zero: smaller when compressed, no faster.",
        low=0, high=0.99, common=True,
    )  # fmt: skip
    pattern: str = option(
        "any", "Which single weights: any, or 2:4, two of each four neighbours.",
        choices=("any", "2:4"), common=True,
    )  # fmt: skip
    method: str = option(
        "sparsegpt", "How single weights are chosen.", choices=("sparsegpt", "wanda", "magnitude")
    )
    calibrate: list[str] = option(
        [], "Texts that inputs are judged by: a .txt, a .jsonl of texts or chats, or skills; "
        "FILE:0.3 has a share of 0.3. Without any: skills.",
        common=True,
    )  # fmt: skip
    rows: int = option(32, "Rows of these texts.", low=1, high=100_000)
    row_length: int = option(512, "Tokens of a row.", low=2)
    seed: int = option(0, "The same seed, the same rows.", low=0)
    threads: int = option(1, "Threads of torch.", low=1, high=1024)
