"""A stack of real processes under attack, and whether its clients notice more than a pause."""
