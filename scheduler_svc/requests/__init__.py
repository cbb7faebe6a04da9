"""Live requests: what clients ask for, their state, what is sent to them, accounts and tenants."""
