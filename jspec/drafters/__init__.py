"""Drafters: one file each, one interface (`base.py`)."""
