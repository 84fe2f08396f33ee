"""Front ends over one data plane, the model repository, supervision and the command line.

gRPC's core reads its experiments from the environment when it is imported. The listener of its newer event engine costs
a request two more wake-ups of threads, so it is off.
"""

import os

os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_listener")
