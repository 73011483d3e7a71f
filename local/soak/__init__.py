"""`tideline soak`: run a platform for a long time, and check that it keeps up."""
