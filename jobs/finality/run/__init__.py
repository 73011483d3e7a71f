"""What the tasks of one run share: its folder, its tries, and the search for slices that cannot be computed."""
