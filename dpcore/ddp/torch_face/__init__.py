"""The members that programs expect of torch's DistributedDataParallel, beside ``forward``."""
