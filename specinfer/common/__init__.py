"""Small things that every package may use: files, plain values, tables of text, the registry of what draws.

Nothing here imports another part of specinfer but its errors.
"""
