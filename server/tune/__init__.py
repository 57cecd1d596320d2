"""Settings for a load, by measuring a model and simulating what requests would meet."""
