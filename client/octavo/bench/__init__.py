"""Benchmarks that users can run: `octavo bench NAME`."""
