"""Small things that every package may use: files, plain values, tables of text, the registry of drawing functions.

Nothing here imports another part of specinfer but its errors.
"""
