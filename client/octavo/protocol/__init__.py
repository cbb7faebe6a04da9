"""The step protocol between scheduler and worker as plain records; see `protos/octavo/v1/worker.proto`."""
