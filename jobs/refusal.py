"""The one exception with a text for the user."""


class Refusal(Exception):
    """An error that the user can correct. One sentence names it and says what to do. It is shown without a trace."""
