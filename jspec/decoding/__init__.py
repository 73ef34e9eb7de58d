"""Decoding: choice, acceptance, the round and the loop around it."""
