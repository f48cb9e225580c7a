"""What may run a pass over the nodes of a batch, a module each.

Knows: how a pass runs.  Does not know: where its nodes come from, what is done with its logits.
"""
