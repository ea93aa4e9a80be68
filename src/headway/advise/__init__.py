"""What limits a server and what would help: `headway doctor`, `plan`, `simulate` and `tune`.

The doctor reads a server, a report or this machine, checks rules against the reading and estimates
the gain of each fix. A rule is a row of `rules`; its predicate and its texts are in `symptoms`, its
gain in `remedies`. Nothing here changes a server. torch is imported only inside functions that
measure this machine.
"""
