"""Other libraries' ways into specinfer: one module per library.

They use the decoder as a user does.  Nothing else may import them.
"""
