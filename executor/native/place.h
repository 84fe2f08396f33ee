/* From a lease's numbers to addresses in this process. No address is taken from a lease or a slot. */
#ifndef GANGWAY_PLACE_H
#define GANGWAY_PLACE_H

#include "gang.h"
#include "worker.h"

/* False if a number leads outside, the model is not loaded, or the slot of a member does not run. The query uses the worker's `pieces`. */
bool place_lease(struct worker *worker, const struct lease *lease, struct query *query);

#endif
