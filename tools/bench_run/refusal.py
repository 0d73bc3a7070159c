"""How a measurement says that it can't be done here."""


class RefusedError(RuntimeError):
    """This machine, or this user, can't do the measurement; the message is one line that says what is needed."""
