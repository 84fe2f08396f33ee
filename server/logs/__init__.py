"""The server's log: settings, the process that writes it, and the protocol's LogSettings (docs/logging.md)."""
