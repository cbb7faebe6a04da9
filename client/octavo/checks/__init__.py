"""What can be known of a machine before Octavo runs on it; `octavo doctor` shows it."""
