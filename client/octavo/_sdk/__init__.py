"""What the clients are made of: sessions over channels, calls, their wire format."""
