"""What streams and runs agree on: leases, epochs, control folders, incidents, checkpoints."""
