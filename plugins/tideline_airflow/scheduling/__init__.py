"""When DAGs run and in which order, which slices a run takes, and the arguments that all DAGs share."""
