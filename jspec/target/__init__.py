"""The model being sped up: configuration, weights, forward pass, checkpoint readers. Knows nobody else."""
