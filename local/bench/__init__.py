"""`tideline bench`: the measurements, the yardsticks, and the reports."""
