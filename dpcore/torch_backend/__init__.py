"""The backend "dpcore" of torch.distributed: what it offers besides torch's own calls."""

from dpcore.torch_backend.backend import (
    Options,
    communicator_of,
    flight_record,
    write_flight_record,
)

__all__ = ["Options", "communicator_of", "flight_record", "write_flight_record"]
