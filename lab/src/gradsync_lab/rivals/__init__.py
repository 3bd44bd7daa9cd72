"""Schemes and planners of other systems, re-implemented to compare gradsync with them."""
