"""The one error that a user can cause."""


class InputError(ValueError):
    """Bad input from the command line or a file; its message is one line that says what to do."""
