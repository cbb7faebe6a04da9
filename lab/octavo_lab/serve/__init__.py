"""`octavo bench serve`: planned traffic against a service."""
