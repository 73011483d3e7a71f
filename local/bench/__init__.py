"""`tideline bench`: what is measured, beside what, and how it is shown."""
