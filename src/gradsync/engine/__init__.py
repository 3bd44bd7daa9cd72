"""The engine of one model: it runs a plan, bucket by bucket, and settles on one of several plans."""
