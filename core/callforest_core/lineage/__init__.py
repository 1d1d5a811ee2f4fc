"""Who continues whom: fingerprints, the chain-mode verdict, terminal attribution."""
