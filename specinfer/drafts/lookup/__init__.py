"""Drafts that look up what may follow, in texts or in what the target said before; they have no weights."""
