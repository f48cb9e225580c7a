"""Weights that run at the size of a quantised file: its formats, the packed layout, its products and modules."""
