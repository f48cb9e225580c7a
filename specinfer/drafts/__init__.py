"""What proposes token trees: one module per kind of draft, and the weights that come with the package.

A draft knows the committed tokens and, if it asks, the target's hidden states; never the target, nor verification.
"""
