"""Grammars of texts: JSON of a schema, a regex, one of some strings, a grammar; and the libraries that follow them."""
