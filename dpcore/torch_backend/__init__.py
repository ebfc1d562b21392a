"""The backend "dpcore" of torch.distributed: what it offers besides torch's own calls."""

from dpcore.torch_backend.backend import (
    Options,
    communicator_of,
    create,
    device_communicator_over,
    flight_record,
    register,
    write_flight_record,
)

__all__ = [
    "Options",
    "communicator_of",
    "create",
    "device_communicator_over",
    "flight_record",
    "register",
    "write_flight_record",
]
