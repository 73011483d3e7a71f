"""The shared state of streams and runs: leases, epochs, control folders, incidents, checkpoints."""
