"""Random cases of synchronisation, run on ranks and held against oracles that share no code with the library."""
