"""Octavo: large language models over gRPC, with one scheduler for every iteration of every GPU."""
