"""When DAGs run and in which order, which slices a run takes, and the arguments and form fields that DAGs share."""
