"""Costs of a step: transfers and computations, the cluster, the cost model, the predicted timeline; without torch."""
