"""What happens in each decode step: start with `decode` in loop.py.

Sequences, sampling, stopping, noise and verification.  Models are reached through sessions only.
Nothing here may import the decoder, evaluation or drawings.
"""
