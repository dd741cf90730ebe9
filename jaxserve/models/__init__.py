"""Model families in Flax NNX, one file each, found through registry.py."""
