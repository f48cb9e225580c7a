"""What a text may be: JSON of a schema, a regex, one of some strings, a grammar; and libraries that follow it."""
