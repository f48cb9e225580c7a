"""Evidence: exact certificates, comparisons, recorded traces and their replay, the paper's tables.

Everything here uses the decoder as a user does.  Nothing that decodes may import it.
"""
