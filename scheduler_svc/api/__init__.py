"""The gRPC face: servicers, the server they run in, conversion to records, status."""
