"""The verbs of the command line: one file for each, registered in `main`.

The room reads arguments and prints results; options come from the tables in `config.options`. A
verb imports what it needs when it runs, so that `--help` is quick.
It may import every room. It has no logic that a test or another program would want to call.
"""
