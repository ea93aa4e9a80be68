"""Quality as numbers: suites of questions, statistics over their items, a gate, reports.

It is given a `core.scoring.Model`, a folder's engine or a URL, and asks it what a suite holds.
It promises every item with its reply, an interval for each share, and paired tests of A against B.
"""
