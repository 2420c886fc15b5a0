"""Errors that are the user's to fix."""


class UserError(Exception):
    """Something the user can put right. The message is one line that says what to do.

    The command line prints it without a traceback and exits with status 2.
    """
