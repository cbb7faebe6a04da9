"""The load generator: traffic that is planned, sent on time whatever the target does, and recorded in full.

A run is told by `records`: what was offered, what happened to each request, and what the generator itself
was worth. `arrivals` says when requests come, `target` what may be asked, `generator` does it, and
`summary` turns records into figures.
"""
