"""How large trees should be: a policy that learns what steps cost and which drafted tokens are accepted.

Seconds are told to it; it reads no clock, runs no model, and never decides which tokens are emitted.
"""
