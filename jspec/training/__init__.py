"""Training drafters: texts by the target itself, features, losses, the loop."""
