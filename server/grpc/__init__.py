"""gRPC: the protocol's methods, their calls and streams.

gRPC's core reads its experiments from the environment when its first object is made. The listener of its newer event
engine costs a small request one more wake-up of a thread, so it is off.
"""

import os

os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_listener")
