"""The worker service: device, KV block pool and model runner."""
