"""Capacity plan for a given traffic: which machines, how many, at what cost, and what fails first.

demand      a trace, or percentiles, bursts and shares → traffic that can be simulated
machines    this one (calibrated), calibration files, rows of a datasheet: does the model fit?
trial       one machine's servers under some traffic, simulated
capacity    the rate that one server keeps, the smallest number of servers for the peak
answer      a row for each machine, and the reason in a sentence
"""
