"""Constrained output: what a grammar lets a sequence say next."""
