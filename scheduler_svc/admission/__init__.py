"""May it come in: keys, tenants, quotas, load, and the checks of a request against its model."""
