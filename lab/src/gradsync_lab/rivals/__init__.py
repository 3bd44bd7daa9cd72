"""Systems of others that gradsync is measured beside: searches for plans, and schemes."""
