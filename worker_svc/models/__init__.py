"""Models as they lie on disk: which one a name means, where it is fetched, what its files say of text."""
