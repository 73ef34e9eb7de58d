"""Attention of a block's rows, a chain or a tree, over the static cache."""
