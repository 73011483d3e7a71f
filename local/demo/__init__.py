"""`tideline demo`: everything at once, until live windows are seen to turn final."""
