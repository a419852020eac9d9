"""The errors that a user's mistake raises.

Everything in the package may import this module; it imports nothing.
"""


class UserError(ValueError):
    """A setting, file or argument that the user can mend.

    The message names the key or file, the value found, the values allowed and the next step. The command line prints
    it without a traceback and exits with status 2.
    """


class UnknownKeyError(UserError, KeyError):
    """A key that does not exist. Also a KeyError, as in Detectron2."""

    __str__ = Exception.__str__  # KeyError would print the repr of the message
