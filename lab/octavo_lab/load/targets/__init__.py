"""The services that can be driven."""
