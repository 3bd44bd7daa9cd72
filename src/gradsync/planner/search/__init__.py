"""The search for a plan of a measured job: ways to exchange gradients, predictions of a step, and reasons."""
