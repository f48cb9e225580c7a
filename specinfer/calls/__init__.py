"""Calls of an engine beside one text: streams, many prompts, conversations, scores of given text."""
