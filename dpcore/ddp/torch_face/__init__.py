"""What makes a DataParallel torch's DistributedDataParallel for programs that look inside."""
