"""Weights in the integers and scales of their file: formats, the packed layout, products, modules."""
