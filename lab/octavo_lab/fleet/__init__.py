"""One late-binding queue against routers that bind early, in simulation."""
