"""Campaigns: programs that draw faults by chance and check that the laws hold whatever happens.

`python -m tests.faults.campaign --help` says how to run one.
"""
