"""Hostile input against a stack of real processes: what it answers, and what a neighbour feels meanwhile."""
