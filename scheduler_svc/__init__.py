"""The scheduler service: queue, deadlines, admission, batch plans and client streams."""
