"""Drafters that fill a block of masked rows at once: DFlash, DFlare and DSpark."""
