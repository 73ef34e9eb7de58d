"""EAGLE-3: one layer that drafts token after token, fed with its own state."""
