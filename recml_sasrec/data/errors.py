"""What the rooms of the data raise."""


class DataError(ValueError):
    """The user's data can't be used; the message is one sentence with the value, the limit and the remedy."""
