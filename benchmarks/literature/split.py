"""How many of several engines compute prompts, where prompts and answers are computed apart.

The load of each kind is given in engines: seconds of a prefill engine, and of a decode engine that
keeps its pace. Worked example, Llama 3.1 8B on eight engines, a second of traffic:

    20 prompts of 1,024 tokens at 30,000 tokens/s               0.68 engines
    20 answers of 256 tokens at 2,600 tokens/s an engine        1.97 engines
    fullest pool with 2 of 8 prefilling   max(0.68 / 2, 1.97 / 6) = 0.34
"""


def fullest_pool(count: int, number: int, prefill: float, decode: float) -> float:
    """Return the load of the fuller pool where `number` of `count` engines prefill.

    `prefill` and `decode` are the loads of each kind, in engines.
    """
    return max(prefill / number, decode / (count - number))


def prefill_engines(count: int, prefill: float, decode: float) -> int:
    """Return the number of prefill engines with the least load of the fuller pool, never 0 or all.

    Of equal numbers it is the one nearest to half.
    """
    assert count > 1
    return min(
        range(1, count),
        key=lambda number: (
            fullest_pool(count, number, prefill, decode),
            abs(2 * number - count),
        ),
    )
