"""Adapters to training frameworks: each module imports its framework, and gradsync itself imports none of them."""
