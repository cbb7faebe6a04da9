"""What every service of Octavo has: settings from flags, environment and file, logs, and an address."""
