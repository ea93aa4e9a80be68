"""`headway serve --retune`: settings follow the traffic while a server runs.

candidates.py   neighbours of the present settings that may change live
question.py     what a server asks the process beside it, and what that answers
replay.py       the traffic of late, simulated from the state in which the server was
pace.py         what steps take, at the machine's pace of the same moments
trial.py        with the present settings and others: is it what was seen, is one clearly better
gain.py         by how much, and how sure that is
controller.py   when to ask, apply, watch, roll back, and how often at most
retuner.py      the server's side: its telemetry, its engines, the process
__main__.py     the process, at a low priority
"""
