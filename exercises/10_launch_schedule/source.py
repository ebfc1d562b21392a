"""A launch schedule of your own (30 minutes)

When a bucket is sent is a decision of its own, and in dpcore it is an object: a ``LaunchSchedule``
hears what happens in backward and says what is sent. ``DataParallel(model, schedule=Pairs())`` runs
it, and so does ``dpcore simulate``.

Write one that sends buckets in pairs: 0 and 1 together as one operation, then 2 and 3, and so on.
Each pair leaves as soon as both of its buckets are complete. If the number of buckets is odd, the
last one travels alone.

    control.buckets               how many there are, numbered in the order in which they get ready
    control.is_complete(bucket)   whether all gradients of a bucket are there
    control.launch([0, 1])        sends neighbours as one operation
    control.launch(4)             sends one
    control.wait_for_all()        returns when all gradients are means

Which buckets travel together must not differ between ranks; which one is complete first may. A pair
that is launched before its turn is held back until those before it are sent, so that all ranks
begin the same operations in the same order.

docs/data_parallel.md has more about schedules, and examples/ three of the literature.
"""

import dpcore


class Pairs(dpcore.LaunchSchedule):
    """Two buckets in each operation, while backward goes on."""

    def bucket_ready(self, control, bucket):
        """The last gradient of this bucket has come."""
        #: solution
        first = bucket - bucket % 2
        pair = list(range(first, min(first + 2, control.buckets)))
        if all(control.is_complete(member) for member in pair):
            control.launch(pair)
        #: instead
        #| raise NotImplementedError("is its pair complete?")
        #: end

    def backward_end(self, control):
        """All gradients have come."""
        #: solution
        control.wait_for_all()
        #: instead
        #| raise NotImplementedError("wait")
        #: end


#: hint
#| The pair of a bucket begins at `bucket - bucket % 2`. It has two members, but the last may have
#| one.
#: hint
#| `bucket_ready` is called for each bucket of a pair, in either order: send when both are complete,
#| which is so in the second of the two calls.
#: end
