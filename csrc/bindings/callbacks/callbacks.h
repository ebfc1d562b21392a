// Python objects as what the reducer knows by its interfaces: a communicator, a hook, a schedule.
// Each call takes the GIL, and the object is dropped with it too.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>

#include "reducer/bucket/bucket_communicator.h"
#include "reducer/launch/launch_schedule.h"

namespace dpcore {

// For MPI, CuPy, or whatever is like them. `group`: rank, world_size, all_reduce(tensor, op=...,
// async_op=True) -> object with wait(). Where it has a `_recorder`, a communicator of the core,
// events go to that one's recorder. On a GPU, and on the device of the host where tests give the
// group one (`_copies_on`), the gradients of a bucket are copied at once.
std::shared_ptr<BucketCommunicator> python_bucket_communicator(pybind11::object group,
                                                               at::Device device);

// Runs instead of a bucket's all-reduce. `runner`: start(bucket), wait(bucket), abandon(bucket);
// see dpcore/ddp/torch_face/comm_hooks.py.
std::unique_ptr<BucketHook> python_hook(pybind11::object runner);

// `schedule`: a name, or an object with the methods of dpcore.LaunchSchedule.
std::shared_ptr<LaunchSchedule> launch_schedule_of(const pybind11::object& schedule);

}  // namespace dpcore
