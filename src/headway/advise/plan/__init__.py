"""What holds tomorrow's traffic: which machines, how many, at what cost, and what breaks first.

demand      a trace, or percentiles, bursts and shares → the same kind of traffic
machines    this one (calibrated), calibration files, rows of a datasheet: does it fit?
capacity    by simulation: the rate that one server keeps, the smallest number for the peak
answer      a row for each machine, and the sentence why
"""
