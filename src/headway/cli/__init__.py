"""The verbs a user types: one file a verb, registered in `main`.

Here lives the reading of arguments and the printing of results; options come from the tables in
`config.options`. A verb imports what it needs when it runs, so that `--help` is quick.
It may import every room. It holds no logic that a test or another program would want to call.
"""
