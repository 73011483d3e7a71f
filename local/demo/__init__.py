"""`tideline demo`: start everything, and show how live windows become final."""
