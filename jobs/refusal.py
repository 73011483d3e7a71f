"""The one exception whose text is meant for the user."""


class Refusal(Exception):
    """Something is wrong that the user can mend: one sentence says what, and what to do. Shown without a trace."""
