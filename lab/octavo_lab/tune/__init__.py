"""The tuner behind `octavo tune`: settings of a worker that serve most within a latency target.

`search` decides what to try next and knows nothing of what is tuned; `simulated` and `served` try it, in
virtual time and on real processes.
"""
