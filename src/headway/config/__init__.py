"""Settings: the option tables, and what follows from options, model and machine.

Imports core and spec alone, and never torch. `resolve` turns options into `Settings`, and gives a
reason for each choice.
"""
