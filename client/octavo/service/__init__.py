"""What every service of Octavo has: settings from flags, environment and file, and structured logs."""
