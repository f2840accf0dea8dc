"""What a user did wrong, in one message."""


class UserError(Exception):
    """A mistake the user can mend: the message says what was given, what is allowed and what to type.

    The command line prints the message alone, without a traceback, and exits with status 1.
    """
