"""What the fork server of `dpcore.spawn` imports last: ranks need not look through, and thereby
copy, what all of them share."""

import gc

gc.collect()
gc.freeze()
