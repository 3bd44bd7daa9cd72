"""The default plan, made from densities and costs without a search, and plans by names or with one compressor."""
