"""`headway serve --retune`: settings follow the traffic while a server runs.

candidates.py   neighbours of the present settings that may change live
question.py     what a server asks the process beside it, and what that answers
trial.py        both simulated on the traffic of late: is one clearly better, what was expected
controller.py   when to ask, apply, watch, roll back, and how often at most
retuner.py      the server's side: its telemetry, its engines, the process
__main__.py     the process, at the lowest priority
"""
