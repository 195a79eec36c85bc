"""The fault campaign: real workers under real faults, and a checker that is seen to bite.

`python -m tests.faults --help`; README.md says what the lines mean.
"""
