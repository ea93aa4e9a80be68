"""What limits a server, what would help and what would be a waste: `headway doctor`.

Here lives the reading of a server, a report or this machine, the rules that go by it, and what each
fix would gain. A rule is a row of `rules`; its words and its figures stand beside it.
It changes nothing on a server. It imports torch only inside functions that probe this machine.
"""
