"""The gRPC face: the server, its sessions with schedulers, conversion, status."""
