"""Static against continuous batching, contiguous against paged memory, under the same traffic."""
