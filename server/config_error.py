"""What is said about a configuration that cannot be honoured."""

MAX_WORD_CHARACTERS = 200  # of one name or value out of a configuration
MAX_REASON_CHARACTERS = 2000  # a reason travels to the front end in a message of limited size


def shortened(text: str, limit: int = MAX_WORD_CHARACTERS) -> str:
    """Return the text, or its beginning if it is long."""
    return text if len(text) <= limit else f"{text[:limit]}..."


class ConfigError(ValueError):
    """A model's configuration is wrong or asks for what this server does not do. The message is for the user."""

    def __init__(self, message: str) -> None:
        super().__init__(shortened(message, MAX_REASON_CHARACTERS))
