"""One front-end process: protocols, calls and requests on one event loop."""
