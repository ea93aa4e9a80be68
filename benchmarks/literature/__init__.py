"""What serving literature promises, measured here: each claim with its source and a verdict.

claim.py       a claim, what was measured of it, and how a verdict follows from the two
subject.py     who is asked: a folder, for which servers and engines are started, or a URL
asking.py      requests to a server over HTTP, one after the other, many at once, or at their times
engines.py     engines over one executor, in this process, on a clock of CPU time
table.py       all claims that `python benchmarks/claims_page.py` asks, and the run over them
page.py        what came of it as one page

The others are a family of claims each. It imports what measures: `bench`, `advise` and `evals`.
"""
