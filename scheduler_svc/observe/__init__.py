"""What the scheduler tells about itself: metrics, history, recent figures."""
