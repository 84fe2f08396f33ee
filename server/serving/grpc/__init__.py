"""gRPC: nghttp2's connections, calls, streams, and what their messages say."""
