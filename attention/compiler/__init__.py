"""Making compiled passes: the model exported once, its products and attention replaced, packages in the cache folder.

Knows: exported graphs, weight formats, C++ kernels, files of packages.  Does not know: trees, rows, what runs a pass.
"""
