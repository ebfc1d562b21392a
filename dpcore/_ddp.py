"""Where models that were pickled by an earlier version look for ``SyncBatchNorm``."""

import sys

from dpcore.ddp.torch_face import sync_batch_norm

sys.modules["dpcore._ddp.sync_batch_norm"] = sync_batch_norm  # that version's _ddp was a folder
