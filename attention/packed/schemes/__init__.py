"""How quantised checkpoints in safetensors store the matrices of linear layers, a module for each method."""
