"""Drafts that look up the next tokens, in texts or in the target's earlier predictions; they have no weights."""
