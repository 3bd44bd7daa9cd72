"""Costs of a training step: computations and transfers, cluster, cost model, predicted timeline; without torch."""
